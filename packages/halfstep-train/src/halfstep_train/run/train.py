"""Train a loaded config, as a new run or a resumed one, up to a finished run folder."""

from __future__ import annotations

import dataclasses
import gc
import shutil
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

from halfstep.disk import make_absolute
from halfstep.errors import HalfstepError
from halfstep.hardware.memory import reset_peak
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.randomness import choose_algorithms
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.listeners import refuse_missing
from halfstep_train.report.metrics_file import cut_back
from halfstep_train.run.assemble import Assembly, apply_settled, assemble, build_workload, is_demo
from halfstep_train.run.capsules import record_faults
from halfstep_train.run.choose_plan import PlanChoice
from halfstep_train.run.ending import finish_run, handle_ending
from halfstep_train.run.folder import (
    RunFolder,
    RunSource,
    describe_changed_data,
    find_moved_data,
    find_settled,
    make_paths_absolute,
    name_run,
    point_to_demo_data,
    record_data,
)
from halfstep_train.run.frozen_modules import add_checksums, copy_made_here, write_made_here
from halfstep_train.run.interrupts import catch_interrupts, raise_at_once
from halfstep_train.run.journal import Journal
from halfstep_train.run.launch import Launch, choose_device, join_world
from halfstep_train.run.loop import Loop
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_model_too_large
from halfstep_train.run.memory.sizing import explain_step_too_large
from halfstep_train.run.monitor import monitor_device
from halfstep_train.run.multi_rank import refuse_differences, refuse_small_batch, seed_rank
from halfstep_train.run.presentation import import_callback, open_report, show_start
from halfstep_train.run.resume import accept_changes, refuse_changed_data
from halfstep_train.run.run_rank import RunRank, post_warnings
from halfstep_train.run.sharded_model import refuse_unshardable
from halfstep_train.run.stored_run import StoredRun, open_stored_run
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Workload

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
                self._assemble(PlanChoice(self.config, self.workload, self.rank, self.device).choose())
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
            choice = PlanChoice(config, self.workload, self.rank, self.device)
            plan = choice.choose_again(folder, changes, is_other_mesh=bool(stored.note))
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
