"""Parse files, `key=value` overrides and flags into statements: one value for one setting, with its origin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import ConfigError
from halfstep.precision.names import PRECISION_NAMES
from halfstep_train.config.section import Plain
from halfstep_train.config.yaml_source import Document, parse_flow

Layer = Literal["default", "launcher", "demo", "preset", "file", "override", "flag"]
LAYERS: tuple[Layer, ...] = ("launcher", "demo", "preset", "file", "override", "flag")
"""From the weakest to the strongest; a default applies if no layer sets the value."""

OPEN_SECTIONS = ("globals", "precision.modules", "model.options")
"""Sections whose keys the user chooses; a value below them is not split into settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a value came from."""

    layer: Layer
    where: str = ""
    """`unet.yaml:3`, `--epochs 5`, `train.epochs=5`, `preset fast`; empty for a default."""
    key: str = ""
    """The key as the user wrote it."""

    def __str__(self) -> str:
        return self.where or self.layer


DEFAULT = Origin(layer="default")


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One value for one setting (its full path), and its origin."""

    path: str
    value: object
    origin: Origin

    def __str__(self) -> str:
        """Show it as the user wrote it: flags, overrides and variables already contain their value."""
        if self.origin.layer in ("flag", "override", "launcher"):
            return f"`{self.origin.where}`"
        return f"`{self.origin.key}: {self.value}` ({self.origin.where})"


@dataclass(frozen=True, slots=True)
class Override:
    """A setting whose value in one layer replaced a different value from a weaker layer."""

    key: str
    value: object
    origin: Origin
    replaced_value: object
    replaced: Origin

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.origin}) overrides {self.replaced_value} ({self.replaced})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """What the launcher of this process says: the number of ranks, and Accelerate's precision if one was chosen."""

    num_ranks: int = 1
    mixed_precision: str = ""

    def list_statements(self) -> list[Statement]:
        if not self.mixed_precision:
            return []
        origin = Origin(layer="launcher", where=f"{ACCELERATE_VARIABLE}={self.mixed_precision}")
        return [Statement(path="precision", value=self.mixed_precision, origin=origin)]


ACCELERATE_VARIABLE = "ACCELERATE_MIXED_PRECISION"


def iterate_leaves(
    mapping: Mapping[str, object], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield every value with its key path; a value below an open section is not split."""
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigError(f"{'.'.join((*prefix, repr(key)))}: a key must be text", fix="quote the key")
        path = (*prefix, key)
        is_section = isinstance(value, Mapping) and not find_open_section(".".join(path))
        # An empty section sets nothing, but an unknown one must still be noticed.
        if is_section and value:
            yield from iterate_leaves(value, path)  # type: ignore[arg-type]
        else:
            yield path, value


def find_open_section(path: str) -> str:
    """Return the open section that contains this path, or an empty string."""
    return next((section for section in OPEN_SECTIONS if path.startswith(section + ".")), "")


KEY = re.compile(r"[A-Za-z_][\w\-]*(\.[^=\s]+)*")


def parse_overrides(overrides: Sequence[str]) -> list[Statement]:
    """Return one statement per override; a mapping value (`globals={A: 1}`) gives one per key."""
    return [statement for override in overrides for statement in parse_override(override)]


def parse_override(override: str) -> list[Statement]:
    """Parse `key=value`; suggest what was meant if it is something else."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals:
        fix = "write key=value, such as train.epochs=3 or optimizer.lr=1e-3"
        if override.lower() in PRECISION_NAMES:
            fix = f"--precision {override}"
        elif override.lower().endswith((".yaml", ".yml")):
            fix = f"--config-overrides-file {override}; or name it instead of the workload, with `workload: NAME` in it"
        raise ConfigError(f"{override!r} is not an override", fix=fix)
    # `${...}` and spaces in a key are mistakes of quoting.
    if not KEY.fullmatch(key):
        raise ConfigError(f"{override!r}: {key!r} is not a key", fix="write key=value, such as train.epochs=3")
    origin = Origin(layer="override", where=override, key=key)
    return make_statements({key: parse_value(text.strip(), override)}, lambda _: origin)


def parse_value(text: str, override: str) -> object:
    """Parse `[a, b]`, `{a: 1}` and quoted text as YAML; anything else is plain text."""
    if not text:
        # `data.dir=$UNSET` must not silently mean null.
        return ""
    return parse_flow(text, f"override {override}") if text[:1] in ("[", "{", '"', "'") else Plain(text)


def parse_flags(flags: Mapping[str, object]) -> list[Statement]:
    """Return the statements of flags by name (`data_dir`, `bf16`); None means the flag was not given."""

    def make_origin(path: tuple[str, ...]) -> Origin:
        # A flag with a dict value has several paths; the flag is the first part of each.
        flag, value = "--" + path[0].replace("_", "-"), flags[path[0]]
        return Origin(layer="flag", where=flag if value is True else f"{flag} {value}", key=flag)

    given = {name: value for name, value in flags.items() if value is not None}
    return make_statements(given, make_origin)


def read_file_statements(document: Document) -> list[Statement]:
    """Return the statements of a YAML file, with their lines."""

    def make_origin(path: tuple[str, ...]) -> Origin:
        line = document.lines.get(path)
        return Origin(layer="file", where=f"{document.name}:{line}" if line else document.name, key=".".join(path))

    return make_statements(document.values, make_origin)


def make_layer_statements(values: Mapping[str, object], layer: Layer, where: str) -> list[Statement]:
    """Return the statements of a preset or of a Python caller's dict."""
    return make_statements(values, lambda path: Origin(layer=layer, where=where, key=".".join(path)))


def make_statements(values: Mapping[str, object], make_origin: Callable[[tuple[str, ...]], Origin]) -> list[Statement]:
    return [
        Statement(path=".".join(path), value=value, origin=make_origin(path)) for path, value in iterate_leaves(values)
    ]
