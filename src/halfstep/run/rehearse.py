"""A copy of a run for timed trials, so that trying leaves the run itself untouched, down to the last bit."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from halfstep.config.schema import RunConfig
from halfstep.errors import summarise_error
from halfstep.hardware.memory import release_unused_memory
from halfstep.precision.plan import Plan
from halfstep.run.assemble import Assembly, assemble
from halfstep.run.phased_engine import engine_for
from halfstep.run.phases import all_due
from halfstep.step.randomness import algorithms, generator_states, restore_generators
from halfstep.tune.fresh_thread import forget_compiled
from halfstep.tune.memory_low import CannotRun, DoesNotFit
from halfstep.tune.trials import Trial, first_batch
from halfstep.workloads.base.workload import Workload


@contextmanager
def rehearsal(config: RunConfig, workload: Workload, plan: Plan) -> Iterator[Trial]:
    """A trial of the run that is not yet begun; nothing of it is left afterwards."""
    release_unused_memory(torch.device(plan.device))  # of a trial that failed: its error held it
    generators = generator_states()
    copied = dataclasses.replace(workload, model=_copied(workload.model), phases=all_due(workload.phases))
    try:
        with algorithms(deterministic=config.train.deterministic):
            yield Trial(_assembled(config, copied, plan), engine_for, first_batch(config, copied))
    finally:
        restore_generators(generators)
        del copied
        # The compiler knows code by its shapes: the next trial would get this one's, whatever its own setting.
        forget_compiled()
        release_unused_memory(torch.device(plan.device))


def _assembled(config: RunConfig, workload: Workload, plan: Plan) -> Assembly:
    try:
        return assemble(config, workload, plan)
    except torch.OutOfMemoryError as error:
        raise DoesNotFit("the model itself is out of memory") from error


def _copied(model: nn.Module) -> nn.Module:
    made: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, made)
    except Exception as error:  # a user's model may hold anything
        raise CannotRun(f"{type(model).__name__} cannot be copied for a trial ({summarise_error(error)})") from error
    for module in copied.modules():
        functions = {key: held for key, held in vars(module).items() if isinstance(held, FunctionType)}
        vars(module).update({key: _over_copies(held, made) for key, held in functions.items() if held.__closure__})
    return copied


def _over_copies(function: FunctionType, made: Mapping[int, Any]) -> FunctionType:
    """`self.mlpf = lambda x: m.out(m.fc(x))`: deepcopy keeps a function, and with it the modules it was written for."""
    cells = tuple(CellType(made.get(id(cell.cell_contents), cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
