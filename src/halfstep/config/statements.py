"""What was said, where: a layer is a list of statements, and every value of a config remembers its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from halfstep.errors import ConfigError

Layer = Literal["default", "demo", "preset", "file", "override", "flag"]
LAYERS: tuple[Layer, ...] = ("demo", "preset", "file", "override", "flag")
"""From the weakest to the strongest; a default is what no layer speaks of."""

OPEN_SECTIONS = ("globals", "precision.modules", "model.options")
"""Sections whose keys belong to the user; a value below them is taken whole."""


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
    """One value for one setting (its full path), and who said so."""

    path: str
    value: object
    origin: Origin

    def __str__(self) -> str:
        """As the user would find it again: flags and overrides show their value themselves."""
        if self.origin.layer in ("flag", "override"):
            return f"`{self.origin.where}`"
        return f"`{self.origin.key}: {self.value}` ({self.origin.where})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """A value of a higher layer that replaced a different one of a lower layer."""

    key: str
    value: object
    origin: Origin
    replaced_value: object
    replaced: Origin

    def __str__(self) -> str:
        return f"{self.key} = {self.value} ({self.origin}) overrides {self.replaced_value} ({self.replaced})"


def leaves(mapping: Mapping[str, object], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every value with its key path; what stands below an open section is one value."""
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise ConfigError(f"{'.'.join((*prefix, repr(key)))}: a key must be text", fix="quote the key")
        path = (*prefix, key)
        is_section = isinstance(value, Mapping) and not open_section_of(".".join(path))
        # An empty section says nothing, but an unknown one must still be noticed.
        if is_section and value:
            yield from leaves(value, path)  # type: ignore[arg-type]
        else:
            yield path, value


def open_section_of(path: str) -> str:
    """The open section this path lies in, or an empty string."""
    return next((section for section in OPEN_SECTIONS if path.startswith(section + ".")), "")
