"""Another project's document, and which of its keys were read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfstep.errors import ConfigError


class Reader:
    """A document and the keys that were read from it."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        self.used: set[str] = {"globals"}
        self.unused: dict[str, str] = {}

    def __call__(self, path: str, default: Any = None) -> Any:
        """The value of a key, noted as used where it is there."""
        parent, _, name = path.rpartition(".")
        section = self.section(parent) if parent else self.document
        if name not in section:
            return default
        self.used.add(path)
        return default if section[name] is None else section[name]

    def note(self, section: str, *keys: str) -> None:
        """Keys that follow from others are used, too."""
        for key in keys:
            self(f"{section}.{key}")

    def section(self, path: str) -> Mapping[str, Any]:
        """A mapping, empty where there is none; its keys are not noted."""
        found: Any = self.document
        for part in path.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def parts(self, path: str) -> dict[str, Mapping[str, Any]]:
        """The mappings of a section by their names, in the file's order."""
        named = self.section(path).items()
        if wrong := [name for name, given in named if not isinstance(given, Mapping)]:
            raise ConfigError(f"{path}.{wrong[0]} is not a mapping", fix="its keys below it, `name` first")
        return dict(named)

    def values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Our settings by their keys; an empty key (`ckpt_path:`) says nothing."""
        found = {ours: self(theirs) for ours, theirs in keys.items()}
        return {ours: value for ours, value in found.items() if value is not None}

    def must_be(self, path: str, *allowed: Any, why: str) -> None:
        """A key that is not there says nothing."""
        value = self(path)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{path} is {value}",
                why=why,
                fix=f"{path}: {' or '.join(map(str, allowed))}" if allowed else f"leave {path} out",
            )
