"""Choose the plan of a run: precision, sharding, mode, memory levers and micro-batches, the same on all ranks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import decide_plan
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.memory.sizing import (
    choose_pieces,
    choose_reduction,
    choose_sharding,
    make_peak_predictor,
    measure_free_bytes,
)
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.run.rehearsal import LeadingRehearsal, RunRehearsal
from halfstep_train.run.resume import Changes, refuse_missing_device
from halfstep_train.run.run_rank import RunRank
from halfstep_train.run.sharded_model import choose_sharded_mode
from halfstep_train.tune.choose import MEASURED_FOR, strip_tuning, tune_plan
from halfstep_train.tune.trials import Rehearsal
from halfstep_train.workloads.base.workload import Workload


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """The choice of a plan for a built workload; only rank 0 decides."""

    config: RunConfig
    workload: Workload
    rank: RunRank
    device: str  # asked for on this rank

    def choose(self) -> Plan:
        """Return the plan of a new run."""
        return self._agree(self._decide)

    def choose_again(self, folder: RunFolder, changes: Changes, *, is_other_mesh: bool) -> Plan:
        """Return the stored plan, with new decisions and measurements for settings that have changed."""
        if is_other_mesh or changes.touch("precision.", "device", "train.shard"):
            return self.choose()
        return self._agree(partial(self._update, folder, changes))

    def _agree(self, make: Callable[[Rehearsal], Plan]) -> Plan:
        """Return one plan for all ranks, each with its own device, from trials on rank 0."""
        own, world = (self._trial_config, self.workload), self.rank.world
        if world is None:
            return make(RunRehearsal(*own))
        device = probe(self.device).device
        free = measure_free_bytes(torch.device(device)) if device.startswith("cuda") else 0
        return LeadingRehearsal(*own, world, device, min(world.gather(free))).plan(make)

    @property
    def _trial_config(self) -> RunConfig:
        """Return the config for trials: this rank's part of a batch, and no cutting into micro-batches."""
        if self.rank.world is None:
            return self.config
        rows = self.rank.world.count_rows(self.config.train.batch_size)
        return self.config.replace(train={"batch_size": rows, "auto_batch": False})

    def _decide(self, rehearsal: Rehearsal) -> Plan:
        plan = decide_plan(self.config, self.workload, probe(self.device))
        if (world := self.rank.world) is not None:
            trace = partial(build_traceable_step, self.config, self.workload.store)
            plan = choose_sharding(self.config.train, self.workload, plan, world.size, self._say, trace)
        return self._try_modes(plan, rehearsal)

    def _update(self, folder: RunFolder, changes: Changes, rehearsal: Rehearsal) -> Plan:
        plan = folder.read_plan()
        refuse_missing_device(plan)
        # Trials were measured for other settings: forget what they found and repeat them.
        if not changes.touch(*MEASURED_FOR):
            return plan
        plan = strip_tuning(plan, keeps_memory=not changes.touch("train.memory", "optimizer.name"))
        return self._try_modes(plan, rehearsal)

    def _try_modes(self, plan: Plan, rehearsal: Rehearsal) -> Plan:
        """Return the plan with what trials find, and with the micro-batch of `train.auto_batch`."""
        train, world, store = self.config.train, self.rank.world, self.workload.store
        if plan.shards and world is not None:
            plan = dataclasses.replace(choose_sharded_mode(train.fast, plan, self._say), pieces=1)
            trace = partial(build_traceable_step, self.config, store)
            return choose_reduction(train, plan, world.size, self._say, trace)
        trace = partial(build_traceable_step, self._trial_config, store)
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
