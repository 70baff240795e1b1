"""The keys of a schema, and the way from any spelling of a key to its full path."""

from __future__ import annotations

import difflib
import functools
from dataclasses import replace

from pydantic.fields import FieldInfo

from halfstep.config.aliases import KEY_ALIASES, PRECISION_KEYS
from halfstep.config.scalars import NULLS, Plain
from halfstep.config.section import Section
from halfstep.config.statements import OPEN_SECTIONS, Statement, open_section_of
from halfstep.errors import ConfigError

NEAR = 0.6
"""Similarity (difflib) from which a name is worth suggesting: one typo in five letters stays above it."""
ABBREVIATED = 0.9
"""Likeness of `rotat` to `rotate_degrees`."""
CLEARLY_WORSE = 0.1
"""Suggestions this much below the best one are noise."""


@functools.cache
def fields_of(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Every setting of a schema by its full path."""
    fields: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= fields_of(kind, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def field_at(schema: type[Section], path: str) -> FieldInfo:
    """The field a path belongs to; keys of an open section share that section's."""
    return fields_of(schema)[open_section_of(path) or path]


def sections_of(schema: type[Section]) -> set[str]:
    """Paths that hold settings, not values: `train`, `data`, `data.augment`."""
    paths = (path.split(".")[:-1] for path in fields_of(schema))
    return {".".join(parts[:length]) for parts in paths for length in range(1, len(parts) + 1)} | set(OPEN_SECTIONS)


def canonical(statement: Statement, schema: type[Section]) -> Statement | None:
    """The statement with its full path (precision keys keep theirs), or None when it says nothing."""
    if open_section_of(statement.path):
        return statement
    path = statement.path.replace("-", "_")
    if path in PRECISION_KEYS:
        return replace(statement, path=path)
    if path in sections_of(schema) and is_empty(statement.value):
        return None
    if path in KEY_ALIASES:
        alias = KEY_ALIASES[path]
        return replace(statement, path=alias.path, value=alias.convert(statement.value))
    if path in sections_of(schema):
        example = next((key for key in fields_of(schema) if key.startswith(path + ".")), f"{path}.NAME")
        raise ConfigError(f"{statement}: {path} holds settings, not a value", fix=f"set one of them, such as {example}")
    if path not in fields_of(schema):
        raise ConfigError(f"unknown key {statement.path!r} ({statement.origin})", fix=suggestion(path, schema))
    return replace(statement, path=path)


def is_empty(value: object) -> bool:
    return value in (None, {}, "") or isinstance(value, Plain) and value.lower() in NULLS


def suggestion(path: str, schema: type[Section]) -> str:
    """The nearest settings, by full path or by last name, each with its full path."""
    names = dict.fromkeys(PRECISION_KEYS, "precision")
    names |= {key: alias.path for key, alias in KEY_ALIASES.items()}
    names |= {key: key for key in fields_of(schema)}
    scores: dict[str, float] = {}
    for spelling, target in names.items():
        # The last name weighs more: all settings of a section share the rest.
        score = 0.75 * likeness(last(path), last(spelling)) + 0.25 * likeness(path, spelling)
        scores[target] = max(scores.get(target, 0.0), score)
    best = max(scores.values())
    near = sorted((key for key in scores if scores[key] >= best - CLEARLY_WORSE), key=lambda key: -scores[key])[:3]
    if best >= NEAR:
        return f"did you mean {' or '.join(near)}?"
    return "`halfstep train WORKLOAD --show-config` lists every setting"


def last(path: str) -> str:
    return path.rpartition(".")[2]


def likeness(one: str, other: str) -> float:
    short, long = sorted((one.lower(), other.lower()), key=len)
    if len(short) > 2 and long.startswith(short):
        return ABBREVIATED
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
