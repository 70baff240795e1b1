"""The header and the end of a run: explain errors with how to resume, write report/summary.json, export the model."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.disk import is_dry_run, open_atomic_folder, write_atomically
from halfstep.errors import (
    CheckpointError,
    DataError,
    HalfstepError,
    Interrupted,
    TrainingStopped,
    format_bytes,
    format_count,
    format_duration,
    suggest_command,
)
from halfstep.evidence.capsule import list_capsules
from halfstep.hardware.memory import get_peak_memory_bytes
from halfstep.hardware.nvml import EnergyMeter
from halfstep.own_loop.repeated_blocks import describe_recomputed
from halfstep.tensor_files import write_tensors
from halfstep_train.config.dump import dump_values
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import DataConfig
from halfstep_train.config.section import count_cores
from halfstep_train.config.statements import DEFAULT
from halfstep_train.data.files import list_some
from halfstep_train.report.config_view import dump_config, format_header
from halfstep_train.report.listeners import CallbackFailed, Callbacks, open_trackers
from halfstep_train.report.metrics_file import find_last_step
from halfstep_train.report.page.read_run import read_run
from halfstep_train.report.page.render import render_runs
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.checkpoint import open_weights
from halfstep_train.run.folder import RunFolder, suggest_resume
from halfstep_train.run.frozen_modules import describe_frozen
from halfstep_train.run.journal import WORTH_SAYING, describe_gpu_use, suggest_faster_data
from halfstep_train.run.loop import Loop
from halfstep_train.run.monitor import Monitor
from halfstep_train.run.run_rank import FarReport
from halfstep_train.run.stored_state import count_lost_updates, describe_half_weights, warn_of_rounding
from halfstep_train.workloads.base.import_path import check_call_form, import_callable


@contextmanager
def handle_ending(loop: Loop, folder: RunFolder, report: RunReport, *, is_new: bool) -> Iterator[None]:
    """Close what a run has open when it ends; if it ends early, explain why, and remove a new run that kept nothing."""
    writes = loop.checkpoints.writes
    try:
        yield
    except (HalfstepError, KeyboardInterrupt) as error:
        shown = explain_ending(error, loop, folder, is_new=is_new and writes)
        if shown is error:
            raise
        raise shown from error
    except Exception:  # an error in custom code: show its traceback, but leave no empty run
        if is_new and writes and has_left_nothing(loop):
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    finally:
        report.close()
        loop.parts.train_loader.close()
        loop.parts.val_loader.close()


def finish_run(loop: Loop, folder: RunFolder, monitor: Monitor, energy: EnergyMeter, data: DataConfig) -> None:
    """Write the model and summary of a run that reached its end, and show its results."""
    _refuse_only_skips(loop)
    parts, writes = loop.parts, loop.checkpoints.writes
    if writes or parts.sharded is not None:
        export_model(parts, folder)
    if writes:
        joules = energy.read_joules()
        write_summary(folder, loop, joules)
        busy = describe_gpu_use(monitor, loop.waiting, loop.journal.elapsed_s, loop.engine.mode)
        if loop.journal.report.trackers:
            write_atomically(folder.report / "report.html", render_runs([read_run(folder.path)]))
            files = [folder.config, folder.plan, folder.metrics]
            files += [folder.report / name for name in ("summary.json", "report.html")]
            loop.journal.report.add_files(files)
        show_summary(folder, loop, data, joules, busy)


def explain_ending(
    error: HalfstepError | KeyboardInterrupt, loop: Loop, folder: RunFolder, *, is_new: bool
) -> HalfstepError:
    """Return the error to show, with what was kept of the run and the command to resume it."""
    if isinstance(error, KeyboardInterrupt):
        return _explain_second_interrupt(loop, folder, is_new=is_new)
    if is_new and has_left_nothing(loop):
        shutil.rmtree(folder.path, ignore_errors=True)
        gone = f"nothing was trained yet: {folder.path} was removed"
        return _extend_error(error, why=gone, fix="then give the same command again")
    if isinstance(error, DataError):
        return _save_after_bad_file(error, loop, folder)
    if isinstance(error, TrainingStopped) and not isinstance(error, CallbackFailed):
        names, capsules = loop.journal.list_latest_files(), list_capsules(folder.path / "capsules")
        cause = f"find the cause with: {suggest_command('replay', capsules[0])}" if capsules else ""
        error.fix = "; ".join(filter(None, [cause, error.fix, f"files of that step: {names}" if names else ""]))
    return error


def _refuse_only_skips(loop: Loop) -> None:
    """Raise if a run reached its end without a single committed step: it must not look like a success."""
    step, (attempted, committed) = loop.parts.step, loop.started_at
    num_steps, last = step.attempted - attempted, loop.journal.latest
    went_back = loop.parts.guard.num_rollbacks > 0  # the counter goes back too, perhaps below a resumed run's start
    is_trained = int(step.committed) > (0 if went_back else committed)
    if num_steps == 0 or is_trained or last is None or not last.is_bad:
        return
    scaler = loop.parts.step.scaler
    # Only gradients overflowed and the scale can still fall: fp16 was still searching for it.
    is_search = last.reason.startswith("gradient norm") and float(scaler.value) > scaler.options.min_scale
    raise TrainingStopped(
        f"nothing was trained: all steps were skipped ({num_steps} of {num_steps}, the last one: {last.reason})",
        why="the weights are unchanged since the start of the run",
        fix="train longer, so that the loss scale can fall far enough, or start with a lower scaler.init_scale"
        if scaler.enabled and is_search
        else "look at the samples of skipped steps in metrics.jsonl, lower optimizer.lr, or "
        "check whether they also fail with --precision fp32",
    )


def has_left_nothing(loop: Loop) -> bool:
    """True if no step was taken and nothing was kept, so that the folder can be removed."""
    kept = [*loop.checkpoints.list_all(), *list_capsules(loop.checkpoints.folder.parent / "capsules")]
    return loop.parts.step.attempted == 0 and not kept


def _explain_second_interrupt(loop: Loop, folder: RunFolder, *, is_new: bool) -> Interrupted:
    what = f"stopped by a second Ctrl-C after step {loop.parts.step.attempted}, without saving"
    kept = loop.checkpoints.list_all()
    if kept:
        return Interrupted(
            what, why=f"the newest checkpoint is {kept[-1]}", fix=suggest_resume(folder.path, loop.parts.world)
        )
    if not is_new:
        return Interrupted(what)
    shutil.rmtree(folder.path, ignore_errors=True)
    return Interrupted(what, why=f"there was no checkpoint yet: {folder.path} was removed")


def _save_after_bad_file(error: DataError, loop: Loop, folder: RunFolder) -> HalfstepError:
    """Save what was trained before a bad file was read, as after Ctrl-C."""
    is_alone = loop.parts.world is None  # several ranks are in the middle of a step: there is no complete state
    if is_alone and (loop.position.batch > 0 or not loop.checkpoints.list_all()):
        try:
            loop.save()
        except CheckpointError as unsaved:
            return _extend_error(error, why=unsaved.what)
    left_out = " (and --allow-changes, because files are left out)" if "on_bad_file=skip" in error.fix else ""
    return _extend_error(error, fix=f"then {suggest_resume(folder.path, loop.parts.world)}{left_out}")


def _extend_error(error: HalfstepError, *, why: str = "", fix: str = "") -> HalfstepError:
    fix = fix if error.fix else fix.removeprefix("then ")
    error.why, error.fix = ("; ".join(filter(None, parts)) for parts in ((error.why, why), (error.fix, fix)))
    return error


# --- report/summary.json, and what trackers get ---


def write_summary(folder: RunFolder, loop: Loop, joules: float | None) -> None:
    """Write report/summary.json; energy and peak memory count since the last start or resume."""
    import halfstep

    parts, plan = loop.parts, loop.parts.plan
    best, num_samples, elapsed_s = parts.stopping.best, loop.count_samples(), loop.journal.elapsed_s
    record: dict[str, Any] = {
        "workload": parts.name,
        "metric": parts.workload.metric,
        "mode": parts.workload.mode,
        "best": best if math.isfinite(best) else None,
        "steps": parts.step.attempted,
        "epochs": num_samples / max(len(parts.workload.train_samples), 1),
        "samples": num_samples,
        "elapsed_s": elapsed_s,
        "samples_per_s": num_samples / max(elapsed_s, 1e-9),
        **loop.journal.unit.compute_rates(num_samples / max(elapsed_s, 1e-9)),
        "peak_memory_bytes": get_peak_memory_bytes(parts.device),
        "joules": joules,
        "skipped": loop.journal.num_skipped,
        **asdict(loop.waiting),
        "steps_run": loop.engine.mode,
        "precision": plan.granted,
        "simulated": plan.simulated,
        "device": f"{plan.device} ({plan.device_name})",
        "versions": {"halfstep": halfstep.__version__, "torch": torch.__version__},
        "command": ["halfstep", *sys.argv[1:]],
    }
    folder.report.mkdir(exist_ok=True)  # a resumed run may have been copied without it
    write_atomically(folder.report / "summary.json", json.dumps(record, indent=2) + "\n")


# --- RUN/model ---


def export_model(parts: Assembly, folder: RunFolder) -> None:
    """Export the best weights (the averaged ones, if any) atomically; every rank of a sharded run calls it.

    Rank 0 writes them tensor by tensor from the checkpoint's files, so that no rank holds the whole model.
    """
    checkpoints = folder.open_checkpoints()
    if parts.export is None and parts.sharded is None:
        return

    def find() -> Path:
        return checkpoints.find_best() or checkpoints.list_all()[-1]

    # The ranks of a sharded run each check their files; without it the other ranks are not here.
    world = parts.world if parts.sharded is not None else None
    path = world.broadcast_from_first(find) if world is not None else find()
    weights = open_weights(path, world)
    if world is not None and not world.is_first:
        return
    try:
        # An export of an earlier end is replaced: the run may have been resumed since.
        with open_atomic_folder(folder.model, replaces=True) as hidden:
            if parts.export is None:  # no other program has a format for it: the names are those of the model
                write_tensors(hidden / "model.safetensors", weights)
            else:
                parts.export(weights, hidden, parts.device)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model into {folder.model}: {error.strerror}",
            why=f"the run itself is complete; its best weights are in {path}",
            fix="free disk space, then resume the run, which only repeats the export",
        ) from error


# --- the header and the summary ---


ON_BAD_STEP: dict[str, str] = {
    "found_inf": "its fused kernel skips bad steps",
    "select": "bad steps are undone from a copy",
    "host": "the host checks each step, one wait per step",
}
"""How each commit method undoes a bad step, for the header."""


def open_report(loaded: Loaded, folder: RunFolder, parts: Assembly) -> RunReport:
    """Open the report of a run with its trackers and callbacks."""
    if parts.world is not None and not parts.world.is_first:
        return FarReport(parts.world)
    log, functions = parts.log, {path: import_callback(path) for path in parts.train.callbacks}
    listeners = open_trackers(
        log.track,
        folder.path,
        dump_values(loaded.config),
        dataclasses.asdict(parts.plan),
        after_step=find_last_step(folder.metrics),
        quiet=log.quiet,
    )
    return RunReport(
        folder.path,
        quiet=log.quiet,
        verbose=log.verbose,
        listeners=[*listeners, *([Callbacks(functions)] if functions else [])],
        log=folder.path / "train.log",
    )


def import_callback(path: str) -> Callable[..., object]:
    form = f"{path.partition(':')[2]}(event)"
    function = import_callable(path, what="train.callbacks", form=form)
    check_call_form(function, path, {}, form=form)
    return function


def show_start(
    report: RunReport, loaded: Loaded, folder: RunFolder, parts: Assembly, warnings: Sequence[str], *, is_new: bool
) -> None:
    """Show the header and warnings, and record where the settings of a new run come from."""
    show_header(report, loaded, folder, parts)
    if parts.world is not None and not parts.world.is_first:
        return
    if is_new:  # a resumed run would name config.yaml as the source of every setting
        write_atomically(folder.report / "config.json", json.dumps(dump_config(loaded), indent=1) + "\n")
    lacks_capsules = parts.plan.shards and loaded.config.guard.capsules > 0
    for warning in (*warnings, *describe_rank_effects(parts, lacks_capsules=lacks_capsules)):
        report.notice(warning, "warning")


def describe_rank_effects(parts: Assembly, *, lacks_capsules: bool) -> list[str]:
    """Return notes on what the number of ranks changes in training."""
    train, world = parts.train, parts.world
    if world is None or world.size == 1:
        return []
    notes = [
        f"computed over the samples of one rank, not of the whole batch: {what}" for what in parts.workload.by_batch
    ]
    each = world.count_rows(train.batch_size, world.size - 1)
    # Below 16 samples BatchNorm's statistics are noisy (Wu and He 2018).
    has_norm = any(type(m).__name__.startswith("BatchNorm") for m in parts.model.modules())
    if has_norm and each < 16 and not train.sync_batch_norm:
        notes += [
            f"BatchNorm computes its statistics over the {format_count(each, 'sample')} of one rank; "
            "train.sync_batch_norm=true uses those of all ranks (GPUs only)"
        ]
    if lacks_capsules:
        notes.append("faults are not saved as capsules (guard.capsules), because no rank holds the whole model")
    return notes


def show_header(report: RunReport, loaded: Loaded, folder: RunFolder, parts: Assembly) -> None:
    """Print what the run will do: precision with its reason, model, data, length, and all warnings."""
    config, plan = loaded.config, parts.plan
    num_parameters = sum(p.numel() for p in parts.model.parameters())
    num_train, num_val = len(parts.workload.train_samples), len(parts.workload.val_samples)
    train = config.train
    size = parts.world.size if parts.world is not None else 1
    is_even = size > 1 and train.batch_size % size == 0
    batch = f"{train.batch_size}" + (f" = {train.batch_size // size} × {size} ranks" if is_even else "")
    batch += f" x {train.accumulate} accumulated" if train.accumulate > 1 else ""
    commits = [
        f"{name} ({ON_BAD_STEP[method]}{f', {format_bytes(extra)} extra' if extra else ''})"
        for name, method, extra in parts.step.describe()
    ]
    apart = [f"{row.module} {row.compute}" for row in plan.rows if row.is_part]
    islands = [row.module for row in plan.rows if row.kind == "island"]
    chosen = loaded.origins.get("precision.default", DEFAULT)
    folder_from = loaded.origins.get("data.dir", DEFAULT)  # a folder typed as `data` is shown in full next to it
    by_launcher = f" ({chosen})" if chosen.layer == "launcher" else ""  # which the user may not know of
    rows = [
        ("precision", f"{plan.granted}{' (simulated)' if plan.simulated else ''}: {plan.reason}{by_launcher}"),
        ("weights", describe_half_weights(parts.step.optimizers)),
        ("other precision", list_some(apart, 4)),
        ("always fp32", list_some(islands, 4)),
        ("device", f"{plan.device} ({plan.device_name})"),
        ("model", f"{type(parts.model).__name__}, {num_parameters:,} parameters"),
        *describe_frozen(parts.workload.frozen, plan),
        ("data", f"{num_train:,} training, {format_count(num_val, 'validation sample')}"),
        ("data folder", (config.data.dir or "") + (f" ({folder_from})" if folder_from.layer != "default" else "")),
        *parts.workload.about,
        ("workers", f"{config.data.num_workers} ({loaded.origins.get('data.num_workers', DEFAULT)})"),
        ("batch", batch),
        ("steps", _describe_length(parts) + _describe_long_warmup(config.schedule.warmup_steps, parts.total_steps)),
        ("recomputed", describe_recomputed(parts.model)),
        ("phases", ", ".join(own.phase.when for own in parts.phases)),
        ("optimizer", ", ".join(commits)),
        ("scores", parts.workload.scoring),
        ("run", str(folder.path)),
    ]
    own = warn_of_rounding(parts.step.optimizers)
    warnings = (*loaded.warnings, *plan.warnings, *own, *_shorten_notes(parts.workload.notes))
    report.show_header(f"halfstep {config.workload}", [row for row in rows if row[1]], warnings=warnings)
    for line in format_header(loaded):
        report.notice(line)


def show_summary(folder: RunFolder, loop: Loop, data: DataConfig, joules: float | None, busy: str) -> None:
    """Print the result of the run, what it cost, and where its files are."""
    report, elapsed_s = loop.journal.report, loop.journal.elapsed_s
    parts, stopping = loop.parts, loop.parts.stopping
    memory = get_peak_memory_bytes(parts.device)
    best = loop.checkpoints.find_best()
    missing = "not validated" if loop.validated_at < 0 else "no finite validation"
    best_metric = f"{stopping.best:.4f} (epoch {stopping.best_epoch + 1})" if best else missing
    rows = [
        *([] if is_dry_run(folder.path) else [("run", str(folder.path))]),
        (f"best {parts.workload.metric}", best_metric),
        ("time", f"{elapsed_s:.1f} s" if elapsed_s < 60 else format_duration(elapsed_s)),
        ("speed", f"{parts.unit.format_rate(loop.count_samples() / max(elapsed_s, 1e-9))}, validation included"),
        ("peak memory", format_bytes(memory) if memory else "not measured on this device"),
        ("skipped steps", str(loop.journal.num_skipped)),
        *count_lost_updates(parts.step.optimizers),
    ]
    if joules is not None:
        each = joules / max(loop.num_samples * parts.unit.per_sample, 1)
        rows.append(("energy", f"{joules:.0f} J, {each:.3g} J per {parts.unit.name}"))
    if busy:
        rows.append(("GPU", busy))
    if loop.waiting.share > WORTH_SAYING:
        faster = suggest_faster_data(data.num_workers, count_cores())
        rows.append(("waiting for data", f"{loop.waiting.share:.0%} of the training time; faster with {faster}"))
    rows += report.trackers
    if not is_dry_run(folder.path):
        # Without validation data `evaluate` needs other data.
        held_out = () if len(parts.workload.val_samples) else ("--data", "DIR")
        closer = suggest_command("evaluate", folder.path, *held_out)
        curves = suggest_command("report", folder.path, "--open")
        rows += [("best checkpoint", str(best) if best else "none"), ("curves", curves), ("look closer", closer)]
    report.finish("done", rows)


def _describe_length(parts: Assembly) -> str:
    """Return a line such as `600 = 20 epochs of 30`, or the part that train.max_steps allows."""
    train = parts.train
    steps = math.ceil(len(parts.train_loader) / train.accumulate)
    if parts.total_steps == train.epochs * steps:
        more = f" (fewer than train.max_steps={train.max_steps})" if train.max_steps > parts.total_steps else ""
        return f"{parts.total_steps} = {format_count(train.epochs, 'epoch')} of {steps}{more}"
    return f"{parts.total_steps} (train.max_steps), {parts.total_steps / steps:.1f} epochs of {steps}"


def _describe_long_warmup(num_steps: int | None, total_steps: int) -> str:
    """Return what a warmup means that is longer than the run; empty for any other."""
    if num_steps is None or num_steps <= total_steps:
        return ""
    share = f"{total_steps / num_steps:.2g}"
    return f"; schedule.warmup_steps={num_steps} is longer: the learning rate only rises to {share} of optimizer.lr"


def _shorten_notes(notes: tuple[str, ...], most: int = 20) -> list[str]:
    """Return the first notes and the number of the remaining ones."""
    return [*notes[:most], *([f"and {format_count(len(notes) - most, 'more such file')}"] if len(notes) > most else [])]
