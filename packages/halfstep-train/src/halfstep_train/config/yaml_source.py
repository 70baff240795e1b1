"""Read YAML files as values with line numbers, without YAML's traps.

PyYAML scans and composes; we walk its nodes ourselves. That keeps the text of every scalar (its type is decided later,
see `Plain`), reports duplicate keys with both lines, and never builds an object for a tag. Anchors and `<<` work within
bounds, because a few lines of nested aliases could otherwise expand to gigabytes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from halfstep.errors import ConfigError, suggest_command
from halfstep_train.config.section import Plain

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40
ALLOWED_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "map", "seq", "int", "float", "bool", "null")}
"""`!!float 1e-4`, as some projects write it, is read as the same number without the tag."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The values of one YAML file, and the line of every key path."""

    name: str
    values: dict[str, object]
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)

    def merge(self, other: Document) -> Document:
        """Return this document with the values of another file on top; values from that file have no line."""
        name = f"{self.name} with {other.name}"
        lines = {**self.lines, **dict.fromkeys(other.lines, 0)}
        lines = {path: line for path, line in lines.items() if line}  # a line number alone is ambiguous with two files
        return Document(name=name, values=_merge(self.values, other.values), lines=lines)


def _merge(one: object, other: object) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return {**one, **{key: _merge(one[key], value) if key in one else value for key, value in other.items()}}


class NodeLoader(yaml.SafeLoader):
    """Compose nodes without resolving types: every plain scalar stays the text that was written."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, Any]]] = {}


def read_yaml(path: Path) -> Document:
    """Read a YAML file; an error names the line at which it is invalid."""
    return parse_yaml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a config file as text; refuse folders, huge files and other encodings."""
    if not path.exists():
        raise ConfigError(
            f"no such config file: {path}", fix="give the path of a YAML file, or a workload such as unet"
        )
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder, not a config file",
            fix=f"to continue a run: {suggest_command('train', '--resume', path)}; to name a data folder: --data-dir",
        )
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", fix="check its permissions") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{path} has {len(content):,} bytes",
            why=f"a config is smaller than {MAX_BYTES:,} bytes",
            fix="give the path of a YAML config",
        )
    return decode_text(content, path)


def decode_text(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{path}:{line}: byte {content[error.start]:#04x} is not UTF-8 text", fix="save the file as UTF-8"
        ) from error


def parse_yaml(text: str, name: str) -> Document:
    """Parse a text that must be a mapping; `name` is used in errors."""
    root = compose_node(text, name)
    if root is None:
        return Document(name=name, values={})
    if not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else f"the text {textwrap.shorten(root.value, 60)!r}"
        raise ConfigError(f"{name}: expected `key: value` settings, found {kind}", fix="start with `workload: unet`")
    walk = Walk(name)
    values = walk.read_value(root, ())
    assert isinstance(values, dict)
    return Document(name=name, values=values, lines=walk.lines)


def parse_flow(text: str, name: str) -> object:
    """Parse one value written in YAML's flow style: `[a, b]`, `{a: 1}`, `"quoted"`."""
    node = compose_node(text, name)
    return None if node is None else Walk(name).read_value(node, ())


def compose_node(text: str, name: str) -> yaml.Node | None:
    """Parse a text into PyYAML's nodes; an error names line and column."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=NodeLoader)
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "an unknown position"
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{name}: bad YAML at {at}: {problem}", fix=suggest_yaml_fix(problem, text)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: bad YAML: {' '.join(str(error).split())}", fix="save it as plain text") from error
    except RecursionError:
        raise ConfigError(
            f"{name}: nested too deeply", why=f"more than {MAX_DEPTH} levels", fix="use fewer levels"
        ) from None


def suggest_yaml_fix(problem: str, text: str) -> str:
    if "${" in text and "flow" in problem:
        return 'quote a reference inside { } or [ ]: "${globals.NAME}"'
    if "\n" not in text:
        return "close every quote and bracket"
    if "\\t" in problem:
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "quote a value that contains `: `, and check the indentation"
    return "check the line above as well: a missing colon, quote or bracket is often there"


class Walk:
    """One pass over the nodes of a document: collects values and lines, and enforces the bounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[tuple[str, ...], int] = {}
        self.num_visited = 0

    def read_value(self, node: yaml.Node, path: tuple[str, ...], depth: int = 0) -> object:
        self.num_visited += 1
        # An anchor that contains itself ends here, too.
        if self.num_visited > MAX_NODES or depth >= MAX_DEPTH:
            why = f"a config has at most {MAX_NODES:,} values, {MAX_DEPTH} levels deep, aliases expanded"
            raise self.make_error(node, "too large or nested too deeply", fix="use fewer aliases", why=why)
        if node.tag not in ALLOWED_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise self.make_error(node, f"the tag {tag} is not allowed", fix="write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self.read_mapping(node, path, depth + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.read_value(item, path, depth + 1) for item in node.value]
        # Only unquoted text may turn into a number or a bool.
        return Plain(node.value) if is_unquoted(node) else str(node.value)

    def read_mapping(self, node: yaml.MappingNode, path: tuple[str, ...], depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        first_lines: dict[str, int] = {}
        # YAML's rule: own keys win over merged mappings, which therefore come first.
        for key_node, value_node in sorted(node.value, key=lambda pair: not is_merge(pair[0])):
            key, line = key_node.value, key_node.start_mark.line + 1
            if is_merge(key_node):
                values = self.read_bases(value_node, path, depth)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.make_error(
                    key_node, "a key must be text, not a list or a mapping", fix="write `name: value`"
                )
            if key in first_lines:
                both = f"lines {first_lines[key]} and {line}"
                raise ConfigError(
                    f"{self.name}: {'.'.join((*path, key))} is set twice, on {both}", fix="keep one of them"
                )
            name, colon, value = key.partition(":")
            # YAML reads `{a:1}` as the key `a:1` without a value.
            if node.flow_style and colon and value and is_unquoted(key_node) and value_node.value == "":
                raise self.make_error(key_node, f"{key!r} has no space after its colon", fix=f"{{{name}: {value}}}")
            first_lines[key] = self.lines[(*path, key)] = line
            values[key] = self.read_value(value_node, (*path, key), depth)
        return values

    def read_bases(self, node: yaml.Node, path: tuple[str, ...], depth: int) -> dict[str, object]:
        """Read what `<<` merges; the earlier of several mappings wins."""
        merged: dict[str, object] = {}
        for base in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            values = self.read_value(base, path, depth)
            if not isinstance(values, dict):
                anchor = "refer to a mapping by its anchor: `<<: *NAME`"
                raise self.make_error(base, f"`<<` merges mappings, not {values!r}", fix=anchor)
            merged = {**values, **merged}
        return merged

    def make_error(self, node: yaml.Node, what: str, *, fix: str, why: str = "") -> ConfigError:
        return ConfigError(f"{self.name}:{node.start_mark.line + 1}: {what}", why=why, fix=fix)


def is_merge(key_node: yaml.Node) -> bool:
    return is_unquoted(key_node) and key_node.value == "<<"


def is_unquoted(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None
