"""Run timed trials on copies of a run, which must not change the run itself; of several ranks, rank 0 does."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from halfstep.distributed.world import World
from halfstep.errors import HalfstepError, summarise_error
from halfstep.hardware.memory import release_unused_memory
from halfstep.precision.plan import Plan
from halfstep.step.randomness import choose_algorithms, read_generators, restore_generators
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, assemble, make_all_due
from halfstep_train.run.engine import make_engine
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.tune.trials import CannotRun, DoesNotFit, Rehearsal, Trial, load_first_batch
from halfstep_train.workloads.base.workload import Workload


@dataclass(frozen=True)
class RunRehearsal:
    """The trials of a run."""

    config: RunConfig
    workload: Workload

    @contextmanager
    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        """Yield a trial on a copy of the run; generators, compiled code and memory are restored afterwards."""
        config, own = self.config.replace(**changes), self.workload
        release_unused_memory(torch.device(plan.device))  # a failed trial's error may have held memory
        generators = read_generators()
        copied = dataclasses.replace(own, model=_copy_model(own.model), phases=make_all_due(own.phases))
        try:
            with choose_algorithms(deterministic=config.train.deterministic):
                yield Trial(_assemble_trial(config, copied, plan), make_engine, load_first_batch(config.train, copied))
        finally:
            restore_generators(generators)
            del copied
            # The compiler caches code by shapes only, so the next trial would run this one's code.
            forget_compiled()
            release_unused_memory(torch.device(plan.device))


def _assemble_trial(config: RunConfig, workload: Workload, plan: Plan) -> Assembly:
    try:
        return assemble(config, workload, plan)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit("the model does not fit into memory, even without a batch") from error


def _copy_model(model: nn.Module) -> nn.Module:
    made: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, made)
    except Exception as error:  # a user's model may hold anything
        raise CannotRun(f"{type(model).__name__} cannot be copied for a trial ({summarise_error(error)})") from error
    for module in copied.modules():
        # deepcopy copies modules and tensors, but functions stay the same object.
        functions = {key: held for key, held in vars(module).items() if isinstance(held, FunctionType)}
        vars(module).update({key: _rebind_to_copies(held, made) for key, held in functions.items() if held.__closure__})
    return copied


def _rebind_to_copies(function: FunctionType, made: Mapping[int, Any]) -> FunctionType:
    """Rebind a closure such as `self.mlpf = lambda x: m.out(m.fc(x))`, which deepcopy leaves bound to the original."""
    cells = tuple(CellType(made.get(id(cell.cell_contents), cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)


# --- several ranks: rank 0 tries on its part of the batch, which is the largest, and the others wait for its plan ---


@dataclass(frozen=True)
class LeadingRehearsal(RunRehearsal):
    """Trials of rank 0 for all ranks, whose devices should be of one kind."""

    world: World
    device: str
    free_bytes: int  # on the GPU that has the least

    def plan(self, make: Callable[[Rehearsal], Plan]) -> Plan:
        """Return the plan that `make` decides on rank 0, for this rank's device."""
        if self.world.is_first:
            try:
                found = make(self).to_json()
            except HalfstepError as error:
                # The other ranks wait for a message: give them the same error.
                self.world.broadcast_from_first(partial(_raise, error))
                raise
            self._broadcast(found)
        else:
            while not (found := self._broadcast("")):
                pass  # one more trial or measurement begins
        return dataclasses.replace(Plan.from_json(found), device=self.device)

    @contextmanager
    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        self._broadcast("")
        with super().begin(plan, **changes) as trial:
            trial.announce = partial(self._broadcast, "")
            yield trial

    def _broadcast(self, message: str) -> str:
        return self.world.broadcast_from_first(lambda: message)


def _raise(error: HalfstepError) -> str:
    raise error
