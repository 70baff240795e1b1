"""The keys of a schema: convert any spelling to the full path, and pydantic's errors to ConfigErrors."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import replace

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from halfstep.errors import ConfigError, suggest_nearest
from halfstep_train.config.aliases import HABITS, KEY_ALIASES, PER_RANK_KEYS, PRECISION_KEYS
from halfstep_train.config.section import NULLS, Plain, Section
from halfstep_train.config.statements import OPEN_SECTIONS, Statement, find_open_section

SIMILAR = 0.6
"""Similarity of last names (difflib) from which a setting is worth suggesting."""


@functools.cache
def list_fields(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every setting of a schema by its full path."""
    fields: dict[str, FieldInfo] = {}
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= list_fields(kind, f"{prefix}{name}.")
        else:
            fields[prefix + name] = field
    return fields


def find_field(schema: type[Section], path: str) -> FieldInfo:
    """Return the field of a path; keys of an open section share that section's field."""
    return list_fields(schema)[find_open_section(path) or path]


@functools.cache
def list_sections(schema: type[Section]) -> frozenset[str]:
    """Return the paths that hold settings, not values: `train`, `data`, `data.augment`."""
    paths = (path.split(".")[:-1] for path in list_fields(schema))
    inner = {".".join(parts[:length]) for parts in paths for length in range(1, len(parts) + 1)}
    return frozenset(inner | set(OPEN_SECTIONS))


def find_full_path(statement: Statement, schema: type[Section]) -> Statement | None:
    """Return the statement with its full path (precision keys keep theirs); None for an empty section."""
    if find_open_section(statement.path):
        return statement
    path = statement.path.replace("-", "_")
    # Precision keys depend on one another: precision_claims.py reads them together.
    if path in PRECISION_KEYS:
        return replace(statement, path=path)
    if path in list_sections(schema) and is_empty(statement.value):
        return None
    # Some workloads lack the setting that an alias names.
    alias = KEY_ALIASES.get(path)
    if alias is not None and alias.path in list_fields(schema):
        return replace(statement, path=alias.path, value=alias.convert(statement.value))
    if path in list_sections(schema):
        example = next((key for key in list_fields(schema) if key.startswith(path + ".")), f"{path}.NAME")
        raise ConfigError(
            f"{statement}: {path} is a section, not a value", fix=f"set one of its keys, such as {example}"
        )
    if path not in list_fields(schema):
        fix = HABITS.get(path.removeprefix("trainer.")) or suggest_key(path, schema)
        raise ConfigError(f"unknown key {statement.path!r} ({statement.origin})", fix=fix)
    return replace(statement, path=path)


def is_empty(value: object) -> bool:
    return value in (None, {}, "") or isinstance(value, Plain) and value.lower() in NULLS


def suggest_key(path: str, schema: type[Section]) -> str:
    """Suggest up to three settings whose last name begins like this one's, or else is the most similar."""
    names = dict.fromkeys(PRECISION_KEYS, "precision")
    names |= dict(zip(PER_RANK_KEYS, PER_RANK_KEYS, strict=True))
    names |= {key: alias.path for key, alias in KEY_ALIASES.items() if alias.path in list_fields(schema)}
    names |= {key: key for key in list_fields(schema)}
    settings: dict[str, list[str]] = {}
    for spelling, setting in names.items():
        settings.setdefault(spelling.rpartition(".")[2], []).append(setting)
    section, _, last = path.lower().rpartition(".")
    near = [name for name in settings if len(last) > 2 and name.startswith(last)]  # `rotat` for `rotate_degrees`
    near = near or difflib.get_close_matches(last, settings, 1, SIMILAR)
    meant = dict.fromkeys(setting for name in near for setting in settings[name])
    if not meant:
        return "`halfstep train WORKLOAD --show-config` lists every setting"
    same_section_first = sorted(meant, key=lambda setting: setting.rpartition(".")[0] != section)
    return f"did you mean {' or '.join(same_section_first[:3])}?"


NEXT_LINE = "\n" + " " * len("error: ")
"""Separates the lines of several settings, aligned with the text after `error: ` and `  fix: `."""


def make_config_error(
    error: ValidationError, statements: Mapping[str, Statement], schema: type[Section]
) -> ConfigError:
    """Make one error for all wrong settings, one line each."""
    details: dict[str, list[ErrorDetails]] = {}
    for detail in error.errors():
        # A union such as `auto` or a number gives one detail per member.
        details.setdefault(find_setting(detail["loc"], statements, schema), []).append(detail)
    complaints = {path: describe_complaint(details[path]) for path in details}
    lines = [f"{describe_setting(path, statements, complaints[path])}: {complaints[path]}" for path in details]
    known = [path for path in details if path in list_fields(schema)]
    remedies = [suggest_choice(details[path]) or describe_field(path, schema) for path in known]
    return ConfigError(NEXT_LINE.join(lines), fix=NEXT_LINE.join(remedies))


def describe_field(path: str, schema: type[Section]) -> str:
    """Return `change or leave out train.epochs (passes over the training set); its default is 100`."""
    field = find_field(schema, path)
    meaning = field.description or ""
    is_word = meaning[1:2].islower()  # NHWC and TF32 keep their capitals
    text = f"change or leave out {path} ({meaning[:1].lower() + meaning[1:] if is_word else meaning})"
    has_default = not field.is_required() and field.default not in (None, "", ())
    return f"{text}; its default is {field.default}" if has_default else text


def suggest_choice(details: list[ErrorDetails]) -> str:
    """Return `did you mean 'adam'?` for a mistyped choice or as the validator says; empty if nothing is similar."""
    choices: list[str] = []
    for detail in details:
        if "did you mean" in detail["msg"]:
            return detail["msg"][detail["msg"].index("did you mean") :]
        if detail["type"] == "literal_error":
            choices += re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        elif detail["type"].startswith("bool_"):
            choices += ["true", "false"]
    typed = details[0]["input"]
    found = suggest_nearest(typed, choices) if isinstance(typed, str) else ""
    return found if found.startswith("did you mean") else ""


def find_setting(loc: tuple[int | str, ...], statements: Mapping[str, Statement], schema: type[Section]) -> str:
    """Return the setting of an error location: pydantic appends list positions and union members to it."""
    # The longest prefix of the location that is a setting.
    paths = [".".join(str(part) for part in loc[:length]) for length in range(len(loc), 0, -1)]
    return next(
        (path for path in paths if path in statements or path in list_fields(schema)), paths[0] if paths else "config"
    )


def describe_setting(path: str, statements: Mapping[str, Statement], complaint: str) -> str:
    """Return `train.epochs = 'x' (unet.yaml:3)`; for a section, the statements on the settings the complaint names."""
    # A validator of a whole section failed: name the settings that its message mentions.
    if path not in statements:
        inside = {key: str(statements[key]) for key in statements if key.startswith(f"{path}.")}
        mentioned = set(re.findall(r"\w+", complaint))
        named = [text for key, text in inside.items() if key.rpartition(".")[2] in mentioned]
        return f"{path} ({', '.join(named or inside.values())})" if inside else path
    statement = statements[path]
    origin = statement.origin
    # Show the key as the user wrote it, if that was an alias.
    other_key = origin.layer in ("file", "preset") and origin.key != path
    return f"{path} = {statement.value!r} ({origin}{f', as {origin.key}' if other_key else ''})"


def describe_complaint(details: list[ErrorDetails]) -> str:
    """Return what was expected, in pydantic's words; a union such as `auto` or a number gives one detail per member."""
    if details[0]["type"] == "value_error":
        return str(details[0]["ctx"]["error"]).partition("; did you mean ")[0]  # which is the fix
    if details[0]["type"] == "string_unicode":
        return "must be a name in UTF-8 (rename the folder, or link to it: ln -s OLD NEW)"
    wanted = dict.fromkeys(
        detail["msg"].removeprefix("Input should be ").partition(", unable")[0] for detail in details
    )
    must_be = "must be " if details[0]["msg"].startswith("Input should be ") else ""
    return must_be + " or ".join(wanted)
