"""`key.sub=value` words and flags as statements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from halfstep.config.aliases import PRECISION_NAMES
from halfstep.config.scalars import Plain
from halfstep.config.statements import Layer, Origin, Statement, leaves
from halfstep.config.yaml_source import Document, parse_flow
from halfstep.errors import ConfigError

KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[^=\s]+)*")


def override_statements(words: Sequence[str]) -> list[Statement]:
    """One statement per word; a mapping value (`globals={A: 1}`) is as many statements as it has keys."""
    return [statement for word in words for statement in parse_override(word)]


def parse_override(word: str) -> list[Statement]:
    key, equals, text = word.partition("=")
    key = key.strip()
    if not equals:
        is_precision = word.lower() in PRECISION_NAMES
        fix = f"--precision {word}" if is_precision else "write key=value, such as train.epochs=3 or optimizer.lr=1e-3"
        raise ConfigError(f"{word!r} is not an override", fix=fix)
    if not KEY.fullmatch(key):
        raise ConfigError(f"{word!r}: {key!r} is not a key", fix="write key=value, such as train.epochs=3")
    origin = Origin(layer="override", where=word, key=key)
    return statements_of({key: parse_value(text.strip(), word)}, lambda _: origin)


def parse_value(text: str, word: str) -> object:
    """`[a, b]`, `{a: 1}` and quoted text as YAML has them; anything else is plain text, whatever it holds."""
    if not text:
        # `data.dir=$UNSET` must not quietly mean null.
        return ""
    return parse_flow(text, f"override {word}") if text[:1] in ("[", "{", '"', "'") else Plain(text)


def flag_statements(flags: Mapping[str, object]) -> list[Statement]:
    """Flags by name (`data_dir`, `bf16`); None means the flag was not given."""

    def origin_of(path: tuple[str, ...]) -> Origin:
        flag, value = "--" + path[0].replace("_", "-"), flags[path[0]]
        return Origin(layer="flag", where=flag if value is True else f"{flag} {value}", key=flag)

    given = {name: value for name, value in flags.items() if value is not None}
    return statements_of(given, origin_of)


def file_statements(document: Document) -> list[Statement]:
    """What a YAML file says, with its lines."""

    def origin_of(path: tuple[str, ...]) -> Origin:
        line = document.lines.get(path)
        return Origin(layer="file", where=f"{document.name}:{line}" if line else document.name, key=".".join(path))

    return statements_of(document.values, origin_of)


def layer_statements(values: Mapping[str, object], layer: Layer, where: str) -> list[Statement]:
    """What a dict of a Python caller or a preset says."""
    return statements_of(values, lambda path: Origin(layer=layer, where=where, key=".".join(path)))


def statements_of(values: Mapping[str, object], origin_of: Callable[[tuple[str, ...]], Origin]) -> list[Statement]:
    return [Statement(path=".".join(path), value=value, origin=origin_of(path)) for path, value in leaves(values)]
