"""End a run: explain errors with what was saved and how to resume, write report/summary.json, export the model."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from halfstep.disk import open_atomic_folder, write_atomically
from halfstep.errors import (
    CheckpointError,
    DataError,
    HalfstepError,
    Interrupted,
    TrainingStopped,
    suggest_command,
)
from halfstep.evidence.capsule import list_capsules
from halfstep.hardware.memory import get_peak_memory_bytes
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe
from halfstep.tensor_files import write_tensors
from halfstep_train.config.schema import DataConfig
from halfstep_train.report.listeners import CallbackFailed
from halfstep_train.report.page.read_run import read_run
from halfstep_train.report.page.render import render_runs
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.checkpoint import open_weights
from halfstep_train.run.folder import RunFolder, suggest_resume
from halfstep_train.run.journal import describe_gpu_use
from halfstep_train.run.loop import Loop
from halfstep_train.run.memory.sizing import predict_memory_for_page
from halfstep_train.run.monitor import Monitor
from halfstep_train.run.presentation import show_summary


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
        _track_files(folder, loop.journal.report)
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
        fix="train longer, which finds a loss scale, or start with a lower scaler.init_scale"
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


def _track_files(folder: RunFolder, report: RunReport) -> None:
    """Send config, plan, records and the HTML report to the trackers."""
    if not report.trackers:
        return
    page = render_runs([read_run(folder.path)], [predict_memory_for_page(folder.path)])
    write_atomically(folder.report / "report.html", page)
    files = [folder.config, folder.plan, folder.metrics, folder.report / "summary.json", folder.report / "report.html"]
    report.add_files([file for file in files if file.is_file()])


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
        "device_memory_bytes": probe(plan.device).memory_total_bytes,
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
