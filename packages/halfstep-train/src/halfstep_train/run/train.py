"""Train a loaded config, as a new run or a resumed one: choose its plan, and run it up to a finished run folder."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from halfstep.disk import make_absolute
from halfstep.errors import CheckpointError, HalfstepError, format_count
from halfstep.hardware.memory import reset_peak
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.optim.recut_shards import recut_optimizer_states
from halfstep.step.randomness import choose_algorithms
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.listeners import refuse_missing
from halfstep_train.report.metrics_file import cut_back
from halfstep_train.report.run_report import RunReport
from halfstep_train.run.assemble import Assembly, apply_settled, assemble, build_workload, decide_plan, is_demo
from halfstep_train.run.checkpoint import Checkpoint, is_sharded, open_shards
from halfstep_train.run.checkpoint import load as load_checkpoint
from halfstep_train.run.ending import finish_run, handle_ending, import_callback, open_report, show_start
from halfstep_train.run.engine import LeadingRehearsal, RunRehearsal
from halfstep_train.run.evidence import record_faults
from halfstep_train.run.folder import (
    FREE,
    Changes,
    RunFolder,
    RunSource,
    Settled,
    accept_changes,
    describe_changed_data,
    explain_finished,
    find_import_paths,
    find_moved_data,
    find_settled,
    make_paths_absolute,
    name_run,
    point_to_demo_data,
    record_data,
    refuse_changed_data,
    refuse_missing_device,
)
from halfstep_train.run.frozen_modules import (
    add_checksums,
    copy_made_here,
    match_stored,
    name_lost_files,
    write_made_here,
)
from halfstep_train.run.interrupts import catch_interrupts, raise_at_once
from halfstep_train.run.journal import Journal
from halfstep_train.run.launch import Launch, choose_device, join_world
from halfstep_train.run.loop import Loop
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_model_too_large
from halfstep_train.run.memory.sizing import (
    choose_pieces,
    choose_reduction,
    choose_sharding,
    explain_step_too_large,
    make_peak_predictor,
    measure_free_bytes,
)
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.run.monitor import monitor_device
from halfstep_train.run.multi_rank import (
    choose_sharded_mode,
    make_mesh,
    refuse_differences,
    refuse_small_batch,
    refuse_unshardable,
    seed_rank,
)
from halfstep_train.run.run_rank import RunRank, post_warnings
from halfstep_train.tune.choose import MEASURED_FOR, strip_tuning, tune_plan
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.tune.trials import Rehearsal
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.import_path import sign_code
from halfstep_train.workloads.base.workload import Workload

if TYPE_CHECKING:
    from halfstep.distributed.sharded_files import StoredShards

# --- what a resumed run continues from ---


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A stored run with its newest checkpoint, of a sharded one this rank's part, and what was changed since."""

    folder: RunFolder
    settled: Settled
    changes: Changes
    path: Path
    checkpoint: Checkpoint
    damaged: list[str]  # a line for each newer checkpoint that cannot be used
    shards: StoredShards | None
    note: str  # empty unless another number of ranks wrote it

    @property
    def state(self) -> dict[str, Any]:
        return self.checkpoint.state

    def is_done(self, config: RunConfig, *, tells: bool) -> bool:
        """True if nothing is left to do; a finished run may still lack files that a kill prevented."""
        epoch, asked = self.state["position"]["epoch"], config.train.epochs
        if asked < epoch:
            raise CheckpointError(
                f"{self.folder.path} has trained {format_count(epoch, 'epoch')}, not train.epochs={asked}",
                fix=f"train.epochs={epoch} ends the run here, a larger number continues it",
            )
        finished = explain_finished(config, self.state)
        if not finished or not self._is_tidy(config):
            return False
        if tells:
            changed = [key for key in self.changes.keys if not key.startswith(FREE)]
            unused = f"; nothing was trained with {', '.join(changed)}" if changed else ""
            RunReport(self.folder.path).notice(f"{self.folder.path} is {finished}{unused}")
        return True

    def _is_tidy(self, config: RunConfig) -> bool:
        """True if a finished run also has its last validation, mark of the best checkpoint, summary and export."""
        state, folder = self.state, self.folder
        is_validated = (
            state["position"]["epoch"] >= config.train.epochs
            or state["validated_at"] == state["step"]["attempted"]
            or state["num_samples"][1] == 0
        )
        is_marked = not state["is_best"] or folder.open_checkpoints().find_best() == self.path
        has_summary = (folder.report / "summary.json").is_file()
        is_exported = KINDS.of(config.workload).export is None or folder.model.is_dir()
        return is_validated and is_marked and has_summary and is_exported

    def build_workload(self, config: RunConfig) -> Workload:
        """Build the workload with what the run stored about its data and frozen modules."""
        stored = self.state["frozen"]
        with name_lost_files(stored):
            workload = build_workload(config, dict(self.state["store"]))
        return dataclasses.replace(workload, frozen=match_stored(workload.frozen, stored, self.folder.path))

    def fit_to_ranks(self, rank: RunRank, parts: Assembly) -> list[str]:
        """Change a state that another number of ranks wrote, and return notes on it."""
        notes = self._cut_for_fewer_ranks(rank)
        if self.note and self.shards is not None:
            states = self.state["step"]["optimizers"]
            place = ("state", "state", "step", "optimizers")
            recut = recut_optimizer_states(self.shards, parts.model, parts.step.optimizers, states, place)
            notes += [self.note, *recut]
        return notes

    def _cut_for_fewer_ranks(self, rank: RunRank) -> list[str]:
        """Cut batches further after torchrun has lost ranks, so that those that are left need no more memory."""
        state = self.state
        then, now = len(state.get("rank_generators", ())), rank.world.size if rank.world is not None else 1
        if rank.launch is None or not rank.launch.restarts or then <= now:
            return []
        for own in (state, *state.get("phases", {}).values()):
            own["pieces"] = -(-then // now) * int(own["pieces"])
        return [
            f"{format_count(now, 'rank')} instead of {then}: each batch is cut into {state['pieces']} micro-batches, "
            "with the same samples per step"
        ]

    def restore(self, loop: Loop, config: RunConfig) -> None:
        """Restore the run's state, then store accepted changes: a change that fails is not stored."""
        for note in self.changes.notes:
            loop.journal.notice(note)
        loop.restore(self.path, self.checkpoint, self.changes)
        loop.journal.notice(f"resuming from {self.path.name}: {loop.journal.describe_progress()}")
        settled, attempted = self.settled, int(self.state["step"]["attempted"])
        # After a damaged checkpoint the run continues from an earlier one, and repeats later steps with new settings.
        before = [{**one, "until": min(one["until"], attempted)} for one in settled.before]
        if self.changes.keys:
            before.append({"until": attempted, "settings": settled.settings})
        is_same = before == settled.before and settled.code == sign_code(find_import_paths(config))
        is_same = is_same and loop.parts.plan == self.folder.read_plan()  # another number of ranks may have changed it
        if loop.checkpoints.writes and not is_same:
            self.folder.write_settings(config, loop.parts.plan, settled.decided, before)


def open_stored_run(
    folder: RunFolder, settled: Settled, changes: Changes, config: RunConfig, rank: RunRank, device: str, *, allow: bool
) -> StoredRun:
    """Load the newest intact checkpoint; `allow` accepts changes, and one that another number of ranks wrote."""
    damaged: list[str] = []

    def find_newest() -> Path:
        checkpoints = folder.open_checkpoints()
        checkpoints.clean_up()
        checkpoints.find_best()  # raises on a damaged best.json before anything is trained
        return checkpoints.find_newest(on_damaged=damaged.append)

    path = rank.run_on_first(find_newest)
    stored, mesh, note = None, None, ""
    if is_sharded(path):
        stored = open_shards(path, rank.world)
        shards = rank.world is not None and config.train.shard is not False
        mesh = make_mesh(torch.device(probe(device).device)) if shards else None
        # torchrun starts fewer ranks after a machine is lost: the run goes on with them.
        is_restarted = rank.launch is not None and rank.launch.restarts > 0
        way = "--allow-changes" if shards else "train.shard=false --allow-changes"
        fix = f"accept it with {way} (--gpus N starts N ranks)"
        note = stored.refuse_other_mesh(mesh, reshard=allow or is_restarted, fix=fix)
    checkpoint = load_checkpoint(path, stored, mesh)
    return StoredRun(folder, settled, changes, path, checkpoint, damaged, stored, note)


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
    config = loaded.config
    with join_world(config.device, config.train, launch) as world, raise_at_once():
        rank = RunRank(launch, world)
        refuse_missing(config.log.track)
        for path in config.train.callbacks:
            import_callback(path)
        if world is not None:
            refuse_small_batch(loaded, world.size)
            resume = resume or rank.find_restarted_run(out)
        if resume is not None:
            return Run(loaded, rank).resume(RunFolder.open(str(resume)), allow_changes=allow_changes)
        return Run(loaded, rank).start(str(out) if out else None)


class Run:
    """A run on this rank, from its config to its finished folder."""

    folder: RunFolder
    workload: Workload
    parts: Assembly

    def __init__(self, loaded: Loaded, rank: RunRank) -> None:
        self.loaded, self.rank, self.world = loaded, rank, rank.world
        self.stored: StoredRun | None = None
        """What a resumed run continues from."""
        self.warnings: list[str] = []

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def device(self) -> str:
        """Return the device that this rank is asked to train on."""
        return choose_device(self.config.device, self.config.train.backend, self.rank.launch)

    # --- start or resume: folder, data, plan, assembly ---

    def start(self, out: str | None) -> Path:
        """Start a new run; create its folder only after everything that can fail was checked (a demo needs it
        earlier)."""
        self.loaded = dataclasses.replace(self.loaded, config=make_paths_absolute(self.config))
        asked, name = self.config, name_run(self.config.workload)
        # A strict precision that the device lacks is refused before anything is built.
        decide(asked.precision, probe(self.device))
        folder: RunFolder | None = None
        with ExitStack() as lock:
            try:
                if is_demo(asked):
                    folder = self._create_folder(out, f"{name}-demo")
                    data_dir, seed = make_absolute(folder.path) / "data", asked.train.seed
                    write_demo = KINDS.of(asked.workload).write_demo
                    self.rank.run_on_first(partial(write_demo, asked.workload, data_dir, seed=seed))
                    self.loaded = point_to_demo_data(self.loaded, data_dir)
                self.workload = add_checksums(build_workload(self.config))
                made = copy_made_here(self.workload.frozen)
                self.loaded = dataclasses.replace(self.loaded, config=apply_settled(self.config, self.workload))
                self._refuse_unfit()
                self._assemble(self._agree_on_plan(self._decide))
                folder = folder or self._create_folder(out, name)
                if self.rank.writes:
                    lock.enter_context(folder.lock())
                    record_data(self.workload, folder)
                    write_made_here(made, folder.path)
                    folder.write_settings(self.config, self.parts.plan, find_settled(asked, self.config))
                if self.world is not None and not self.world.is_first:
                    # Dropout must differ between ranks; rank 0 keeps the seed of a single-rank run.
                    seed_rank(self.config.train.seed, 0, self.world.rank)
            except BaseException:  # including Ctrl-C: nothing was trained, so remove the folder
                if folder is not None and self.rank.writes:
                    shutil.rmtree(folder.path)
                raise
            self.folder = folder
            self.warnings += [DEMO_NOTE.format(folder.path / "data")] if is_demo(asked) else []
            self.run()
        return folder.path

    def resume(self, folder: RunFolder, *, allow_changes: bool) -> Path:
        """Resume a run from its newest intact checkpoint; refuse changes that are not allowed before loading
        anything."""
        self.loaded, settled, changes = accept_changes(self.loaded, folder, allow=allow_changes)
        config, moved = find_moved_data(self.config, folder)
        self.loaded, self.folder = dataclasses.replace(self.loaded, config=config), folder
        with folder.lock() if self.rank.writes else nullcontext():
            stored = self.stored = open_stored_run(
                folder, settled, changes, config, self.rank, self.device, allow=allow_changes
            )
            if stored.is_done(config, tells=self.rank.writes):
                return folder.path
            self.workload = stored.build_workload(config)
            num_samples = [len(self.workload.train_samples), len(self.workload.val_samples)]
            other = refuse_changed_data(stored.state["num_samples"], num_samples, allow=allow_changes)
            self._refuse_unfit()
            is_changed = stored.note or changes.touch("precision.", "device", "train.shard")
            plan = self._agree_on_plan(self._decide if is_changed else partial(self._update, changes))
            if self.rank.writes:
                # Records of steps after the checkpoint: they will be repeated.
                journal = stored.state["journal"]
                journal["num_records"] = cut_back(folder.metrics, int(journal["num_records"]))
            self._assemble(plan)
            self.warnings += [*stored.damaged, *moved, *other, *describe_changed_data(self.workload, folder)]
            self.warnings += stored.fit_to_ranks(self.rank, self.parts)
            self.run()
        return folder.path

    def _create_folder(self, out: str | None, name: str) -> RunFolder:
        return self.rank.run_on_first(lambda: RunFolder.create(out, name))

    def _refuse_unfit(self) -> None:
        """Refuse what the ranks cannot train together, on all of them."""
        if self.config.train.shard is not False:
            refuse_unshardable(self.config, self.workload, self.world)
        if self.world is not None:
            refuse_differences(self.config, self.workload, self.world, resumes=self.stored is not None)

    def _assemble(self, plan: Plan) -> None:
        """Assemble the run; a model that does not fit into memory is an error with suggestions."""
        # Clean up after a previous run in this process: its code counts towards dynamo's limit of eight compilations
        # per function, and its reference cycles keep memory alive.
        forget_compiled()
        gc.collect()
        try:
            self.parts = assemble(self.config, self.workload, plan, self.world)
        except OutOfMemory as error:
            raise explain_model_too_large(error, self.workload.model, plan, has_ema=self.config.ema.enabled) from error

    # --- the plan, the same on all ranks ---

    def _agree_on_plan(self, make: Callable[[Rehearsal], Plan]) -> Plan:
        """Return one plan for all ranks, each with its own device, from trials on rank 0."""
        if self.world is None:
            return make(RunRehearsal(self.config, self.workload))
        # Trials have this rank's part of a batch, and do not cut it into micro-batches.
        rows = self.world.count_rows(self.config.train.batch_size)
        config = self.config.replace(train={"batch_size": rows, "auto_batch": False})
        device = probe(self.device).device
        free = measure_free_bytes(torch.device(device)) if device.startswith("cuda") else 0
        return LeadingRehearsal(config, self.workload, self.world, device, min(self.world.gather(free))).plan(make)

    def _decide(self, rehearsal: Rehearsal) -> Plan:
        """Return the plan of a new run."""
        plan = decide_plan(self.config, self.workload, probe(self.device))
        if self.world is not None:
            trace = partial(build_traceable_step, self.config, self.workload.store)
            plan = choose_sharding(self.config.train, self.workload, plan, self.world.size, self._say, trace)
        return self._try_modes(plan, rehearsal)

    def _update(self, changes: Changes, rehearsal: Rehearsal) -> Plan:
        """Return the stored plan, with new measurements for settings that have changed."""
        plan = self.folder.read_plan()
        refuse_missing_device(plan)
        # Trials were measured for other settings: forget what they found and repeat them.
        if not changes.touch(*MEASURED_FOR):
            return plan
        plan = strip_tuning(plan, keeps_memory=not changes.touch("train.memory", "optimizer.name"))
        return self._try_modes(plan, rehearsal)

    def _try_modes(self, plan: Plan, rehearsal: Rehearsal) -> Plan:
        """Return the plan with what trials find, and with the micro-batch of `train.auto_batch`."""
        train, store = self.config.train, self.workload.store
        if plan.shards and self.world is not None:
            plan = dataclasses.replace(choose_sharded_mode(train.fast, plan, self._say), pieces=1)
            trace = partial(build_traceable_step, self.config, store)
            return choose_reduction(train, plan, self.world.size, self._say, trace)
        trace = partial(build_traceable_step, rehearsal.config, store)
        peak = make_peak_predictor(rehearsal.config.train, trace)
        plan = tune_plan(plan, rehearsal, self._say, peak=peak)
        if not train.auto_batch:
            return dataclasses.replace(plan, pieces=1)
        free = rehearsal.free_bytes if isinstance(rehearsal, LeadingRehearsal) else None
        pieces = choose_pieces(rehearsal.config.train, plan, self._say, trace, free)
        return dataclasses.replace(plan, pieces=pieces)

    def _say(self, line: str) -> None:
        """Print to stderr: the run has no report yet."""
        if not self.config.log.quiet:
            print(line, file=sys.stderr, flush=True)

    # --- the loop and its ending ---

    def run(self) -> None:
        """Train to the end of the run, and write its report, model and summary."""
        config, folder, parts, writes = self.config, self.folder, self.parts, self.rank.writes
        is_new = self.stored is None
        try:
            report = open_report(self.loaded, folder, parts)
        except HalfstepError:  # a tracker that does not start: nothing was trained
            if is_new:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        journal = Journal(report, parts)
        if config.guard.capsules and parts.sharded is None:
            # Before the first step, so that a fault in it is recorded too.
            record_faults(parts, folder, journal.notice, config.guard, RunSource.of(config))
        with (
            ExitStack() as watch,
            choose_algorithms(deterministic=config.train.deterministic),
            catch_interrupts(answers=writes) as asked_to_stop,
        ):
            world = self.world if parts.sharded is not None else None
            keep = config.train.checkpoints_total_limit
            checkpoints = folder.open_checkpoints(keep=keep, writes=writes, world=world)
            loop = Loop(parts, checkpoints, journal, asked_to_stop)
            if self.world is not None and not self.world.is_first:
                watch.enter_context(post_warnings(self.world))
            with handle_ending(loop, folder, report, is_new=is_new):
                show_start(report, self.loaded, folder, parts, self.warnings, is_new=is_new)
                if self.stored is not None:
                    self.stored.restore(loop, config)
                reset_peak(parts.device)
                energy = EnergyMeter(parts.device)
                monitor = watch.enter_context(
                    monitor_device(parts.device, folder.path / "monitor.jsonl", records=writes)
                )
                journal.gpu, loop.settled = monitor.summarise, monitor.mark_steady
                try:
                    loop.run()
                except OutOfMemory as error:
                    error.__traceback__ = None  # its frames hold the activations that did not fit
                    raise explain_step_too_large(error, config, parts, loop.engine.pieces) from error
                monitor.stop()
                finish_run(loop, folder, monitor, energy, config.data)
