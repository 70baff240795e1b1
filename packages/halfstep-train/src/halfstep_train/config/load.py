"""Load a config: merge all statements into one frozen config, and keep the origin of each value.

In order:

    parse       flags, overrides and the file or dict become statements: path, value, origin
    resolve     ${globals.NAME} is replaced
    choose      the workload decides the schema, the preset adds a layer, demo settings another
    normalise   other tools' spellings become full paths; all precision keys of a layer become one statement
    merge       flag > override > file > preset > demo > launcher: one value per path; overridden values are recorded
    validate    the schema checks the result and freezes it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halfstep.errors import ConfigError, format_count, suggest_nearest
from halfstep.precision.names import normalise_precision
from halfstep_train.config.aliases import GLOBAL_ALIASES, KEY_ALIASES, PER_RANK_KEYS, PRECISION_KEYS
from halfstep_train.config.foreign import has_key, translate_document
from halfstep_train.config.references import Place, References, find_references
from halfstep_train.config.schema import OPTIMIZER_OPTIONS, SCHEDULE_OPTIONS, RunConfig, Schemas, is_import_path
from halfstep_train.config.section import convert_for_field, count_cores
from halfstep_train.config.statements import (
    DEFAULT,
    LAYERS,
    OPEN_SECTIONS,
    Launcher,
    Origin,
    Override,
    Stated,
    Statement,
    find_field,
    find_full_path,
    find_open_section,
    is_empty,
    list_fields,
    make_config_error,
    make_disagreement,
    make_layer_statements,
    parse_flags,
    parse_overrides,
    read_file_statements,
    read_layer,
)
from halfstep_train.config.yaml_source import Document, read_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A config, the origin of each of its values, what was overridden, and notes for the user."""

    config: RunConfig
    origins: Mapping[str, Origin]
    overridden: tuple[Override, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Notes on what the user most likely did not intend; shown even with --quiet."""
    per_rank: tuple[str, ...] = ()
    """Settings that were given per GPU and multiplied by `num_ranks`."""
    num_ranks: int = 1


def load(
    target: str,
    *,
    kinds: Schemas,
    flags: Mapping[str, object] | None = None,
    overrides: Sequence[str] = (),
    overrides_file: Path | None = None,
    launcher: Launcher | None = None,
) -> Loaded:
    """Load a config from a workload's name, an import path or a YAML file, with flags and overrides on top.

    `overrides_file` is merged into the first file before it is read.
    """
    given = parse_flags(flags or {})
    statements = [*parse_overrides(overrides), *given]
    if not is_file(target, kinds):
        in_file = read_file_statements(read_yaml(overrides_file)) if overrides_file is not None else []
        return resolve([*in_file, name_workload(target), *statements], kinds, launcher)
    document = read_yaml(Path(target))
    if overrides_file is not None:
        document = document.merge(read_yaml(overrides_file))
    if find_strongest("workload", statements) is not None or "workload" in document.values:
        return resolve([*read_file_statements(document), *statements], kinds, launcher)
    # A file that names no workload may be another project's.
    found = translate_document(document, overrides, kinds.list_translators())
    if found is None:
        raise make_nameless_error(document)
    loaded = resolve([*found.statements, *parse_overrides(found.overrides), *given], kinds, launcher, is_whole=True)
    return replace(loaded, notes=(*found.notes, *loaded.notes))


def make_nameless_error(document: Document) -> ConfigError:
    """Return the error for a file that names no workload and that no family can translate."""
    fix = "add `workload: unet` to the file"
    if "distributed_type" in document.values:
        fix = "this is accelerate's launch config: give it to `halfstep check`, together with a training config"
    elif has_key(document.values, "trainer.amp"):
        fix = "add `workload: radiodiff` to the file (any workload reads trainer.amp and trainer.fp16)"
    why = "the file has no `workload` key, and no supported project writes files like it"
    return ConfigError(f"{document.name}: no workload is named", why=why, fix=fix)


def load_dict(workload: str, values: Mapping[str, object], *, kinds: Schemas) -> Loaded:
    """Load a Python dict, flat (`use_amp`, `num_epochs`) or nested as in a file."""
    return resolve([*make_layer_statements(values, "file", "config dict"), name_workload(workload)], kinds)


def name_workload(workload: str) -> Statement:
    return Statement(path="workload", value=workload, origin=Origin(layer="flag", where=workload, key="WORKLOAD"))


def is_file(target: str, workloads: Iterable[str]) -> bool:
    """True if the target is a path. A workload's name is not, even if a folder of that name exists here."""
    if target in ("", *workloads) or is_import_path(target):
        return False
    return target.lower().endswith((".yaml", ".yml")) or "/" in target or Path(target).exists()


def resolve(
    statements: Sequence[Statement], kinds: Schemas, launcher: Launcher | None = None, *, is_whole: bool = False
) -> Loaded:
    """Merge statements, given in any order, into one config.

    `is_whole` leaves out demo settings: a translated file already describes its model and run completely.
    """
    launcher = launcher or Launcher()
    # Collected before references are replaced: globals that nothing uses are reported.
    used = {name.removeprefix("globals.") for statement in statements for name in find_references(statement.value)}
    statements = [*statements, *translate_globals(statements, used), *launcher.list_statements()]
    multiplied = {id(s): new for s in statements if (new := multiply_by_ranks(s, launcher.num_ranks))}
    statements = replace_globals([multiplied.get(id(s), s) for s in statements])
    workload = find_strongest("workload", statements)
    if workload is None or is_empty(workload.value):
        raise ConfigError("no workload is named", fix="add `workload: unet` to the file")
    # Each family has its own schema, so the workload must be known before any key is checked.
    schema = kinds.of(str(workload.value), str(workload.origin)).get_schema(str(workload.value))
    statements = [*make_preset_statements(find_strongest("preset", statements), schema), *statements]
    settings = [setting for statement in statements if (setting := find_full_path(statement, schema))]
    settings, replaced = add_demo(settings, schema, {} if is_whole else schema.demo)
    precision, warnings = make_precision_statements([s for s in settings if s.path in PRECISION_KEYS])
    others = [convert_statement(s, schema) for s in settings if s.path not in PRECISION_KEYS]
    chosen, overridden = merge_layers([*precision, *others])
    disagreements = [f"{one}: give both the same precision" for one in overridden if one.replaced.layer == "launcher"]
    origins_per_rank = [s.origin for s in multiplied.values()]
    try:
        config = schema.model_validate(nest_paths({path: s.value for path, s in chosen.items()}))
    except ValidationError as error:
        raise make_config_error(error, chosen, schema) from None
    # Keys of open sections are the user's, so they have no default.
    origins = {path: DEFAULT for path in list_fields(schema) if path not in OPEN_SECTIONS}
    origins["data.num_workers"] = Origin(layer="default", where=f"auto: {format_count(count_cores(), 'core')}")
    origins |= {path: statement.origin for path, statement in chosen.items()}
    notes = (
        *note_unused_globals(statements, used),
        *note_unused_options(config),
        *note_scaled_rate(config),
        *note_optimizations(settings, config),
    )
    return Loaded(
        config=config,
        origins=origins,
        overridden=tuple(one for one in overridden if one.replaced.layer != "launcher"),
        notes=notes,
        warnings=(*warnings, *replaced, *disagreements),
        per_rank=tuple(path for path in sorted(TOTALS) if path in chosen and chosen[path].origin in origins_per_rank),
        num_ranks=launcher.num_ranks,
    )


def find_strongest(path: str, statements: Iterable[Statement]) -> Statement | None:
    """Return the statement of the highest layer about one key."""
    ranked = sorted((s for s in statements if s.path == path), key=lambda s: LAYERS.index(s.origin.layer))
    return ranked[-1] if ranked else None


def replace_globals(statements: Sequence[Statement]) -> list[Statement]:
    """Replace every reference by the global's value in the highest layer that sets it."""
    # Later entries of the dict below win, so the strongest layer comes last.
    ranked = sorted(statements, key=lambda s: LAYERS.index(s.origin.layer))
    values = {s.path.removeprefix("globals."): s.value for s in ranked if find_open_section(s.path) == "globals"}

    def find(name: str, place: Place, at: str) -> tuple[object, Place]:
        section, _, key = name.partition(".")
        if section != "globals" or not key:
            raise ConfigError(f"{at}: ${{{name}}} is not a reference", fix="only ${globals.NAME} can be referenced")
        if key not in values:
            fix = suggest_nearest(key, values) if values else f"add `globals: {{{key}: …}}`"
            raise ConfigError(f"{at}: there is no global {key!r}", fix=fix)
        return values[key], ("globals", key)

    replaced = References(find)
    return [replace(s, value=replaced(s.value, (s.path,), f"{s.path} ({s.origin})")) for s in statements]


def translate_globals(statements: Sequence[Statement], used: set[str]) -> list[Statement]:
    """Return the globals in GLOBAL_ALIASES as settings, if nothing refers to them and their layer does not set them."""
    are_set = {(s.origin.layer, find_setting(s.path)) for s in statements}
    return [
        replace(s, path=path)
        for s in statements
        if (path := GLOBAL_ALIASES.get(s.path.removeprefix("globals.")))
        and s.path.removeprefix("globals.") not in used
        and (s.origin.layer, find_setting(path)) not in are_set
    ]


def find_setting(key: str) -> str:
    """Return the setting that an alias of all workloads names, or the key itself."""
    return KEY_ALIASES.get(key) or PER_RANK_KEYS.get(key, key)


def multiply_by_ranks(statement: Statement, num_ranks: int) -> Statement | None:
    """Return a batch size per GPU as the one of all ranks; None for any other statement."""
    is_reference = str(statement.value) in {f"${{globals.{name}}}" for name in GLOBAL_ALIASES}
    if statement.path not in PER_RANK_KEYS and not (is_reference and find_setting(statement.path) in TOTALS):
        return None
    statement = replace(statement, path=find_setting(statement.path))
    if num_ranks == 1:
        return statement
    origin = replace(statement.origin, where=f"{statement.origin} × {num_ranks} ranks")
    return replace(statement, value=f"${{mul: {statement.value}, {num_ranks}}}", origin=origin)


TOTALS = frozenset(PER_RANK_KEYS.values())
"""Settings that count the samples of all ranks."""


def make_preset_statements(chosen: Statement | None, schema: type[RunConfig]) -> list[Statement]:
    # `preset: null` in an override switches the file's preset off.
    name = convert_for_field(chosen.value, str | None) if chosen else None
    if chosen is None or name is None:
        return []
    if name not in list(schema.presets):  # a list has no hash
        raise ConfigError(f"unknown preset {name!r} ({chosen.origin})", fix=suggest_nearest(str(name), schema.presets))
    return make_layer_statements(schema.presets[str(name)], "preset", f"preset {name}")


def add_demo(
    settings: Sequence[Statement], schema: type[RunConfig], suited: Mapping[str, Any]
) -> tuple[list[Statement], list[str]]:
    """Add demo settings if no data folder is given; drop settings that name files in one, with a warning."""
    if any(s.path == "data.dir" and not is_empty(s.value) for s in settings):
        return list(settings), []
    kept = [s for s in settings if s.path not in schema.demo_replaces]
    left_out = sorted({s.path for s in settings if s.path in schema.demo_replaces and not is_empty(s.value)})
    warnings = [f"{', '.join(left_out)}: ignored, because no data folder is given (--data-dir DIR)"] if left_out else []
    return [*kept, *make_layer_statements(suited, "demo", "demo data")], warnings


def make_precision_statements(statements: Sequence[Statement]) -> tuple[list[Statement], tuple[str, ...]]:
    """Return one statement per layer that sets the default precision, and the warnings of the strongest."""
    # From the weakest layer up: `--mixed-precision` alone keeps the format that a file below it names.
    found: list[Statement] = []
    below = Stated()
    for layer in LAYERS:
        own = [statement for statement in statements if statement.origin.layer == layer]
        stated = read_layer(own, below) if own else below
        if stated is not below and stated.origin:
            found.append(Statement(path="precision.default", value=stated.value, origin=stated.origin))
        below = stated
    return found, below.notes


def convert_statement(statement: Statement, schema: type[RunConfig]) -> Statement:
    if find_open_section(statement.path) == "precision.modules":
        return replace(statement, value=normalise_precision(statement.value, str(statement.origin)))
    return replace(statement, value=convert_for_field(statement.value, find_field(schema, statement.path).annotation))


def merge_layers(settings: Sequence[Statement]) -> tuple[dict[str, Statement], list[Override]]:
    """Return the strongest layer's statement per path, and what it overrode; a layer must not contradict itself."""
    chosen: dict[str, Statement] = {}
    overridden: list[Override] = []
    for statement in sorted(settings, key=lambda s: LAYERS.index(s.origin.layer)):
        earlier = chosen.get(statement.path)
        if earlier and earlier.value != statement.value:
            if earlier.origin.layer == statement.origin.layer:
                raise make_disagreement(earlier, statement)
            if earlier.origin.layer != "demo":  # the user did not choose that, so there is nothing to report
                replaced = earlier.value, earlier.origin
                overridden.append(Override(statement.path, statement.value, statement.origin, *replaced))
        chosen[statement.path] = statement
    return chosen, overridden


def nest_paths(values: Mapping[str, object]) -> dict[str, Any]:
    """Turn paths into a tree; below an open section the rest of a path is one key, dots included."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        section = find_open_section(path)
        # `precision.modules.vae.*` is the key `vae.*` of that section, not a tree.
        *parents, name = [*section.split("."), path.removeprefix(section + ".")] if section else path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = value
    return tree


def note_unused_globals(statements: Sequence[Statement], used: set[str]) -> list[str]:
    """Note globals from overrides that nothing refers to; refuse those that resemble one that has an effect."""
    notes, known = [], used | GLOBAL_ALIASES.keys()
    for s in statements:
        name = s.path.removeprefix("globals.")
        if s.path == name or s.origin.layer != "override" or name in known:
            continue
        fix = suggest_nearest(name, known)
        if fix.startswith("did you mean"):
            raise ConfigError(f"unknown global {name!r} ({s.origin})", fix=fix)
        notes.append(f"globals.{name} is set, but nothing refers to ${{globals.{name}}}")
    return notes


def note_unused_options(config: RunConfig) -> list[str]:
    """Note options that the chosen optimizer or schedule does not read."""
    notes = []
    for section, readers in (("optimizer", OPTIMIZER_OPTIONS), ("schedule", SCHEDULE_OPTIONS)):
        part = getattr(config, section)
        for option, users in readers.items():
            is_default = getattr(part, option) == type(part).model_fields[option].default
            if part.name not in users and not is_default:
                notes.append(f"{section}.{option} is not used by {part.name}, only by {', '.join(sorted(users))}")
    return notes


def note_scaled_rate(config: RunConfig) -> list[str]:
    """Note a learning rate that is scaled with the batch size."""
    optimizer, samples = config.optimizer, config.train.batch_size * config.train.accumulate
    if not optimizer.lr_per:
        return []
    scaled = f"{optimizer.lr:g} × {samples} / {optimizer.lr_per} samples per step"
    rate = optimizer.compute_peak_lr(samples)
    return [f"learning rate {rate:.4g} = optimizer.lr {scaled} (optimizer.lr_per=0 switches this scaling off)"]


def note_optimizations(settings: Iterable[Statement], config: RunConfig) -> list[str]:
    """Note what --use-optimizations changes in this precision."""
    given = [s for s in settings if PRECISION_KEYS.get(s.path) == "optimizations"]
    if not given or convert_for_field(find_strongest(given[0].path, given).value, bool) is not True:  # type: ignore[union-attr]
        return []
    precision = config.precision.default
    numbers = f"{precision} is requested, so TF32 stays off and fp32 islands stay strict fp32"
    if precision in ("tf32", "auto"):
        numbers = "fp32 operations use TF32"
    return [f"--use-optimizations: {numbers}"]
