"""Which settings may change when a run is resumed, and which would make it a different run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from halfstep.errors import CheckpointError, HardwareError, format_count
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.dump import dump_values
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import WITHOUT_END, RunConfig
from halfstep_train.config.statements import list_fields
from halfstep_train.run.folder import RunFolder, Settled, is_given, make_paths_absolute
from halfstep_train.workloads import KINDS, load

FREE = (
    "train.epochs", "train.max_steps", "train.early_stopping_patience", "train.checkpoint_every",
    "train.checkpoints_total_limit", "train.report_every", "train.validate_every", "train.sample_every",
    "train.auto_batch", "train.callbacks", "train.backend", "train.rank_timeout_s", "train.find_unused",
    "data.num_workers", "data.dir", "log.", "globals",
)  # fmt: skip
"""Settings that may change: they affect only how long a run trains, where it runs, or what it reports.

A schedule that depends on the run's length changes with `train.epochs` and `train.max_steps`, which is reported."""

NOT_STORED = ("log.quiet",)  # properties of one call, not of the run

FOLLOWS_THE_LENGTH = ("cosine", "linear", "polynomial", "onecycle")  # schedules that end where the run ends

KEPT = ("model.weights",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The settings that differ between a stored run and its resumption."""

    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def touch(self, *prefixes: str) -> bool:
        """True if settings that start with these names changed in a way that affects what a step computes."""
        return any(key.startswith(prefixes) and not key.startswith(FREE) for key in self.keys)


def flatten_settings(config: RunConfig) -> dict[str, Any]:
    return {path: attrgetter(path)(config) for path in list_fields(type(config))}


def accept_changes(loaded: Loaded, folder: RunFolder, *, allow: bool) -> tuple[Loaded, Settled, Changes]:
    """Return the settings of a resumed run, those that it stored, and how they differ; refuse what must not change."""
    own, settled = load(str(folder.config)), folder.read_settled()
    # What the run decided itself (from its data) is not a change of the user.
    loaded = apply_decided(loaded, own, settled.decided)
    kept = KINDS.of(own.config.workload).kept
    trained = recover_settings(settled.settings, own.config, folder.config, allow=allow, kept=kept)
    # Compare absolute paths: the run may be resumed from another folder.
    stored, asked = (make_paths_absolute(one) for one in (trained, loaded.config))
    return loaded, settled, refuse_changes(stored, asked, allow=allow, kept=kept)


def apply_decided(asked: Loaded, stored: Loaded, settled: Mapping[str, Sequence[Any]]) -> Loaded:
    """Use what the run decided when it started for settings that are not given, or given as they were then."""
    config, given, taken = asked.config, dump_values(asked.config), list[str]()
    # Another number of ranks may continue the run, with the run's batch.
    totals = {path: (attrgetter(path)(asked.config), attrgetter(path)(stored.config)) for path in asked.per_rank}
    for path, values in {**settled, **totals}.items():
        section, _, name = path.partition(".")
        if name in given.get(section, ()) and (not is_given(config, section, name) or given[section][name] in values):
            config = config.replace(**{section: {name: getattr(getattr(stored.config, section), name)}})
            taken.append(f"{path}.")
    # The dot keeps `data.dir` from matching `data.directory`.
    own = tuple(taken)
    origins = {key: origin for key, origin in asked.origins.items() if not f"{key}.".startswith(own)}
    origins |= {key: origin for key, origin in stored.origins.items() if f"{key}.".startswith(own)}
    overridden = tuple(one for one in asked.overridden if not f"{one.key}.".startswith(own))
    warnings = [
        f"{path} stays {kept}, although {asked.origins[path]} is {now}; {path}=N --allow-changes changes it"
        for path, (now, kept) in totals.items()
        if now != kept
    ]
    warnings = [*asked.warnings, *warnings]
    return replace(asked, config=config, origins=origins, overridden=overridden, warnings=tuple(warnings), per_rank=())


def recover_settings(
    settings: Mapping[str, Any], own: RunConfig, file: Path, *, allow: bool, kept: Sequence[str] = ()
) -> RunConfig:
    """Return the settings the run was last trained with; edits of config.yaml are checked like other changes."""
    if own.workload != settings["workload"]:
        raise CheckpointError(
            f"{file} was edited: workload: {settings['workload']} -> {own.workload}",
            why="the checkpoints belong to another model",
            fix="undo the edit, or start a new run",
        )
    try:
        stored = type(own).model_validate(settings)
    except ValidationError as error:
        names = ", ".join(".".join(map(str, detail["loc"])) for detail in error.errors())
        raise CheckpointError(
            f"{file.parent} has settings that this version of halfstep does not know: {names}",
            why="another version wrote the run",
            fix="resume it with that version, or start a new run",
        ) from error
    refuse_changes(stored, own, allow=allow, kept=kept, edited=file)
    return stored


def refuse_changes(
    stored: RunConfig, asked: RunConfig, *, allow: bool, kept: Sequence[str] = (), edited: Path | None = None
) -> Changes:
    """Return the differences between two configs; refuse those that must not change.

    Changes that affect what a step computes are refused unless allowed. Changes of settings or sections in `kept` are
    always refused, because these are not read again. `edited` is the file with the changes; None: the command line.
    """
    before, now = flatten_settings(stored), flatten_settings(asked)
    changed = [key for key in now if now[key] != before.get(key) and key not in NOT_STORED]
    notes = [f"{key}: {before.get(key)} -> {now[key]}" for key in changed]
    undo = ("put it back", "put them back") if edited else ("leave it out", "leave them out")
    if held := [note for key, note in zip(changed, notes, strict=True) if key.startswith((*KEPT, *kept))]:
        raise CheckpointError(
            f"this setting cannot change during a run{f', and {edited} was edited' if edited else ''}: "
            + "; ".join(held),
            why="it was applied when the run started, and the checkpoint depends on it",
            fix=f"{undo[0]}, or start a new run",
        )
    binding = [note for key, note in zip(changed, notes, strict=True) if not key.startswith(FREE)]
    if binding and not allow:
        what = f"{edited} was edited" if edited else "this run was started with other settings"
        raise CheckpointError(
            f"{what}: {'; '.join(binding)}",
            why="a resumed run continues exactly, which other settings would prevent",
            fix=f"{undo[1]}, or accept them with --allow-changes",
        )
    return Changes(keys=tuple(changed), notes=(*notes, *_describe_schedule_change(asked, changed)))


def _describe_schedule_change(config: RunConfig, changed: list[str]) -> list[str]:
    if not {"train.epochs", "train.max_steps"} & set(changed):
        return []
    s = config.schedule
    followers = [f"the {s.name} schedule"] if s.name in FOLLOWS_THE_LENGTH else []
    # Warmup by epochs is at most a tenth of the run.
    followers += ["the warmup"] if s.warmup_steps is None and s.warmup_epochs > 0 else []
    return [f"{name} depends on the length of the run: learning rates change from here on" for name in followers]


def refuse_changed_data(stored: Sequence[int], found: Sequence[int], *, allow: bool) -> list[str]:
    """Refuse other numbers of samples: the split would differ, and validation might contain training samples."""
    if list(stored) == list(found):
        return []
    note = f"the data changed: {stored[0]} training and {stored[1]} validation samples became {found[0]} and {found[1]}"
    if not allow:
        raise CheckpointError(
            note,
            why="samples would be counted and split differently, so the run could not be continued exactly",
            fix="restore the data, or accept the change with --allow-changes",
        )
    return [note]


def refuse_missing_device(plan: Plan) -> None:
    """Raise if this machine lacks the run's device: another one rounds differently, so the user must ask for it."""
    try:
        probe(plan.device)
    except HardwareError as error:
        raise CheckpointError(
            f"this run was trained on {plan.device} ({plan.device_name}), which this machine does not have",
            why=error.why,
            fix=f"--device {probe().device} --allow-changes continues there, but not bit-exactly",
        ) from error


def explain_finished(config: RunConfig, state: Mapping[str, Any]) -> str:
    """Return why the run has finished and how to continue anyway; empty if something is left to do."""
    train, epochs, steps = config.train, state["position"]["epoch"], state["step"]["attempted"]
    all_epochs, more = format_count(train.epochs, "epoch"), ""
    if epochs >= train.epochs:
        end, again = f"after {epochs} of {all_epochs}", f"train.epochs={2 * epochs}"
    elif 0 < train.max_steps <= steps:
        end, again = f"after {steps} of {format_count(train.max_steps, 'step')}", f"train.max_steps={2 * steps}"
        more = "" if train.epochs == WITHOUT_END else f", or 0 for all {all_epochs}"
    elif 0 < train.early_stopping_patience <= state["stopping"]["num_since"]:
        end, again = f"by early stopping after {epochs} of {all_epochs}", "train.early_stopping_patience=0"
    else:
        return ""
    return f"finished {end}; to continue, add {again} to the command{more}"
