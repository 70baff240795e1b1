"""Parse files, overrides and flags into statements: one value for one setting by its full path, with its origin."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from halfstep.errors import ConfigError, suggest_nearest
from halfstep.precision.names import MIXED, PRECISION_NAMES, normalise_precision
from halfstep_train.config.aliases import CONVERSIONS, HABITS, KEY_ALIASES, PER_RANK_KEYS, PRECISION_KEYS
from halfstep_train.config.section import NULLS, Plain, Section, parse_scalar
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


# --- the keys of a schema ---


SIMILAR = 0.6
"""Similarity of last names (difflib) from which a setting is worth suggesting."""


@functools.cache
def list_fields(schema: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every setting of a schema by its full path."""
    fields: dict[str, FieldInfo] = {}
    for name, info in schema.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= list_fields(kind, f"{prefix}{name}.")
        else:
            fields[prefix + name] = info
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
    # Precision keys depend on one another: `read_layer` reads them together.
    if path in PRECISION_KEYS:
        return replace(statement, path=path)
    if path in list_sections(schema) and is_empty(statement.value):
        return None
    # Some workloads lack the setting that an alias names.
    alias = KEY_ALIASES.get(path)
    if alias is not None and alias in list_fields(schema):
        convert = CONVERSIONS.get(alias)
        return replace(statement, path=alias, value=convert(statement.value) if convert else statement.value)
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
    names |= {key: path for key, path in KEY_ALIASES.items() if path in list_fields(schema)}
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


# --- the precision keys of a layer, read together ---
#
# One key alone can mislead: `use_amp: false` with `amp_dtype: bfloat16` is fp32, because the switch is off; `amp: true`
# with `fp16: false` is bf16, because mixed precision is on and fp16 is excluded. So a layer's keys are first sorted
# into a name, a switch, a type and exclusions, and then read together. Keys that contradict each other raise an error
# that names both.


HALF_TYPES = ("bf16", "fp16")
"""The candidates for `use_amp: true` without a type, the safer one first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stated:
    """The precision after the layers so far (empty if not set), and the last half type that any of them named."""

    value: str = ""
    type: str = ""
    origin: Origin | None = None
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class PrecisionKeys:
    """The precision keys of one layer, sorted by what they set; two keys for the same thing must agree."""

    name: str = ""
    switch: bool | None = None
    type: str = ""
    excluded: set[str] = field(default_factory=set)
    optimizations: bool = False
    given_by: dict[str, Statement] = field(default_factory=dict)

    def set_once(self, part: str, value: object, statement: Statement) -> None:
        """Set one of the fields; a second statement with another value is an error."""
        earlier = self.given_by.setdefault(part, statement)
        if earlier is statement:
            setattr(self, part, value)
        elif getattr(self, part) != value:
            raise make_disagreement(earlier, statement)


def make_disagreement(one: Statement, other: Statement) -> ConfigError:
    """Return the error for two statements of one layer that contradict each other."""
    why = f"both come from the same layer ({one.origin.layer}), so neither has priority"
    return ConfigError(f"{one} and {other} disagree", why=why, fix="keep one of them")


def read_layer(statements: Sequence[Statement], below: Stated) -> Stated:
    """Return the precision after one layer's keys, on top of the layers below it."""
    parts = sort_keys(statements)
    check_name(parts)
    value, notes = read_together(parts, below)
    if not value:
        return replace(below, notes=notes) if notes else below
    # Remembered for a stronger layer that only switches mixed precision on.
    kind = parts.type or (parts.name if parts.name in MIXED else "") or below.type
    return Stated(value=value, type=kind, origin=join_origins(statements), notes=notes)


def sort_keys(statements: Iterable[Statement]) -> PrecisionKeys:
    """Sort the statements of one layer by what they set."""
    parts = PrecisionKeys()
    for statement in statements:
        role = PRECISION_KEYS[statement.path]
        value = parse_scalar(statement.value) if isinstance(statement.value, str) else statement.value
        if role == "switch or name":
            role = "switch" if isinstance(value, bool) else "name"
        if role in ("name", "type"):
            name = normalise_precision(statement.value, str(statement.origin))
            # `amp_dtype: float32` names a precision; only a half format can be the type of mixed precision.
            parts.set_once(role if name in MIXED else "name", name, statement)
        elif not isinstance(value, bool):
            raise ConfigError(f"{statement}: expected true or false", fix="to name a precision: `precision: bf16`")
        elif role in ("switch", "optimizations"):
            parts.set_once(role, value, statement)
        elif value:
            # `fp16: true` sets two things: mixed precision is on, and its type is fp16.
            parts.set_once("switch", True, statement)
            parts.set_once("type", role, statement)
        else:
            parts.excluded.add(role)
            parts.given_by[f"not {role}"] = statement
    return parts


def check_name(parts: PrecisionKeys) -> None:
    """Check that a precision given by name agrees with the layer's switches."""
    if not parts.name:
        return
    fits_switch = {None: True, True: parts.name in MIXED, False: parts.name in ("fp32", "tf32")}[parts.switch]
    fits = {
        "switch": fits_switch,
        "type": parts.switch is False or not parts.type or parts.name == parts.type,
        "not fp16": not (parts.name == "fp16" and "fp16" in parts.excluded),
        "not bf16": not (parts.name in ("bf16", "bf16-true") and "bf16" in parts.excluded),
        # use_optimizations switches TF32 on, but `fp32` means strict fp32.
        "optimizations": not (parts.optimizations and parts.name == "fp32"),
    }
    for part, holds in fits.items():
        if not holds:
            raise make_disagreement(parts.given_by["name"], parts.given_by[part])


def read_together(parts: PrecisionKeys, below: Stated) -> tuple[str, tuple[str, ...]]:
    """Return the precision that the sorted keys mean together (empty if none), and notes for the user."""
    if parts.name:
        return parts.name, ()
    if parts.switch is False:
        return ("tf32" if parts.optimizations else "fp32"), ()
    if parts.type in parts.excluded:
        raise make_disagreement(parts.given_by["type"], parts.given_by[f"not {parts.type}"])
    if parts.switch:
        return parts.type or choose_half_type(parts, below), ()
    if parts.type:
        return read_type_alone(parts, below)
    # `fp16: false` alone: fp32, unless a weaker layer chose another format.
    if parts.excluded and below.value in {"", *parts.excluded}:
        return "fp32", ()
    if parts.optimizations and below.value == "fp32":
        return "tf32", ()
    return "", ()


def choose_half_type(parts: PrecisionKeys, below: Stated) -> str:
    """Return the half format of mixed precision without a type: one from below, else the safest allowed."""
    # Keep a mixed precision that a weaker layer chose, then its type, then the safest allowed.
    already = [below.value] if below.value in MIXED else []
    wanted = [*already, *([below.type] if below.type else []), *HALF_TYPES]
    allowed = [name for name in wanted if name not in parts.excluded]
    if not allowed:
        raise make_disagreement(parts.given_by["switch"], parts.given_by["not bf16"])
    return allowed[0]


def read_type_alone(parts: PrecisionKeys, below: Stated) -> tuple[str, tuple[str, ...]]:
    """Read a type without a switch: it does not turn mixed precision on, but `auto` may have done so."""
    given = parts.given_by["type"]
    if below.value in MIXED:
        return parts.type, ()
    if below.value in ("", "auto"):
        others = "most scripts ignore this key and train in fp32 unless mixed precision is switched on"
        return parts.type, (f"{given} is read as precision={parts.type}; {others}",)
    off = f"precision is {below.value} ({below.origin})"
    return "", (f"{given} has no effect: {off}; use precision={parts.type} instead",)


def join_origins(statements: Sequence[Statement]) -> Origin:
    """Join the origins of all keys that were read together."""
    first = statements[0].origin
    where = list(dict.fromkeys(statement.origin.where for statement in statements))
    key = list(dict.fromkeys(statement.origin.key for statement in statements))
    return Origin(layer=first.layer, where=" ".join(where), key=" + ".join(key))
