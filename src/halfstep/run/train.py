"""`train`: from a loaded config to a finished run folder, new or resumed."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfstep.config.dump import dump_values, to_yaml
from halfstep.config.load import Loaded
from halfstep.config.schema import RunConfig
from halfstep.disk import make_absolute, write_atomically
from halfstep.distributed.launch import Launch, join_world
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.facts import Hardware
from halfstep.hardware.memory import reset_peak
from halfstep.hardware.monitor import monitored
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.report.config_view import dump_config
from halfstep.report.curves import draw_curves
from halfstep.report.metrics_file import cut_back, read
from halfstep.report.run_report import RunReport
from halfstep.run.assemble import Assembly, assemble, build_workload, is_demo, plan_for, with_settled
from halfstep.run.capsules import record_faults
from halfstep.run.checkpoint import Checkpoint
from halfstep.run.checkpoint import load as load_checkpoint
from halfstep.run.ending import (
    Progress,
    ended_early,
    export,
    has_summary,
    is_exported,
    left_nothing,
    refuse_only_skips,
    write_summary,
)
from halfstep.run.folder import (
    RunFolder,
    Settled,
    changed_data,
    find_import_paths,
    record_data,
    with_absolute_paths,
    with_data_found,
)
from halfstep.run.frozen_modules import as_stored, identified, made_here, naming_lost_files, store
from halfstep.run.interrupts import interrupts, raised_at_once
from halfstep.run.journal import Journal, hint_about, how_busy
from halfstep.run.loop import Loop
from halfstep.run.memory.out_of_memory import OutOfMemory, explain_model_too_large
from halfstep.run.memory.sizing import choose_pieces, make_peak_predictor
from halfstep.run.multi_rank import notes_on, refuse_differences, refuse_unfit, seed_of
from halfstep.run.optimizing import steps_per_epoch
from halfstep.run.presentation import show_header, show_summary
from halfstep.run.resume import (
    Changes,
    as_settled,
    recover_settings,
    refuse_changes,
    refuse_missing_device,
    refuse_other_data,
    refuse_other_records,
    settled_by_run,
    why_finished,
)
from halfstep.run.run_rank import FarReport, RunRank, posted_warnings
from halfstep.run.stored_state import check_disk
from halfstep.step.randomness import choose_algorithms, seed_everything
from halfstep.tune.choose import MEASURED_FOR, Say, tuned, untuned
from halfstep.tune.fresh_thread import forget_compiled
from halfstep.tune.trials import Rehearse
from halfstep.workloads import KINDS, load
from halfstep.workloads.base.import_path import sign_code
from halfstep.workloads.base.workload import Workload

DEMO_NOTE = "no data folder was given: this is the DEMO, on data generated into {}; yours go in with --data-dir DIR"


def train(
    loaded: Loaded,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    allow_changes: bool = False,
    launch: Launch | None = None,
) -> Path:
    """Train, and return the run's folder. `launch` says which of several processes this is."""
    with join_world(loaded.config, launch) as world, raised_at_once():
        place = RunRank(launch, world)
        if world is not None:
            refuse_unfit(loaded.config, world)
            resume = resume or place.to_go_on_with(out)
        if resume is not None:
            return _resume(loaded, RunFolder.open(str(resume)), place, allow_changes=allow_changes)
        return _start(loaded, str(out) if out else None, place)


def _start(loaded: Loaded, out: str | None, place: RunRank) -> Path:
    """Everything that can be wrong is found before the run's folder is made; only the demo needs it earlier."""
    loaded = dataclasses.replace(loaded, config=with_absolute_paths(loaded.config))
    asked, hardware = loaded.config, probe(place.device_of(loaded.config))
    decide(loaded.config.precision, hardware)
    with_demo = is_demo(loaded.config)
    folder: RunFolder | None = None
    warnings: list[str] = []
    with ExitStack() as lock:
        try:
            if with_demo:
                folder = _created(out, f"{_run_name(loaded.config)}-demo", place)
                loaded = _with_demo_data(loaded, folder, place)
            workload = identified(build_workload(loaded.config))
            made = made_here(workload.frozen)
            loaded = dataclasses.replace(loaded, config=with_settled(loaded.config, workload))
            if place.world is not None:
                refuse_differences(loaded.config, workload, place.world)
            decided = partial(_decided, loaded.config, workload, hardware, place)
            plan = place.plan_from(decided, loaded.config, workload)
            parts = _assembled(loaded.config, workload, plan, place)
            if place.writes:
                warnings += check_disk(parts, folder or RunFolder.planned(out, _run_name(loaded.config)))
            folder = folder or _created(out, _run_name(loaded.config), place)
            if place.writes:
                lock.enter_context(folder.locked())
                record_data(workload, folder)
                store(made, folder.path)
                _write_settings(folder, loaded.config, plan, settled_by_run(asked, loaded.config))
            if place.world is not None and not place.world.is_first:
                seed_everything(seed_of(loaded.config.train.seed, 0, place.world.rank))
        except BaseException:  # Ctrl-C as well: nothing was trained, so nobody will miss the folder
            if folder is not None and place.writes:
                shutil.rmtree(folder.path)
            raise
        warnings += [DEMO_NOTE.format(folder.path / "data")] if with_demo else []
        _run(loaded, folder, parts, resumed=None, warnings=warnings)
    return folder.path


def _created(out: str | None, name: str, place: RunRank) -> RunFolder:
    return place.of_first(lambda: RunFolder.create(out, name))


def _decided(config: RunConfig, workload: Workload, hardware: Hardware, place: RunRank, rehearse: Rehearse) -> Plan:
    return _tried(config, workload, plan_for(config, workload, hardware), place, rehearse)


def _tried(config: RunConfig, workload: Workload, plan: Plan, place: RunRank, rehearse: Rehearse) -> Plan:
    """Return the plan with what trials find, and with the micro-batch of `train.auto_batch`."""
    own, say = place.on_trial(config), _say_unless(config.log.quiet)
    plan = tuned(own, workload, plan, say, rehearse, peak=make_peak_predictor(own, workload))
    if not config.train.auto_batch:
        return dataclasses.replace(plan, pieces=1)
    pieces = choose_pieces(own, workload, plan, say, rehearse, by_trial=place.world is not None)
    return dataclasses.replace(plan, pieces=pieces)


def _assembled(config: RunConfig, workload: Workload, plan: Plan, place: RunRank) -> Assembly:
    device = torch.device(plan.device)
    # A run before in this process: its code counts among the eight times that dynamo compiles a function, ours as well
    # as the user's, and its parts know each other and so outlive it.
    forget_compiled()
    gc.collect()
    try:
        return assemble(config, workload, plan, place.world)
    except OutOfMemory as error:
        raise explain_model_too_large(error, config, workload.model, device) from error


def _write_settings(folder: RunFolder, config: RunConfig, plan: Plan, decided: dict[str, list[Any]]) -> None:
    config = config.changed(log={"quiet": False})
    code = sign_code(find_import_paths(config))
    folder.write_settled(Settled(settings=dump_values(config), decided=decided, code=code))
    folder.write_plan(plan)
    write_atomically(folder.config, to_yaml(config))  # last: a folder with it is a run


def _with_demo_data(loaded: Loaded, folder: RunFolder, place: RunRank) -> Loaded:
    data_dir = make_absolute(folder.path) / "data"
    place.of_first(partial(_write_demo, loaded.config, data_dir))
    return dataclasses.replace(loaded, config=loaded.config.changed(data={"dir": str(data_dir)}))


def _write_demo(config: RunConfig, data_dir: Path) -> None:
    try:
        KINDS.of(config.workload).write_demo(config.workload, data_dir, seed=config.train.seed)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the demo's data into {data_dir}: {error.strerror}",
            fix="make room there, or choose another place for the run with --out",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    path: Path
    checkpoint: Checkpoint
    changes: Changes
    settled: Settled


def _resume(loaded: Loaded, folder: RunFolder, place: RunRank, *, allow_changes: bool) -> Path:
    own, settled = load(str(folder.config)), folder.settled()
    loaded = as_settled(loaded, own, settled.decided)
    kept = KINDS.of(own.config.workload).kept
    trained = recover_settings(settled.settings, own.config, folder.config, allow=allow_changes, kept=kept)
    stored, asked = (with_absolute_paths(one) for one in (trained, loaded.config))
    changes = refuse_changes(stored, asked, allow=allow_changes, kept=kept)
    config, moved = with_data_found(loaded.config, folder)
    loaded = dataclasses.replace(loaded, config=config)
    with folder.locked() if place.writes else nullcontext():
        damaged: list[str] = []
        path = place.of_first(lambda: _newest(folder, damaged))
        checkpoint = load_checkpoint(path)
        if (finished := why_finished(config, checkpoint.state)) and _is_tidy(config, folder, path, checkpoint):
            if place.writes:
                RunReport(folder.path).notice(f"{folder.path} is {finished}")
            return folder.path
        journal = checkpoint.state["journal"]
        other = place.of_first(lambda: refuse_other_records(folder.metrics, journal, allow=allow_changes))
        workload = _built_as_stored(loaded.config, checkpoint.state, folder)
        found = [len(workload.train_samples), len(workload.val_samples)]
        other += refuse_other_data(checkpoint.state["num_samples"], found, allow=allow_changes)
        if place.world is not None:
            refuse_differences(loaded.config, workload, place.world)
        go_on = partial(_plan_to_go_on, loaded.config, workload, folder, changes, place)
        plan = place.plan_from(go_on, loaded.config, workload)
        if place.writes:
            cut_back(folder.metrics, int(journal["num_records"]))
        parts = _assembled(loaded.config, workload, plan, place)
        warnings = [*damaged, *moved, *other, *changed_data(workload, folder), *check_disk(parts, folder)]
        resumed = Resumed(path=path, checkpoint=checkpoint, changes=changes, settled=settled)
        _run(loaded, folder, parts, resumed=resumed, warnings=warnings)
    return folder.path


def _newest(folder: RunFolder, damaged: list[str]) -> Path:
    checkpoints = folder.checkpoints()
    checkpoints.clean_up()
    checkpoints.best()  # a damaged best.json is refused before anything is trained
    return checkpoints.load_newest(on_damaged=damaged.append)[0]


def _built_as_stored(config: RunConfig, state: Mapping[str, Any], folder: RunFolder) -> Workload:
    stored = state["frozen"]
    with naming_lost_files(stored):
        workload = build_workload(config, dict(state["store"]))
    return dataclasses.replace(workload, frozen=as_stored(workload.frozen, stored, folder.path))


def _is_tidy(config: RunConfig, folder: RunFolder, path: Path, checkpoint: Checkpoint) -> bool:
    """Whether a kill between the last checkpoint and the end left nothing undone."""
    state = checkpoint.state
    is_validated = (
        state["position"]["epoch"] >= config.train.epochs
        or state["validated_at"] == state["step"]["attempted"]
        or state["num_samples"][1] == 0
    )
    is_marked = not state["is_best"] or folder.checkpoints().best() == path
    is_drawn = not config.log.curves or (folder.report / "curves.png").is_file()
    return is_validated and is_marked and is_drawn and has_summary(folder) and is_exported(config.workload, folder)


def _plan_to_go_on(
    config: RunConfig, workload: Workload, folder: RunFolder, changes: Changes, place: RunRank, rehearse: Rehearse
) -> Plan:
    """The stored one; what was decided or measured for settings that are others now is decided or measured again."""
    if changes.touch("precision.", "device"):
        return _decided(config, workload, probe(place.device_of(config)), place, rehearse)
    plan = folder.stored_plan()
    refuse_missing_device(plan)
    if not changes.touch(*MEASURED_FOR):
        return plan
    plan = untuned(plan, keeps_memory=not changes.touch("train.memory", "optimizer.name"))
    return _tried(config, workload, plan, place, rehearse)


def _continue(loop: Loop, folder: RunFolder, resumed: Resumed) -> None:
    """Everything back in place; only then are accepted changes written, so that one that fails does not stay."""
    for note in (*resumed.changes.notes, f"resuming from {resumed.path.name}"):
        loop.journal.notice(note)
    loop.restore(resumed.path, resumed.checkpoint, resumed.changes)
    is_same = not resumed.changes.keys and resumed.settled.code == sign_code(find_import_paths(loop.parts.config))
    if loop.checkpoints.writes and not is_same:
        _write_settings(folder, loop.parts.config, loop.parts.plan, resumed.settled.decided)


def _run(loaded: Loaded, folder: RunFolder, parts: Assembly, *, resumed: Resumed | None, warnings: list[str]) -> None:
    config, world = loaded.config, parts.world
    writes = world is None or world.is_first
    report = _report(folder, config, world)
    journal = _journal(parts, report)
    record_faults(parts, folder, journal.notice)
    with (
        ExitStack() as watch,
        choose_algorithms(deterministic=config.train.deterministic),
        interrupts(answers=writes) as asked_to_stop,
    ):
        checkpoints = folder.checkpoints(keep=config.train.checkpoints_total_limit, writes=writes)
        loop = Loop(parts, checkpoints, journal, asked_to_stop)
        is_new = resumed is None
        if world is not None and not world.is_first:
            watch.enter_context(posted_warnings(world))
        asked_to_stop.last_words = lambda: str(ended_early(KeyboardInterrupt(), loop, folder, is_new=is_new))
        try:
            show_header(report, loaded, folder, parts)
            if is_new and writes:  # a resumed run would name its own config.yaml as the source of everything
                write_atomically(folder.report / "config.json", json.dumps(dump_config(loaded), indent=1) + "\n")
            for warning in (*warnings, *notes_on(config, parts.workload, parts.model, world)) if writes else ():
                report.notice(warning, "warning")
            if resumed is not None:
                _continue(loop, folder, resumed)
            reset_peak(parts.device)
            clock, energy = Stopwatch(), EnergyMeter(parts.device)
            start = Progress.of(parts.step)
            monitor = watch.enter_context(monitored(parts.device, folder.path / "monitor.jsonl", records=writes))
            journal.gpu, loop.settled = monitor.in_short, monitor.settle
            loop.run()
            loop.hear_others()
            monitor.stop()
            refuse_only_skips(loop, start)
            if writes:
                _draw(config, folder, report)
                export(parts, folder)
                elapsed_s, joules = clock.elapsed_s, energy.joules()
                write_summary(folder, loop, elapsed_s, joules)
                busy = how_busy(monitor, loop.waiting, elapsed_s, loop.engine.mode)
                show_summary(report, folder, loop, elapsed_s, joules, busy)
        except (HalfstepError, KeyboardInterrupt) as error:
            shown = ended_early(error, loop, folder, is_new=is_new and writes)
            if folder.path.is_dir() and writes:
                _draw(config, folder, report)
            if shown is error:
                raise
            raise shown from error
        except Exception:  # somebody's own code: its traceback is what they need, an empty run is not
            if is_new and writes and left_nothing(loop):
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        finally:
            report.close()
            parts.train_loader.close()
            parts.val_loader.close()


def _report(folder: RunFolder, config: RunConfig, world: World | None) -> RunReport:
    if world is not None and not world.is_first:
        return FarReport(world)
    return RunReport(folder.path, quiet=config.log.quiet, tensorboard=config.log.tensorboard)


def _journal(parts: Assembly, report: RunReport) -> Journal:
    train, workload = parts.config.train, parts.workload
    # Ten lines at least: the curves of a run of five steps are five points.
    every = max(1, min(10, parts.total_steps // 10)) if train.report_every == "auto" else train.report_every
    epochs = math.ceil(parts.total_steps / steps_per_epoch(parts.config, len(parts.train_loader)))
    journal = Journal(
        report, parts.plan, epochs=epochs, report_every=every, metric=workload.metric,
        samples=workload.train_samples, phases=[own.phase.name for own in parts.phases],
        hint=partial(hint_about, parts.config.workload), unit=parts.unit, low_scale=parts.step.scaler.low,
    )  # fmt: skip
    parts.guard.observers.append(journal.observe)
    return journal


def _say_unless(quiet: bool) -> Say:
    """Before there is a run to report on, trials tell what they do on stderr."""
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def _draw(config: RunConfig, folder: RunFolder, report: RunReport) -> None:
    """The curves are a by-product: a disk too full for them must not hide why the run ended."""
    if not config.log.curves:
        return
    try:
        draw_curves(read(folder.metrics), folder.report / "curves.png")
    except HalfstepError as error:
        report.notice(str(error), "warning")


def _run_name(config: RunConfig) -> str:
    return config.workload.replace(":", "-").replace("/", "-")
