"""Train a loaded config, as a new run or a resumed one, up to a finished run folder."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.disk import make_absolute, write_atomically
from halfstep.distributed.world import World
from halfstep.errors import CheckpointError, HalfstepError, format_count
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.memory import reset_peak
from halfstep.hardware.monitor import monitor_device
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.optim.recut_shards import recut_optimizer_states
from halfstep.step.randomness import choose_algorithms, seed_everything
from halfstep_train.config.dump import dump_values, to_yaml
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig
from halfstep_train.config.statements import Origin
from halfstep_train.report.config_view import dump_config
from halfstep_train.report.curves import draw_curves
from halfstep_train.report.listeners import Callbacks, open_trackers, refuse_missing
from halfstep_train.report.metrics_file import cut_back, find_last_step, read
from halfstep_train.report.page.read_run import read_run
from halfstep_train.report.page.render import render_runs
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import Assembly, apply_settled, assemble, build_workload, decide_plan, is_demo
from halfstep_train.run.capsules import record_faults
from halfstep_train.run.checkpoint import Checkpoint, is_sharded
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.ending import (
    Progress,
    explain_ending,
    export_model,
    has_left_nothing,
    has_summary,
    is_exported,
    refuse_only_skips,
    write_summary,
)
from halfstep_train.run.folder import (
    RunFolder,
    Settled,
    describe_changed_data,
    find_import_paths,
    find_moved_data,
    make_paths_absolute,
    record_data,
)
from halfstep_train.run.frozen_modules import (
    add_checksums,
    copy_made_here,
    match_stored,
    name_lost_files,
    write_made_here,
)
from halfstep_train.run.interrupts import catch_interrupts, raise_at_once
from halfstep_train.run.journal import Journal, describe_gpu_use, find_hint
from halfstep_train.run.launch import Launch, join_world
from halfstep_train.run.loop import Loop
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_model_too_large
from halfstep_train.run.memory.sizing import (
    choose_pieces,
    choose_reduction,
    choose_sharding,
    make_peak_predictor,
    predict_memory_for_page,
)
from halfstep_train.run.multi_rank import derive_seed, describe_rank_effects, refuse_differences, refuse_unfit
from halfstep_train.run.optimizer import count_steps_per_epoch
from halfstep_train.run.presentation import show_header, show_summary
from halfstep_train.run.resume import (
    Changes,
    apply_decided,
    explain_finished,
    find_settled,
    recover_settings,
    refuse_changed_data,
    refuse_changed_records,
    refuse_changes,
    refuse_missing_device,
)
from halfstep_train.run.run_rank import FarReport, RunRank, post_warnings
from halfstep_train.run.sharded_model import choose_sharded_mode, make_mesh, refuse_unshardable
from halfstep_train.run.stored_state import check_disk
from halfstep_train.tune.choose import MEASURED_FOR, Say, strip_tuning, tune_plan
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.tune.trials import Rehearse
from halfstep_train.workloads import KINDS, load
from halfstep_train.workloads.base.import_path import check_call_form, import_callable, sign_code
from halfstep_train.workloads.base.workload import Workload

if TYPE_CHECKING:
    from halfstep.distributed.sharded_files import StoredShards

DEMO_NOTE = "no data folder was given: this is the DEMO, on data generated in {}; give your data with --data-dir DIR"


def train(
    loaded: Loaded,
    *,
    out: Path | None = None,
    resume: Path | None = None,
    allow_changes: bool = False,
    launch: Launch | None = None,
) -> Path:
    """Train, and return the run's folder. `launch` identifies this rank among several."""
    with join_world(loaded.config, launch) as world, raise_at_once():
        rank = RunRank(launch, world)
        refuse_missing(loaded.config.log.track)
        for path in loaded.config.train.callbacks:
            _import_callback(path)
        if world is not None:
            refuse_unfit(loaded.config, world)
            resume = resume or rank.find_restarted_run(out)
        if resume is not None:
            return _resume(loaded, RunFolder.open(str(resume)), rank, allow_changes=allow_changes)
        return _start(loaded, str(out) if out else None, rank)


def _start(loaded: Loaded, out: str | None, rank: RunRank) -> Path:
    """Start a new run; create its folder only after everything that can fail was checked (a demo needs it earlier)."""
    loaded = dataclasses.replace(loaded, config=make_paths_absolute(loaded.config))
    asked, hardware = loaded.config, probe(rank.choose_device(loaded.config))
    decide(loaded.config.precision, hardware)  # refuses a missing format before anything is built
    with_demo = is_demo(loaded.config)
    folder: RunFolder | None = None
    warnings: list[str] = []
    with ExitStack() as lock:
        try:
            if with_demo:
                folder = _create_folder(out, f"{_name_run(loaded.config)}-demo", rank)
                loaded = _make_demo_data(loaded, folder, rank)
            workload = add_checksums(build_workload(loaded.config))
            made = copy_made_here(workload.frozen)
            loaded = dataclasses.replace(loaded, config=apply_settled(loaded.config, workload))
            refuse_unshardable(loaded.config, workload, rank.world)
            if rank.world is not None:
                refuse_differences(loaded.config, workload, rank.world)
            decided = partial(_decide, loaded.config, workload, hardware, rank)
            plan = rank.agree_on_plan(decided, loaded.config, workload)
            parts = _assemble(loaded.config, workload, plan, rank)
            if rank.writes:
                warnings += check_disk(parts, folder or RunFolder.choose(out, _name_run(loaded.config)))
            folder = folder or _create_folder(out, _name_run(loaded.config), rank)
            if rank.writes:
                lock.enter_context(folder.lock())
                record_data(workload, folder)
                write_made_here(made, folder.path)
                _write_settings(folder, loaded.config, plan, find_settled(asked, loaded.config))
            if rank.world is not None and not rank.world.is_first:
                # Dropout must differ between ranks; rank 0 keeps the seed of a single-rank run.
                seed_everything(derive_seed(loaded.config.train.seed, 0, rank.world.rank))
        except BaseException:  # including Ctrl-C: nothing was trained, so remove the folder
            if folder is not None and rank.writes:
                shutil.rmtree(folder.path)
            raise
        warnings += [DEMO_NOTE.format(folder.path / "data")] if with_demo else []
        _run(loaded, folder, parts, resumed=None, warnings=warnings)
    return folder.path


def _create_folder(out: str | None, name: str, rank: RunRank) -> RunFolder:
    return rank.run_on_first(lambda: RunFolder.create(out, name))


def _decide(config: RunConfig, workload: Workload, hardware: Hardware, rank: RunRank, rehearse: Rehearse) -> Plan:
    plan = decide_plan(config, workload, hardware)
    if rank.world is not None:
        plan = choose_sharding(config, workload, plan, rank.world.size, _make_say(config.log.quiet))
    return _try_modes(config, workload, plan, rank, rehearse)


def _try_modes(config: RunConfig, workload: Workload, plan: Plan, rank: RunRank, rehearse: Rehearse) -> Plan:
    """Return the plan with what trials find, and with the micro-batch of `train.auto_batch`."""
    own, say = rank.get_trial_config(config), _make_say(config.log.quiet)
    if plan.shards and rank.world is not None:
        plan = dataclasses.replace(choose_sharded_mode(config, plan, say), pieces=1)
        return choose_reduction(config, workload, plan, rank.world.size, say)
    plan = tune_plan(own, workload, plan, say, rehearse, peak=make_peak_predictor(own, workload))
    if not config.train.auto_batch:
        return dataclasses.replace(plan, pieces=1)
    pieces = choose_pieces(own, workload, plan, say, rehearse, by_trial=rank.world is not None)
    return dataclasses.replace(plan, pieces=pieces)


def _assemble(config: RunConfig, workload: Workload, plan: Plan, rank: RunRank) -> Assembly:
    """Assemble the run; a model that does not fit into memory is an error with suggestions."""
    device = torch.device(plan.device)
    # Clean up after a previous run in this process: its code counts towards dynamo's limit of eight compilations per
    # function, and its reference cycles keep memory alive.
    forget_compiled()
    gc.collect()
    try:
        return assemble(config, workload, plan, rank.world)
    except OutOfMemory as error:
        raise explain_model_too_large(error, config, workload.model, device) from error


def _write_settings(
    folder: RunFolder,
    config: RunConfig,
    plan: Plan,
    decided: dict[str, list[Any]],
    before: Sequence[dict[str, Any]] = (),
) -> None:
    """Write settled.json, plan.json and config.yaml."""
    config = config.replace(log={"quiet": False, "verbose": False})
    code = sign_code(find_import_paths(config))
    folder.write_settled(Settled(settings=dump_values(config), decided=decided, code=code, before=list(before)))
    folder.write_plan(plan)
    write_atomically(folder.config, to_yaml(config))  # last, because a folder with this file counts as a run


def _make_demo_data(loaded: Loaded, folder: RunFolder, rank: RunRank) -> Loaded:
    data_dir = make_absolute(folder.path) / "data"
    rank.run_on_first(partial(_write_demo, loaded.config, data_dir))
    origins = {**loaded.origins, "data.dir": Origin(layer="default", where="generated demo data")}
    return dataclasses.replace(loaded, config=loaded.config.replace(data={"dir": str(data_dir)}), origins=origins)


def _write_demo(config: RunConfig, data_dir: Path) -> None:
    try:
        KINDS.of(config.workload).write_demo(config.workload, data_dir, seed=config.train.seed)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the demo data to {data_dir}: {error.strerror}",
            fix="free disk space, or choose another folder with --out",
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """What a resumed run continues from."""

    path: Path
    checkpoint: Checkpoint
    changes: Changes
    settled: Settled


def _resume(loaded: Loaded, folder: RunFolder, rank: RunRank, *, allow_changes: bool) -> Path:
    """Resume a run from its newest intact checkpoint; refuse changes that are not allowed before loading anything."""
    own, settled = load(str(folder.config)), folder.read_settled()
    # What the run decided itself (from its data) is not a change of the user.
    loaded = apply_decided(loaded, own, settled.decided)
    kept = KINDS.of(own.config.workload).kept
    trained = recover_settings(settled.settings, own.config, folder.config, allow=allow_changes, kept=kept)
    # Compare absolute paths: the run may be resumed from another folder.
    stored, asked = (make_paths_absolute(one) for one in (trained, loaded.config))
    changes = refuse_changes(stored, asked, allow=allow_changes, kept=kept)
    config, moved = find_moved_data(loaded.config, folder)
    loaded = dataclasses.replace(loaded, config=config)
    with folder.lock() if rank.writes else nullcontext():
        damaged: list[str] = []
        path = rank.run_on_first(lambda: _find_newest(folder, damaged))
        checkpoint, shards, note = _load_own_part(loaded.config, path, rank, allow_changes=allow_changes)
        # A finished run may still lack files that a kill prevented.
        if (finished := explain_finished(config, checkpoint.state)) and _is_tidy(config, folder, path, checkpoint):
            if rank.writes:
                RunReport(folder.path).notice(f"{folder.path} is {finished}")
            return folder.path
        journal = checkpoint.state["journal"]
        other = rank.run_on_first(lambda: refuse_changed_records(folder.metrics, journal, allow=allow_changes))
        workload = _build_as_stored(loaded.config, checkpoint.state, folder)
        found = [len(workload.train_samples), len(workload.val_samples)]
        other += refuse_changed_data(checkpoint.state["num_samples"], found, allow=allow_changes)
        refuse_unshardable(loaded.config, workload, rank.world)
        if rank.world is not None:
            refuse_differences(loaded.config, workload, rank.world, resumes=True)
        go_on = partial(_choose_plan, loaded.config, workload, folder, changes, rank, is_other_mesh=bool(note))
        plan = rank.agree_on_plan(go_on, loaded.config, workload)
        if rank.writes:
            # Remove records of steps after the checkpoint: they will be repeated.
            cut_back(folder.metrics, int(journal["num_records"]))
        parts = _assemble(loaded.config, workload, plan, rank)
        warnings = [*damaged, *moved, *other, *describe_changed_data(workload, folder), *check_disk(parts, folder)]
        warnings += _cut_for_fewer_ranks(checkpoint.state, rank)
        if note and shards is not None:
            states = checkpoint.state["step"]["optimizers"]
            place = ("state", "state", "step", "optimizers")
            warnings += [note, *recut_optimizer_states(shards, parts.model, parts.step.optimizers, states, place)]
        resumed = Resumed(path=path, checkpoint=checkpoint, changes=changes, settled=settled)
        _run(loaded, folder, parts, resumed=resumed, warnings=warnings)
    return folder.path


def _load_own_part(
    config: RunConfig, path: Path, rank: RunRank, *, allow_changes: bool
) -> tuple[Checkpoint, StoredShards | None, str]:
    """Return the checkpoint, of a sharded one this rank's part, and a line if another number of ranks wrote it."""
    if not is_sharded(path):
        return load_checkpoint(path), None, ""
    from halfstep.distributed.sharded_files import StoredShards

    stored = StoredShards(path, rank.world)
    shards = rank.world is not None and config.train.shard is not False
    mesh = make_mesh(torch.device(probe(rank.choose_device(config)).device)) if shards else None
    # torchrun starts fewer ranks after a machine is lost: the run goes on with them.
    is_restarted = rank.launch is not None and rank.launch.restarts > 0
    way = "--allow-changes" if shards else "train.shard=false --allow-changes"
    fix = f"accept it with {way} (--gpus N starts N ranks)"
    note = stored.refuse_other_mesh(mesh, reshard=allow_changes or is_restarted, fix=fix)
    return load_checkpoint(path, stored, mesh), stored, note


def _cut_for_fewer_ranks(state: dict[str, Any], rank: RunRank) -> list[str]:
    """Cut batches further after torchrun has lost ranks, so that those that are left need no more memory."""
    then, now = len(state.get("rank_generators", ())), rank.world.size if rank.world is not None else 1
    if rank.launch is None or not rank.launch.restarts or then <= now:
        return []
    for own in (state, *state.get("phases", {}).values()):
        own["pieces"] = -(-then // now) * int(own["pieces"])
    return [
        f"{format_count(now, 'rank')} instead of {then}: each batch is cut into {state['pieces']} micro-batches, "
        "with the same samples per step"
    ]


def _find_newest(folder: RunFolder, damaged: list[str]) -> Path:
    checkpoints = folder.open_checkpoints()
    checkpoints.clean_up()
    checkpoints.find_best()  # raises on a damaged best.json before anything is trained
    return checkpoints.find_newest(on_damaged=damaged.append)


def _build_as_stored(config: RunConfig, state: Mapping[str, Any], folder: RunFolder) -> Workload:
    stored = state["frozen"]
    with name_lost_files(stored):
        workload = build_workload(config, dict(state["store"]))
    return dataclasses.replace(workload, frozen=match_stored(workload.frozen, stored, folder.path))


def _is_tidy(config: RunConfig, folder: RunFolder, path: Path, checkpoint: Checkpoint) -> bool:
    """True if a finished run also has its last validation, mark of the best checkpoint, curves, summary and export."""
    state = checkpoint.state
    is_validated = (
        state["position"]["epoch"] >= config.train.epochs
        or state["validated_at"] == state["step"]["attempted"]
        or state["num_samples"][1] == 0
    )
    is_marked = not state["is_best"] or folder.open_checkpoints().find_best() == path
    is_drawn = not config.log.curves or (folder.report / "curves.png").is_file()
    return is_validated and is_marked and is_drawn and has_summary(folder) and is_exported(config.workload, folder)


def _choose_plan(
    config: RunConfig, workload: Workload, folder: RunFolder, changes: Changes, rank: RunRank, rehearse: Rehearse,
    *, is_other_mesh: bool,
) -> Plan:  # fmt: skip
    """Return the stored plan, with new decisions and measurements for settings that have changed."""
    if is_other_mesh or changes.touch("precision.", "device", "train.shard"):
        return _decide(config, workload, probe(rank.choose_device(config)), rank, rehearse)
    plan = folder.read_plan()
    refuse_missing_device(plan)
    # Trials were measured for other settings: forget what they found and repeat them.
    if not changes.touch(*MEASURED_FOR):
        return plan
    plan = strip_tuning(plan, keeps_memory=not changes.touch("train.memory", "optimizer.name"))
    return _try_modes(config, workload, plan, rank, rehearse)


def _continue(loop: Loop, folder: RunFolder, resumed: Resumed) -> None:
    """Restore the run's state, then store accepted changes; in this order, so that a failing change is not stored."""
    for note in resumed.changes.notes:
        loop.journal.notice(note)
    loop.restore(resumed.path, resumed.checkpoint, resumed.changes)
    loop.journal.notice(f"resuming from {resumed.path.name}: {loop.journal.describe_progress()}")
    settled, attempted = resumed.settled, int(resumed.checkpoint.state["step"]["attempted"])
    # After a damaged checkpoint the run continues from an earlier one, and later steps are repeated with new settings.
    before = [{**one, "until": min(one["until"], attempted)} for one in settled.before]
    if resumed.changes.keys:
        before.append({"until": attempted, "settings": settled.settings})
    is_same = before == settled.before and settled.code == sign_code(find_import_paths(loop.parts.config))
    is_same = is_same and loop.parts.plan == folder.read_plan()  # another number of ranks may have changed it
    if loop.checkpoints.writes and not is_same:
        _write_settings(folder, loop.parts.config, loop.parts.plan, settled.decided, before)


def _run(loaded: Loaded, folder: RunFolder, parts: Assembly, *, resumed: Resumed | None, warnings: list[str]) -> None:
    """Run an assembled run to its end, and write its report, curves, model and summary."""
    config, world = loaded.config, parts.world
    writes = world is None or world.is_first
    try:
        report = _open_report(folder, config, parts.plan, world)
    except HalfstepError:  # a tracker that does not start: nothing was trained
        if resumed is None and writes:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    journal = _open_journal(parts, report)
    # Before the first step, so that a fault in it is recorded too.
    record_faults(parts, folder, journal.notice)
    with (
        ExitStack() as watch,
        choose_algorithms(deterministic=config.train.deterministic),
        catch_interrupts(answers=writes) as asked_to_stop,
    ):
        checkpoints = folder.open_checkpoints(
            keep=config.train.checkpoints_total_limit, writes=writes, world=world if parts.sharded is not None else None
        )
        loop = Loop(parts, checkpoints, journal, asked_to_stop)
        is_new = resumed is None
        if world is not None and not world.is_first:
            watch.enter_context(post_warnings(world))
        asked_to_stop.make_last_message = lambda: str(explain_ending(KeyboardInterrupt(), loop, folder, is_new=is_new))
        try:
            show_header(report, loaded, folder, parts)
            if is_new and writes:  # a resumed run would name config.yaml as the source of every setting
                write_atomically(folder.report / "config.json", json.dumps(dump_config(loaded), indent=1) + "\n")
            for warning in (
                (*warnings, *describe_rank_effects(config, parts.workload, parts.model, world, parts.plan))
                if writes
                else ()
            ):
                report.notice(warning, "warning")
            if resumed is not None:
                _continue(loop, folder, resumed)
            reset_peak(parts.device)
            energy = EnergyMeter(parts.device)
            start = Progress.of(parts.step)
            monitor = watch.enter_context(monitor_device(parts.device, folder.path / "monitor.jsonl", records=writes))
            journal.gpu, loop.settled = monitor.summarise, monitor.mark_steady
            loop.run()
            loop.show_rank_warnings()
            monitor.stop()
            # A run that trained nothing must not look like a success.
            refuse_only_skips(loop, start)
            if writes:
                _draw_curves(config, folder, report)
            if writes or parts.sharded is not None:
                export_model(parts, folder)
            if writes:
                joules = energy.read_joules()
                write_summary(folder, loop, joules)
                busy = describe_gpu_use(monitor, loop.waiting, journal.elapsed_s, loop.engine.mode)
                _track_files(folder, report)
                show_summary(report, folder, loop, joules, busy)
        except (HalfstepError, KeyboardInterrupt) as error:
            shown = explain_ending(error, loop, folder, is_new=is_new and writes)
            if folder.path.is_dir() and writes:
                _draw_curves(config, folder, report)
            if shown is error:
                raise
            raise shown from error
        except Exception:  # an error in custom code: show its traceback, but leave no empty run
            if is_new and writes and has_left_nothing(loop):
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        finally:
            report.close()
            parts.train_loader.close()
            parts.val_loader.close()


def _open_report(folder: RunFolder, config: RunConfig, plan: Plan, world: World | None) -> RunReport:
    if world is not None and not world.is_first:
        return FarReport(world)
    functions = {path: _import_callback(path) for path in config.train.callbacks}
    listeners = open_trackers(
        config.log.track,
        folder.path,
        dump_values(config),
        dataclasses.asdict(plan),
        after_step=find_last_step(folder.metrics),
        quiet=config.log.quiet,
    )
    return RunReport(
        folder.path,
        quiet=config.log.quiet,
        verbose=config.log.verbose,
        listeners=[*listeners, *([Callbacks(functions)] if functions else [])],
    )


def _import_callback(path: str) -> Callable[..., object]:
    form = f"{path.partition(':')[2]}(event)"
    function = import_callable(path, what="train.callbacks", form=form)
    check_call_form(function, path, {}, form=form)
    return function


def _track_files(folder: RunFolder, report: RunReport) -> None:
    """Send config, plan, records and the HTML report to the trackers."""
    if not report.trackers:
        return
    page = render_runs([read_run(folder.path)], [predict_memory_for_page(folder.path)])
    write_atomically(folder.report / "report.html", page)
    names = ("summary.json", "curves.png", "report.html")
    files = [folder.config, folder.plan, folder.metrics, *(folder.report / name for name in names)]
    report.add_files([file for file in files if file.is_file()])


def _open_journal(parts: Assembly, report: RunReport) -> Journal:
    """Open the journal and let the guard report to it."""
    train, workload = parts.config.train, parts.workload
    # At least ten records per run, so that short runs have curves too.
    every = max(1, min(10, parts.total_steps // 10)) if train.report_every == "auto" else train.report_every
    epochs = math.ceil(parts.total_steps / count_steps_per_epoch(parts.config, len(parts.train_loader)))
    journal = Journal(
        report, parts.plan, epochs=epochs, report_every=every, metric=workload.metric,
        samples=workload.train_samples, phases=[own.phase.name for own in parts.phases],
        hint=partial(find_hint, parts.config.workload), unit=parts.unit, low_scale=parts.step.scaler.low,
        total_steps=parts.total_steps,
    )  # fmt: skip
    parts.guard.observers.append(journal.observe)
    return journal


def _make_say(quiet: bool) -> Say:
    """Return a function that prints to stderr, for trials before the run has its report."""
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def _draw_curves(config: RunConfig, folder: RunFolder, report: RunReport) -> None:
    """Draw the curves; a failure is a warning, so that a full disk does not hide why the run ended."""
    if not config.log.curves:
        return
    try:
        draw_curves(read(folder.metrics), folder.report / "curves.png")
    except HalfstepError as error:
        report.notice(str(error), "warning")


def _name_run(config: RunConfig) -> str:
    return config.workload.replace(":", "-").replace("/", "-")
