"""Config files of other projects: read by their own rules, then asked of each family, which may translate one.

Their files are OmegaConf's: `${trainer.max_steps}` names any key, `${.NUM_GPUS}` one beside it, `${mul: a, b}` counts.
Words of the command line in the file's own keys (`globals.BATCH_SIZE_PER_GPU=4`) change the file before it is read, so
that what follows from them follows; all others are ours, on top of the translation.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halfstep.config.arithmetic import counted_by
from halfstep.config.section import Plain, typed
from halfstep.config.statements import Origin, Statement, override_statements
from halfstep.config.yaml_source import Document
from halfstep.errors import ConfigError

INNERMOST = re.compile(r"\$\{([^${}]*)\}")
MOST_REFERENCES = 20
"""Keys that name one another in a row: more go round in a circle."""
MOST_LOOKUPS = 10_000
"""References of one file, those inside what they name included: a kilobyte of nested ones may mean billions."""
Place = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Another project's config in our settings."""

    workload: str
    values: Mapping[str, Any]
    """By our paths: `{"train.max_steps": 300_000}`."""
    used: Iterable[str] = ()
    """Their keys, or whole sections, that `values` came from; those in neither `used` nor `unused` are listed as not
    understood."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Their keys, or whole sections, that change nothing here, and why."""
    notes: Iterable[str] = ()
    """What else its author should read, such as a key that means something else there."""


class Translator(Protocol):
    def claim(self, document: Mapping[str, Any], name: str) -> Foreign | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """What a foreign file says in our settings, which words were spent on it, and what to tell of it."""

    said: list[Statement]
    overrides: list[str]
    """Those that are ours."""
    notes: list[str]


def translated(document: Document, overrides: Sequence[str], families: Iterable[Translator]) -> Translation | None:
    """The file as the first family that knows it translates it; None where nobody does."""
    own: list[str] = []
    theirs: list[str] = []
    for word in overrides:
        key = word.partition("=")[0].strip()
        (theirs if has_key(document.values, key) else own).append(word)
    values = resolved(with_words(document.values, theirs))
    found = next((f for family in families if (f := family.claim(values, document.name)) is not None), None)
    if found is None:
        return None
    origin = Origin(layer="file", where=document.name)
    settings = {"workload": found.workload, **found.values}
    said = [Statement(path=path, value=value, origin=origin) for path, value in settings.items()]
    return Translation(said=said, overrides=own, notes=notes_of(found, values, document, theirs))


def notes_of(found: Foreign, values: Mapping[str, Any], document: Document, words: Sequence[str]) -> list[str]:
    """Every key is translated or named."""
    keys = list(key_paths(values))
    unused = {key: why for key in keys if (why := below(found.unused, key)) is not None}
    used = dict.fromkeys(found.used, "")
    strange = [key for key in keys if key not in unused and below(used, key) is None]
    changed = f", with {', '.join(words)}" if words else ""
    return [
        f"{document.name} is another project's: translated to {found.workload}{changed}",
        *found.notes,
        *(f"{key} is not used: {why}" for key, why in unused.items()),
        *(f"{key} is not used: {found.workload} has no such setting" for key in strange),
    ]


def below(sections: Mapping[str, str], key: str) -> str | None:
    """What is said of a key, or of a section it lies in."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((sections[name] for name in names if name in sections), None)


def key_paths(values: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from key_paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def has_key(values: Mapping[str, Any], path: str) -> bool:
    *parents, name = path.split(".")
    section: Any = values
    for parent in parents:
        section = section.get(parent) if isinstance(section, Mapping) else None
    return isinstance(section, Mapping) and name in section


def with_words(values: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    for statement in override_statements(words):
        *parents, name = statement.path.split(".")
        section = changed
        for parent in parents:
            section = section[parent]
        section[name] = statement.value
    return changed


# --- references ---


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain Python values, every reference replaced."""
    references = References(values)
    return {key: references(value, (key,)) for key, value in values.items()}


class References:
    """Replaces the references of one file, each read where it stands: `${.a}` is beside the key that says it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.num_looked_up = 0

    def __call__(self, value: Any, place: Place, depth: int = 0) -> Any:
        if depth > MOST_REFERENCES:
            raise ConfigError(f"{'.'.join(place)} refers to itself", fix="give it a value of its own")
        if isinstance(value, Mapping):
            return {key: self(item, (*place, key), depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self(item, place, depth) for item in value]
        if not isinstance(value, str):
            return value
        if "${" not in value:
            return typed(value) if isinstance(value, Plain) else str(value)
        return self._replaced(value, place, depth)

    def _replaced(self, text: str, place: Place, depth: int) -> Any:
        """From the innermost reference outwards; one that stands alone keeps its type."""
        while match := INNERMOST.search(text):
            value = self._looked_up(match[1].strip(), place, depth)
            if match.span() == (0, len(text)):
                return value
            if isinstance(value, (list, Mapping)):
                raise ConfigError(
                    f"{'.'.join(place)}: ${{{match[1]}}} is not a single value and cannot stand in a text"
                )
            text = text[: match.start()] + ("null" if value is None else str(value)) + text[match.end() :]
        if "${" in text:
            raise ConfigError(f"{'.'.join(place)}: {text!r} has an open ${{", fix="close it with }")
        return typed(text)

    def _looked_up(self, reference: str, place: Place, depth: int) -> Any:
        self.num_looked_up += 1
        if self.num_looked_up > MOST_LOOKUPS:
            at = f"{'.'.join(place)}: ${{{reference}}}"
            raise ConfigError(f"{at} is one of more than {MOST_LOOKUPS:,} references", fix="let keys name fewer others")
        name, is_function, arguments = reference.partition(":")
        if is_function:
            return counted_by(name.strip(), arguments, ".".join(place))
        num_up = len(name) - len(name.lstrip("."))
        path = (*(place[: len(place) - num_up] if num_up else ()), *name.lstrip(".").split("."))
        if not has_key(self.values, ".".join(path)):
            fix = f"set {'.'.join(path)}"
            raise ConfigError(f"{'.'.join(place)}: ${{{reference}}} names a key that is not there", fix=fix)
        found: Any = self.values
        for part in path:
            found = found[part]
        return self(found, path, depth + 1)
