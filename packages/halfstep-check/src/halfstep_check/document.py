"""Config files as trees that record the position of every value: YAML, JSON and TOML, read without running anything.

JSON is read by the YAML reader (tabs become spaces of the same width first), so that both keep exact positions.
`tomllib` has no positions: TOML lines are found by scanning for `[section]` and `key =`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from halfstep_check.findings import Edit, Place, split_lines
from halfstep_check.shared.config_text import MAX_DEPTH, MAX_NODES, compose_node, parse_json, parse_scalar
from halfstep_check.shared.errors import ConfigError

MAX_CHARACTERS = 200_000
"""Training configs are a few kB; beyond this it is a data file, and reading it would only cost time."""

Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A value of a config file and the place where it is written."""

    value: Scalar | dict[str, Node] | list[Node]
    path: str
    start: tuple[int, int]
    end: tuple[int, int]
    quote: str = ""
    key_start: tuple[int, int] | None = None

    @property
    def place(self) -> Place:
        line, column = self.key_start or self.start
        return Place(path=self.path, line=line, column=column)

    @property
    def scalar(self) -> Scalar:
        return None if isinstance(self.value, (dict, list)) else self.value

    def get(self, dotted: str) -> Node | None:
        """Return the node at `a.b.c`, or None; a literal key with dots in it is found too."""
        if not isinstance(self.value, dict):
            return None
        if dotted in self.value:
            return self.value[dotted]
        head, _, rest = dotted.partition(".")
        child = self.value.get(head)
        return child.get(rest) if child is not None and rest else None

    def scalar_at(self, dotted: str) -> Scalar:
        node = self.get(dotted)
        return None if node is None else node.scalar

    def has(self, *dotted: str) -> bool:
        return all(self.get(key) is not None for key in dotted)

    def walk(self, prefix: str = "") -> Iterator[tuple[str, Node]]:
        """Return every node below this one with its dotted path."""
        if isinstance(self.value, dict):
            for key, child in self.value.items():
                yield f"{prefix}{key}", child
                yield from child.walk(f"{prefix}{key}.")

    def rewritten(self, text: str) -> Edit:
        """Return the edit that writes another scalar here, in the quotes used there now."""
        return Edit(path=self.path, start=self.start, end=self.end, replacement=f"{self.quote}{text}{self.quote}")


def read_document(text: str, path: str) -> Node:
    """Return the tree of a YAML, JSON or TOML file; what cannot be read is a ConfigError with the line."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            f"{path}: {len(text):,} characters are too many for a training config",
            why=f"check reads configs up to {MAX_CHARACTERS:,} characters",
            fix="give the config itself, not a data file",
        )
    if path.endswith(".toml"):
        return read_toml(text, path)
    if path.endswith(".json"):
        return read_json(text, path)
    return read_yaml(text, path)


def read_json(text: str, path: str) -> Node:
    try:
        parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not JSON: {error.msg}", fix="correct the file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON config: {error}", fix="give the config itself") from error
    return read_yaml(text.replace("\t", " "), path)


def read_yaml(text: str, path: str) -> Node:
    """Return the first document of a YAML text: the project's one reader composes, we keep the positions."""
    root = compose_node(text, path)
    if root is None:
        return Node(value=None, path=path, start=(1, 0), end=(1, 0))
    return YamlTree(path).node(root)


class YamlTree:
    """Turns composed YAML nodes into ours; nesting and aliases are bounded, no tag is obeyed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.visited = 0
        self.ancestors: list[yaml.Node] = []

    def node(self, source: yaml.Node, key: yaml.Node | None = None) -> Node:
        self.visited += 1
        if source in self.ancestors:
            raise self.refuse(source, "an anchor contains itself")
        if self.visited > MAX_NODES or len(self.ancestors) >= MAX_DEPTH:
            raise self.refuse(source, f"more than {MAX_NODES:,} values or {MAX_DEPTH} levels, aliases followed")
        self.ancestors.append(source)
        value = self.value(source)
        self.ancestors.pop()
        return Node(
            value=value,
            path=self.path,
            start=find_position(source.start_mark),
            end=find_position(source.end_mark),
            quote=source.style if isinstance(source, yaml.ScalarNode) and source.style in ("'", '"') else "",
            key_start=find_position(key.start_mark) if key is not None else None,
        )

    def value(self, source: yaml.Node) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(source, yaml.ScalarNode):
            return read_scalar(source.value) if source.style is None else str(source.value)
        if isinstance(source, yaml.SequenceNode):
            return [self.node(item) for item in source.value]
        return self.mapping(source)

    def mapping(self, source: yaml.Node) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, child in source.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name == "<<":
                inner = self.node(child).value
                merged |= inner if isinstance(inner, dict) else {}
                continue
            if name in entries:
                raise self.refuse(key, f"key {name!r} appears twice, first in line {entries[name].place.line}")
            entries[name] = self.node(child, key)
        return {**merged, **entries}

    def refuse(self, source: yaml.Node, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}:{source.start_mark.line + 1}: {problem}", fix="correct the file")


def find_position(mark: yaml.Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column


def read_scalar(text: str) -> Scalar:
    try:
        value = parse_scalar(text)
    except ValueError:  # an integer of thousands of digits
        return text
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def read_toml(text: str, path: str) -> Node:
    import tomllib  # here: most configs are not TOML, and it takes 5 ms to load

    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", fix="correct the file") from error
    return make_toml_node(tree, path, find_toml_positions(text), prefix="")


MAX_TOML_LINE = 500
"""Longer lines hold no setting of ours, and patterns over them could take long."""
SECTION = re.compile(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(#.*)?$")
ENTRY = re.compile(r"""(\s*)([\w."'-]+)\s*=\s*("[^"]*"|'[^']*'|[^#\s]+)""")


def find_toml_positions(text: str) -> dict[str, tuple[int, int, int, int]]:
    """Return a mapping from dotted keys to (line, key column, first and last column of the value)."""
    found: dict[str, tuple[int, int, int, int]] = {}
    section = ""
    for number, line in enumerate(split_lines(text), start=1):
        if len(line) > MAX_TOML_LINE:
            continue
        if header := SECTION.match(line):
            section = header.group(1) + "."
        elif entry := ENTRY.match(line):
            found.setdefault(section + entry.group(2), (number, len(entry.group(1)), entry.start(3), entry.end(3)))
    return found


Positions = dict[str, tuple[int, int, int, int]]


def make_toml_node(value: object, path: str, positions: Positions, prefix: str, depth: int = 0) -> Node:
    line, key_column, first, last = positions.get(prefix, (1, 0, 0, 0))
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: nested deeper than {MAX_DEPTH} levels", fix="correct the file")
    inner: Scalar | dict[str, Node] | list[Node]
    if isinstance(value, dict):
        dot = f"{prefix}." if prefix else ""
        inner = {key: make_toml_node(item, path, positions, f"{dot}{key}", depth + 1) for key, item in value.items()}
    elif isinstance(value, list):
        inner = [make_toml_node(item, path, positions, prefix, depth + 1) for item in value]
    else:
        inner = value if isinstance(value, (str, int, float, bool)) else str(value)
    return Node(
        value=inner,
        path=path,
        start=(line, first),
        end=(line, last),
        quote='"' if isinstance(value, str) else "",
        key_start=(line, key_column),
    )
