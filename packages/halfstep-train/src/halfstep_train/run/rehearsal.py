"""Run timed trials on copies of a run, which must not change the run itself; several ranks run them together."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
from halfstep_train.config.schema import RunConfig, StepSettings
from halfstep_train.run.assemble import Assembly, assemble, make_all_due
from halfstep_train.run.engine import make_engine
from halfstep_train.tune.fresh_thread import forget_compiled
from halfstep_train.tune.memory_low import CannotRun, Cost, DoesNotFit
from halfstep_train.tune.modes import Mode
from halfstep_train.tune.trials import Rehearsal, Trial, TrialTime, load_first_batch
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.workload import Workload


@dataclass(frozen=True)
class RunRehearsal:
    """The trials of a run."""

    config: RunConfig
    workload: Workload

    @property
    def name(self) -> str:
        return self.config.workload

    @property
    def settings(self) -> StepSettings:
        return self.config.step_settings

    def describe_shape(self) -> tuple[int, str]:
        return self.config.data.image_size, KINDS.of(self.name).describe_sample_size(self.config)

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


# --- trials that all ranks run together ---
#     rank 0   broadcasts: begin PLAN, cost MODE, cost MODE, end, begin ... done PLAN
#     others   run the same trial on their part of the batch, and report its cost
# The cost of a candidate is that of the slowest rank, and it must run on every rank. Rank 0 alone decides what to try
# next, because clocks and caches differ between ranks.


@dataclass(frozen=True)
class AgreedRehearsal(RunRehearsal):
    """Trials that rank 0 leads and the other ranks follow, each on its part of the batch."""

    world: World
    device: str

    def plan(self, make: Callable[[Rehearsal], Plan]) -> Plan:
        """Return the plan that `make` decides on rank 0, with rehearsals that all ranks take part in."""
        if not self.world.is_first:
            return self._follow_all()
        try:
            plan = make(self)
        except HalfstepError as error:
            # The other ranks wait for a message: give them the same error.
            self.world.broadcast_from_first(partial(_raise, error))
            raise
        self._broadcast("done", plan.to_json())
        return plan

    @contextmanager
    def _begin_on_all(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        """Yield a trial that could start on every rank."""
        problem: CannotRun | None = None
        with ExitStack() as stack:
            try:
                plan = dataclasses.replace(plan, device=self.device)
                trial = stack.enter_context(super().begin(plan, **changes))
            except CannotRun as error:
                problem = _strip_frames(error)
            # Raises on all ranks if the trial could not start on one of them.
            _take_slowest(self.world.gather(problem))
            yield trial

    # --- rank 0 ---

    @contextmanager
    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> Iterator[Trial]:
        size = changes.get("train", {}).get("batch_size", self.settings.train.batch_size)
        self._broadcast("begin", plan.to_json(), size)
        with self._begin_on_all(plan, **changes) as trial:
            try:
                yield AgreedTrial(trial, self.world)
            except CannotRun:
                self._broadcast("end")
                raise
            self._broadcast("end")

    def _broadcast(self, *message: Any) -> None:
        self.world.broadcast_from_first(lambda: message)

    # --- the other ranks ---

    def _follow_all(self) -> Plan:
        while True:
            kind, *given = self._receive()
            if kind == "done":
                return dataclasses.replace(Plan.from_json(given[0]), device=self.device)
            plan, tried = given
            # This rank may have one sample less than rank 0.
            size = min(tried, self.settings.train.batch_size)
            try:
                with self._begin_on_all(Plan.from_json(plan), train={"batch_size": size}) as trial:
                    self._follow(trial)
            except CannotRun:
                continue  # rank 0 raises it too, and decides what comes next

    def _follow(self, trial: Trial) -> None:
        while (message := self._receive())[0] == "cost":
            mode, cudnn_benchmark = message[1:]
            self.world.gather(_run_trial(partial(trial.measure, mode, cudnn_benchmark=cudnn_benchmark)))

    def _receive(self) -> tuple[Any, ...]:
        return self.world.broadcast_from_first(tuple)


class AgreedTrial(Trial):
    """A trial on rank 0 whose costs are those of the slowest rank."""

    def __init__(self, own: Trial, world: World) -> None:
        self.own, self.world, self.parts, self.engine, self.window = own, world, own.parts, own.engine, own.window

    def measure(self, mode: Mode, time: TrialTime | None = None, *, cudnn_benchmark: bool | None = None) -> Cost:
        self.world.broadcast_from_first(lambda: ("cost", mode, cudnn_benchmark))
        return _take_slowest(
            self.world.gather(_run_trial(lambda: self.own.measure(mode, time, cudnn_benchmark=cudnn_benchmark)))
        )


def _raise(error: HalfstepError) -> None:
    raise error


def _run_trial(trial: Callable[[], Cost]) -> Cost | CannotRun:
    try:
        return trial()
    except CannotRun as error:
        return _strip_frames(error)


def _strip_frames(error: CannotRun) -> CannotRun:
    """Return the error without its frames, which hold models, so that it can be sent."""
    return type(error)(str(error))


def _take_slowest(outcomes: list[Any]) -> Cost:
    """Return the cost of the slowest rank; raise for the first rank that cannot run."""
    for rank, found in enumerate(outcomes):
        if isinstance(found, CannotRun):
            raise type(found)(f"rank {rank}: {found}")
    costs = [found for found in outcomes if found is not None]
    return Cost(max((c.ms for c in costs), default=0.0), max((c.peak_bytes for c in costs), default=0))
