"""The keys of a schema: convert any spelling to the full path, and pydantic's errors to ConfigErrors."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from halfstep.errors import ConfigError, suggest_nearest
from halfstep_train.config.aliases import HABITS, KEY_ALIASES, PER_RANK_KEYS, PRECISION_KEYS
from halfstep_train.config.section import NULLS, Plain, Section, convert_for_field
from halfstep_train.config.statements import OPEN_SECTIONS, Statement, find_open_section

NEAR = 0.6
"""Similarity (difflib) from which a name is worth suggesting: one typo in five letters stays above it."""
ABBREVIATED = 0.9
"""Likeness of an abbreviation, such as `rotat` for `rotate_degrees`."""
CLEARLY_WORSE = 0.1
"""Suggestions this much below the best one are noise."""


class Removed(NamedTuple):
    """A setting that no longer exists."""

    unchanged: tuple[object, ...]
    """Values that change nothing, the former default among them: files of earlier versions hold every setting."""
    instead: str


REMOVED = {
    "log.curves": Removed((True, False), "leave it out: `halfstep report RUN --open` draws the curves"),
    "data.cache_limit_gb": Removed((64.0,), "leave it out: only the free disk space limits the packed file"),
    "optimizer.alpha": Removed((None, 0.99), "leave it out: rmsprop takes torch's default, 0.99"),
    "optimizer.rho": Removed((None, 0.9), "leave it out: adadelta takes torch's default, 0.9"),
    "schedule.peak_share": Removed((0.3,), "leave it out: onecycle rises over 30 % of the steps"),
    "model.ce_weight": Removed((1.0,), "leave it out, and set model.dice_weight relative to a weight of 1"),
    "model.gan_lr": Removed((None,), "leave it out: the discriminator takes optimizer.lr"),
    "model.decoder_heads": Removed((4,), "leave it out: the decoder has 4 attention heads"),
    "schedule.gamma": Removed((0.1,), "schedule.factor=F: the factor at each cut, as of the plateau schedule"),
    "train.memory_time": Removed((1.1,), "leave it out: with train.memory=low a step takes at most 1.1 times as long"),
    "ema.inv_gamma": Removed((1.0,), "leave it out, and set ema.warmup_power"),
    "log.ledger_every": Removed((0,), "log.ledger=N records every N-th step"),
    "data.split_seed": Removed((0,), "leave it out; data.val_fraction or named folders change the split"),
    "data.train_folder": Removed(("",), "data.folders=[TRAIN,VAL]"),
    "data.val_folder": Removed(("",), "data.folders=[TRAIN,VAL]"),
    "data.image_suffix": Removed(("",), "a pattern: data.images=imgs/{id}_SUFFIX"),
    "data.mask_suffix": Removed(("_mask",), "a pattern: data.masks=masks/{id}_SUFFIX"),
    "data.image_ext": Removed(("",), "a pattern: data.images=imgs/{id}.png"),
    "data.mask_ext": Removed(("",), "a pattern: data.masks=masks/{id}.png"),
    "data.normalise": Removed(("imagenet",), "leave it out: colours are normalised as for ImageNet"),
    "data.mask_size": Removed((0,), "leave it out: masks are compared at data.image_size"),
    "data.augment.crop_ratio": Removed(([3 / 4, 4 / 3],), "leave it out: crops have aspect ratios of 3/4 to 4/3"),
    "data.augment.contrast": Removed((0.0,), "data.augment.brightness=B changes brightness, contrast and saturation"),
    "data.augment.saturation": Removed((0.0,), "data.augment.brightness=B changes brightness, contrast and saturation"),
    "data.augment.cutmix_share": Removed((0.5,), "leave it out: with mixup and CutMix each mixes half of the batches"),
    "data.augment.mix_chance": Removed((1.0,), "leave it out: every batch is mixed"),
    "model.gan_channels": Removed((64,), "leave it out: the discriminator starts with 64 channels"),
    "model.gan_layers": Removed((3,), "leave it out: the discriminator halves the image three times"),
    "model.discriminator.channels": Removed((64,), "leave it out: the discriminator starts with 64 channels"),
    "model.discriminator.num_halvings": Removed((3,), "leave it out: the discriminator halves the map three times"),
    "model.first_stage.dropout": Removed((0.0,), "leave it out: the autoencoder has no dropout"),
    "model.feature_windows": Removed(([[8, 8], [4, 4], [2, 2], [1, 1]],), "model.windows sets both window sizes"),
    "schedule.step_size": Removed((10_000,), "schedule.milestones=N cuts every N steps"),
    "data.val_size": Removed((0,), "leave it out: validation reads every clip of its shards once"),
    "data.max_transmitters": Removed((0,), "leave it out: all transmitters of a map are used"),
    "model.layer_scale": Removed((0.0,), "leave it out: blocks have no LayerScale"),
    "model.registers": Removed((0,), "leave it out: there are no register tokens"),
    "model.first_iterations": Removed((3,), "leave it out: the first frame takes one more iteration"),
    "model.predictor_blocks": Removed((1,), "leave it out: the predictor has one block"),
    "model.feature_weight": Removed((1.0,), "leave it out, and set the other weights relative to 1"),
    "model.first_stage.z_channels": Removed((3,), "model.first_stage.latent_channels sets both"),
    "model.l1": Removed((True,), "leave it out: half of the loss is L1"),
    "model.smallest_time": Removed((1e-4,), "leave it out: times are drawn between 1e-4 and 1"),
    "model.backbone_depth": Removed((0,), "model.backbone_size=[BLOCKS,HEADS,CHANNELS]"),
    "model.backbone_heads": Removed((0,), "model.backbone_size=[BLOCKS,HEADS,CHANNELS]"),
    "model.backbone_dim": Removed((0,), "model.backbone_size=[BLOCKS,HEADS,CHANNELS]"),
    "model.initial_slots": Removed(("learned",), "leave it out: the initial slots are learned"),
    "model.slot_mlp": Removed((True,), "leave it out: an MLP follows each iteration"),
    "model.predictor_heads": Removed((4,), "leave it out: the predictor has 4 attention heads"),
    "model.decoder_chunk": Removed((0,), "leave it out: train.memory sets how many frames are decoded at a time"),
    "model.temperature": Removed((0.1,), "leave it out: the temperature is 0.1"),
    "model.contrast_batch": Removed((True,), "leave it out: slots are contrasted across all clips of a micro-batch"),
    "model.skip_empty": Removed((False,), "leave it out: clips without foreground count as 1 in FG-ARI"),
    "model.mlp_dim": Removed((192,), "leave it out: the slot MLP has model.slot_dim channels"),
    "model.words_heads": Removed((4,), "leave it out: the token decoder has 4 attention heads"),
    "model.tau_start": Removed((1.0,), "model.tau=[FIRST,LAST,STEPS]"),
    "model.tau_final": Removed((0.1,), "model.tau=[FIRST,LAST,STEPS]"),
    "model.tau_steps": Removed((30_000, 10_000), "model.tau=[FIRST,LAST,STEPS]"),
}


def leave_out_removed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored run's settings without those that no longer exist and change nothing."""
    kept = copy.deepcopy(dict(settings))
    for path, removed in REMOVED.items():
        *sections, name = path.split(".")
        section = functools.reduce(lambda inner, key: inner.get(key) or {}, sections, kept)
        if name in section and section[name] in removed.unchanged:
            del section[name]
    return kept


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
    """Return the statement with its full path (precision keys keep theirs); None for an empty section, and for a
    removed setting with a value that changes nothing."""
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
        raise ConfigError(f"{statement}: {path} holds settings, not a value", fix=f"set one of them, such as {example}")
    if path not in list_fields(schema):
        if _has_no_effect(path, statement.value):
            return None
        raise ConfigError(f"unknown key {statement.path!r} ({statement.origin})", fix=_suggest(path, schema))
    return replace(statement, path=path)


def _has_no_effect(path: str, value: object) -> bool:
    return path in REMOVED and convert_for_field(value, float) in REMOVED[path].unchanged


def _suggest(path: str, schema: type[Section]) -> str:
    if path in REMOVED:
        return REMOVED[path].instead
    return HABITS.get(path.removeprefix("trainer.")) or suggest_key(path, schema)


def is_empty(value: object) -> bool:
    return value in (None, {}, "") or isinstance(value, Plain) and value.lower() in NULLS


def suggest_key(path: str, schema: type[Section]) -> str:
    """Suggest the most similar settings, by full path or by last name, each with its full path."""
    names = dict.fromkeys(PRECISION_KEYS, "precision")
    names |= dict(zip(PER_RANK_KEYS, PER_RANK_KEYS, strict=True))
    names |= {key: alias.path for key, alias in KEY_ALIASES.items() if alias.path in list_fields(schema)}
    names |= {key: key for key in list_fields(schema)}
    scores: dict[str, float] = {}
    for spelling, target in names.items():
        # The last name weighs more: all settings of a section share the rest.
        score = 0.75 * compute_likeness(get_last_name(path), get_last_name(spelling)) + 0.25 * compute_likeness(
            path, spelling
        )
        scores[target] = max(scores.get(target, 0.0), score)
    best = max(scores.values())
    # Several settings may be about equally similar: suggest up to three.
    near = sorted((key for key in scores if scores[key] >= best - CLEARLY_WORSE), key=lambda key: -scores[key])[:3]
    if best >= NEAR:
        return f"did you mean {' or '.join(near)}?"
    return "`halfstep train WORKLOAD --show-config` lists every setting"


def get_last_name(path: str) -> str:
    return path.rpartition(".")[2]


def compute_likeness(one: str, other: str) -> float:
    short, long = sorted((one.lower(), other.lower()), key=len)
    if len(short) > 2 and long.startswith(short):
        return ABBREVIATED
    return difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()


EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "dict": "a section of settings",
    "finite": "a finite number",
}
"""What was expected, by the first word of pydantic's error type."""
NEXT_LINE = "\n" + " " * len("error: ")
"""Separates the lines of several settings, aligned with the text after `error: ` and `  fix: `."""
BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


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
    return ConfigError(
        NEXT_LINE.join(lines), fix=NEXT_LINE.join(suggest_remedy(path, details[path], schema) for path in known)
    )


def suggest_remedy(path: str, details: list[ErrorDetails], schema: type[Section]) -> str:
    """Return `set train.epochs (passes over the training set) to at least 1; its default is 100`."""
    if near := suggest_choice(details):  # the complaint lists every choice already
        return near
    field = find_field(schema, path)
    meaning = field.description or ""
    is_word = meaning[1:2].islower()  # NHWC and TF32 keep their capitals
    named = f"{path} ({meaning[:1].lower() + meaning[1:] if is_word else meaning})"
    change = (
        f"change or leave out {named}"
        if details[0]["type"] == "value_error"
        else f"set {named} to {describe_wanted(details)}"
    )
    has_default = not field.is_required() and field.default not in (None, "", ())
    return f"{change}; its default is {field.default}" if has_default else change


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


def describe_wanted(details: list[ErrorDetails]) -> str:
    return " or ".join(dict.fromkeys(describe_expected(detail) for detail in details))


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
    if details[0]["type"] == "value_error":
        return str(details[0]["ctx"]["error"]).partition("; did you mean ")[0]  # which is the fix
    return f"expected {describe_wanted(details)}"


def describe_expected(detail: ErrorDetails) -> str:
    """Describe the value that pydantic expected."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in BOUNDS:
        relation, bound = BOUNDS[kind]
        return f"{relation} {context[bound]:g}"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "too_long":
        return f"a list of {context['max_length']} values"
    if kind == "too_short":
        return f"a list of {context['min_length']} or more"
    if kind == "string_unicode":
        return "a name in UTF-8 (rename the folder, or link to it: ln -s OLD NEW)"
    if kind == "string_too_short":
        return "text that is not empty"
    if kind == "missing":
        return "one more value"
    return EXPECTED.get(kind.split("_")[0], detail["msg"])
