"""Trials that all processes of a run make: the first one leads, the others do as it says, each on its own device.

    first    begin PLAN, cost MODE, cost MODE, end, begin ... done PLAN
    others   make the same trial on their part of the batch, and tell what it took

A candidate takes what it takes the slowest process, and is possible where it is everywhere: so the mode, the layout,
the memory level and the micro-batch that come out of trials hold for all. What to try next is the first one's decision
alone, since clocks and caches differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.errors import HalfstepError
from halfstep.precision.plan import Plan
from halfstep.step.world import World
from halfstep.tune.memory_low import CannotRun, Cost
from halfstep.tune.modes import Mode
from halfstep.tune.trial_time import TrialTime
from halfstep.tune.trials import Rehearse, Trial
from halfstep.workloads.workload import Workload


@dataclass(frozen=True, slots=True)
class Trials:
    """The trials of one process, made together with those of the others."""

    world: World
    config: RunConfig
    """Its part of the batch."""
    workload: Workload
    device: str
    rehearse: Rehearse

    def planned(self, make: Callable[[Rehearse], Plan]) -> Plan:
        """What `make` decides in the first process, with rehearsals that all take part in."""
        if not self.world.is_first:
            return self._followed()
        try:
            plan = make(self._leading)
        except HalfstepError as error:
            self.world.from_first(partial(_raise, error))
            raise
        self._say("done", plan.to_json())
        return plan

    @contextmanager
    def _begun(self, config: RunConfig, plan: Plan) -> Iterator[Trial]:
        """A trial that could begin everywhere."""
        own: CannotRun | None = None
        with ExitStack() as stack:
            try:
                plan = dataclasses.replace(plan, device=self.device)
                trial = stack.enter_context(self.rehearse(config, self.workload, plan))
            except CannotRun as error:
                own = plain(error)
            worst(self.world.gathered(own))
            yield trial

    # --- the first one ---

    @contextmanager
    def _leading(self, config: RunConfig, workload: Workload, plan: Plan) -> Iterator[Trial]:
        self._say("begin", plan.to_json(), config.train.batch_size)
        with self._begun(config, plan) as trial:
            try:
                yield Led(trial, self.world)
            except CannotRun:
                self._say("end")
                raise
            self._say("end")

    def _say(self, *words: Any) -> None:
        self.world.from_first(lambda: words)

    # --- the others ---

    def _followed(self) -> Plan:
        while True:
            word, *given = self._heard()
            if word == "done":
                return dataclasses.replace(Plan.from_json(given[0]), device=self.device)
            plan, tried = given
            try:
                with self._begun(self._with_batch(tried), Plan.from_json(plan)) as trial:
                    self._follow(trial)
            except CannotRun:
                continue  # the first one has it, too, and decides what comes next

    def _follow(self, trial: Trial) -> None:
        while (said := self._heard())[0] == "cost":
            mode, cudnn_benchmark = said[1:]
            self.world.gathered(outcome(partial(trial.cost, mode, cudnn_benchmark=cudnn_benchmark)))

    def _heard(self) -> tuple[Any, ...]:
        return self.world.from_first(tuple)

    def _with_batch(self, tried: int) -> RunConfig:
        """With as many samples as the first process tries; it has as many as any other, and one more than some."""
        own = min(tried, self.config.train.batch_size)
        return self.config.model_copy(update={"train": self.config.train.model_copy(update={"batch_size": own})})


class Led(Trial):
    """A trial of the first process, whose costs are those of the slowest."""

    def __init__(self, own: Trial, world: World) -> None:
        self.own, self.world, self.parts, self.engine, self.window = own, world, own.parts, own.engine, own.window

    def cost(self, mode: Mode, time: TrialTime | None = None, *, cudnn_benchmark: bool | None = None) -> Cost:
        self.world.from_first(lambda: ("cost", mode, cudnn_benchmark))
        return worst(self.world.gathered(outcome(lambda: self.own.cost(mode, time, cudnn_benchmark=cudnn_benchmark))))


def _raise(error: HalfstepError) -> None:
    raise error


def outcome(trial: Callable[[], Cost]) -> Cost | CannotRun:
    try:
        return trial()
    except CannotRun as error:
        return plain(error)


def plain(error: CannotRun) -> CannotRun:
    """As it can be sent: without the frames, and the models in them."""
    return type(error)(str(error))


def worst(outcomes: list[Any]) -> Cost:
    """What the slowest process takes; who cannot run is named."""
    for rank, found in enumerate(outcomes):
        if isinstance(found, CannotRun):
            raise type(found)(f"rank {rank}: {found}")
    costs = [found for found in outcomes if found is not None]
    return Cost(max((c.ms for c in costs), default=0.0), max((c.peak_bytes for c in costs), default=0))
