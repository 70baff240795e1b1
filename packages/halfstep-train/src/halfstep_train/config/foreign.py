"""Translate config files of other projects: read them by those projects' rules, then ask each family to translate.

An override in one of the file's keys (`globals.BATCH_SIZE_PER_GPU=4`) changes the file before it is read, so that
values derived from that key follow. All other overrides are in halfstep's keys and apply on top of the translation.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halfstep.errors import ConfigError
from halfstep_train.config.references import Place, References
from halfstep_train.config.section import Plain, parse_scalar
from halfstep_train.config.statements import Statement, iterate_leaves, make_layer_statements, parse_overrides
from halfstep_train.config.yaml_source import Document


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """Another project's config, translated to our settings."""

    workload: str
    values: Mapping[str, Any]
    """By halfstep's paths: `{"train.max_steps": 300_000}`."""
    used: Iterable[str] = ()
    """Foreign keys or whole sections that `values` came from; keys in neither `used` nor `unused` are reported as
    unknown."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Foreign keys or whole sections that have no effect in halfstep, and why."""
    notes: Iterable[str] = ()
    """Further notes for the user, such as a key that means something else in that project."""


class Translator(Protocol):
    def translate_config(self, document: Mapping[str, Any]) -> Foreign | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A foreign file as statements in our settings, the overrides that remain, and notes for the user."""

    statements: list[Statement]
    overrides: list[str]
    """The overrides in halfstep's keys."""
    notes: list[str]


def translate_document(
    document: Document, overrides: Sequence[str], families: Iterable[Translator]
) -> Translation | None:
    """Translate the file with the first family that recognises it; None if no family does."""
    families = list(families)
    inside = [override for override in overrides if find_section(document.values, get_key(override)) is not None]
    known = claim_document(document, inside, families)
    if known is None:
        return None
    # An override belongs to the file if the file has its key, or if the translator reads that key when it is present.
    used = set(known[1].used)
    theirs = [o for o in inside if has_key(document.values, get_key(o)) or get_key(o) in used]
    own = [override for override in overrides if override not in theirs]
    values, found = claim_document(document, theirs, families) or known
    statements = make_layer_statements({"workload": found.workload, **found.values}, "file", document.name)
    return Translation(statements=statements, overrides=own, notes=make_notes(found, values, document, theirs))


def claim_document(
    document: Document, overrides: Sequence[str], families: Iterable[Translator]
) -> tuple[dict[str, Any], Foreign] | None:
    """Apply overrides in the file's keys; return its values and the first family's translation of them."""
    values = resolve_document(apply_overrides(document.values, overrides))
    found = next((f for family in families if (f := family.translate_config(values)) is not None), None)
    return None if found is None else (values, found)


def get_key(override: str) -> str:
    return override.partition("=")[0].strip()


def make_notes(found: Foreign, values: Mapping[str, Any], document: Document, overrides: Sequence[str]) -> list[str]:
    """Return the notes of a translation; every key is either translated or listed as not used."""
    keys = list(flatten_keys(values))
    # Reasons may be given for a whole section; the innermost one applies.
    unused = {key: why for key in keys if (why := find_enclosing(found.unused, key)) is not None}
    used = dict.fromkeys(found.used, "")
    strange = [key for key in keys if key not in unused and find_enclosing(used, key) is None]
    unused |= dict.fromkeys(strange, f"not a key of such files; settings of {found.workload} can follow as KEY=VALUE")
    # One note per reason, so that a long file does not print a line per key.
    by_reason = {why: [key for key in unused if unused[key] == why] for why in unused.values()}
    changed = f", with {', '.join(overrides)}" if overrides else ""
    return [
        f"{document.name} is a config of another project: translated to {found.workload}{changed}",
        *found.notes,
        *(f"{', '.join(one)} {'is' if len(one) == 1 else 'are'} not used: {why}" for why, one in by_reason.items()),
    ]


def find_enclosing(sections: Mapping[str, str], key: str) -> str | None:
    """Return the text for a key, or for the innermost section that contains it."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((sections[name] for name in names if name in sections), None)


def flatten_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values by the full path of their key."""
    return {".".join(path): value for path, value in iterate_leaves(values)}


def has_key(values: Mapping[str, Any], path: str) -> bool:
    return path.rpartition(".")[2] in (find_section(values, path) or {})


def find_section(values: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    """Return the section that a key belongs to, or None if it does not exist."""
    section: Any = values
    for parent in path.split(".")[:-1]:
        section = section.get(parent) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else None


def apply_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(values))
    for statement in parse_overrides(overrides):
        section = find_section(changed, statement.path)
        assert isinstance(section, dict), "only overrides inside sections of the file get here"
        section[statement.path.rpartition(".")[2]] = statement.value
    return changed


def resolve_document(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain Python values with every reference replaced."""

    def find(name: str, place: Place, at: str) -> tuple[Any, Place]:
        # OmegaConf: each leading dot goes up one section from the key that holds the reference.
        num_up = len(name) - len(name.lstrip("."))
        path = (*(place[: len(place) - num_up] if num_up else ()), *name.lstrip(".").split("."))
        if not has_key(values, ".".join(path)):
            raise ConfigError(f"{at}: ${{{name}}} refers to a key that does not exist", fix=f"set {'.'.join(path)}")
        return functools.reduce(operator.getitem, path, values), path

    replaced = References(find, lambda text: parse_scalar(text) if isinstance(text, Plain) else str(text))
    return {key: replaced(value, (key,)) for key, value in values.items()}


# --- used by the families' translators ---


class ForeignReader:
    """Reads a foreign document and records which of its keys were used."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        # Globals are read through references, not by the translator.
        self.used: set[str] = {"globals"}
        self.unused: dict[str, str] = {}

    def __call__(self, path: str, default: Any = None) -> Any:
        """Return the value of a key and record it as used, if it exists."""
        parent, _, name = path.rpartition(".")
        section = self.section(parent) if parent else self.document
        if name not in section:
            return default
        self.used.add(path)
        return default if section[name] is None else section[name]

    def section(self, path: str) -> Mapping[str, Any]:
        """Return a section, empty if it does not exist; its keys are not recorded as used."""
        return find_section(self.document, f"{path}.") or {}

    def parts(self, path: str) -> dict[str, Mapping[str, Any]]:
        """Return the mappings in a section by their names, in the file's order."""
        named = self.section(path).items()
        if wrong := [name for name, given in named if not isinstance(given, Mapping)]:
            raise ConfigError(
                f"{path}.{wrong[0]} is not a mapping", fix="write a mapping: `name` first, then its settings"
            )
        return dict(named)

    def values(self, keys: Mapping[str, str]) -> dict[str, Any]:
        """Return halfstep's settings from foreign keys; an empty key (`ckpt_path:`) is ignored."""
        found = {ours: self(theirs) for ours, theirs in keys.items()}
        return {ours: value for ours, value in found.items() if value is not None}

    def must_be(self, path: str, *allowed: Any, why: str) -> None:
        """Refuse a value that is not allowed; a missing key is fine."""
        value = self(path)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{path} is {value}",
                why=why,
                fix=f"{path}: {' or '.join(map(str, allowed))}" if allowed else f"leave {path} out",
            )
