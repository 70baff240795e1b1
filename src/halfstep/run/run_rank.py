"""This process among those of a run: what it writes, what it makes alone, and what all of them decide."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halfstep.config.schema import RunConfig
from halfstep.distributed.launch import Launch, choose_device
from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.hardware.probe import probe
from halfstep.precision.plan import Plan
from halfstep.report.progress import Bar
from halfstep.report.run_report import Level, RunReport
from halfstep.run.engine import rehearsal
from halfstep.run.folder import RunFolder
from halfstep.tune.memory_low import CannotRun, Cost
from halfstep.tune.modes import Mode
from halfstep.tune.trials import Rehearse, Trial, TrialTime
from halfstep.workloads.base.workload import Workload

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RunRank:
    launch: Launch | None
    world: World | None

    @property
    def writes(self) -> bool:
        return self.world is None or self.world.is_first

    def of_first(self, make: Callable[[], Made]) -> Made:
        """Made by the process that writes, known to all."""
        return make() if self.world is None else self.world.broadcast_from_first(make)

    def device_of(self, config: RunConfig) -> str:
        return choose_device(config, self.launch)

    def to_go_on_with(self, out: Path | None) -> Path | None:
        """The run that was under way when torchrun started its processes again."""
        if self.launch is None or not self.launch.restarts:
            return None
        if out is None:
            raise mark_agreed(
                CheckpointError(
                    "torchrun has started the processes again, and the run has no folder of a known name",
                    why="a folder named by the clock cannot be found again",
                    fix="name it with --out DIR",
                )
            )
        return self.of_first(lambda: out if RunFolder(out).checkpoints().all() else None)

    def plan_from(self, make: Callable[[Rehearse], Plan], config: RunConfig, workload: Workload) -> Plan:
        """One plan for all, each on its own device, by trials that each makes on its part of a batch."""
        if self.world is None:
            return make(rehearsal)
        device = probe(self.device_of(config)).device
        return AgreedTrials(self.world, self.on_trial(config), workload, device, rehearsal).planned(make)

    def on_trial(self, config: RunConfig) -> RunConfig:
        """The config as trials take it: a process computes its part of a batch, and none of them cuts it by itself."""
        if self.world is None:
            return config
        rows = self.world.count_rows(config.train.batch_size)
        return config.changed(train={"batch_size": rows, "auto_batch": False})


# --- trials that all processes make ---
#     first    begin PLAN, cost MODE, cost MODE, end, begin ... done PLAN
#     others   make the same trial on their part of the batch, and tell what it took
# A candidate takes what it takes the slowest process, and is possible where it is everywhere. What to try next is the
# first one's decision alone, since clocks and caches differ.


@dataclass(frozen=True, slots=True)
class AgreedTrials:
    world: World
    config: RunConfig  # its part of the batch
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
            self.world.broadcast_from_first(partial(_raise, error))
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
                own = _strip_frames(error)
            _take_slowest(self.world.gather(own))
            yield trial

    # --- the first one ---

    @contextmanager
    def _leading(self, config: RunConfig, workload: Workload, plan: Plan) -> Iterator[Trial]:
        self._say("begin", plan.to_json(), config.train.batch_size)
        with self._begun(config, plan) as trial:
            try:
                yield AgreedTrial(trial, self.world)
            except CannotRun:
                self._say("end")
                raise
            self._say("end")

    def _say(self, *words: Any) -> None:
        self.world.broadcast_from_first(lambda: words)

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
            self.world.gather(_run_trial(partial(trial.cost, mode, cudnn_benchmark=cudnn_benchmark)))

    def _heard(self) -> tuple[Any, ...]:
        return self.world.broadcast_from_first(tuple)

    def _with_batch(self, tried: int) -> RunConfig:
        """With as many samples as the first process tries; it has as many as any other, and one more than some."""
        return self.config.changed(train={"batch_size": min(tried, self.config.train.batch_size)})


class AgreedTrial(Trial):
    """A trial of the first process, whose costs are those of the slowest."""

    def __init__(self, own: Trial, world: World) -> None:
        self.own, self.world, self.parts, self.engine, self.window = own, world, own.parts, own.engine, own.window

    def cost(self, mode: Mode, time: TrialTime | None = None, *, cudnn_benchmark: bool | None = None) -> Cost:
        self.world.broadcast_from_first(lambda: ("cost", mode, cudnn_benchmark))
        return _take_slowest(
            self.world.gather(_run_trial(lambda: self.own.cost(mode, time, cudnn_benchmark=cudnn_benchmark)))
        )


def _raise(error: HalfstepError) -> None:
    raise error


def _run_trial(trial: Callable[[], Cost]) -> Cost | CannotRun:
    try:
        return trial()
    except CannotRun as error:
        return _strip_frames(error)


def _strip_frames(error: CannotRun) -> CannotRun:
    """As it can be sent: without the frames, and the models in them."""
    return type(error)(str(error))


def _take_slowest(outcomes: list[Any]) -> Cost:
    """What the slowest process takes; who cannot run is named."""
    for rank, found in enumerate(outcomes):
        if isinstance(found, CannotRun):
            raise type(found)(f"rank {rank}: {found}")
    costs = [found for found in outcomes if found is not None]
    return Cost(max((c.ms for c in costs), default=0.0), max((c.peak_bytes for c in costs), default=0))


# --- the voice of a process whose screen and files are another's ---


@contextlib.contextmanager
def posted_warnings(world: World) -> Iterator[None]:
    """Python's own warnings inside go where the report's go."""

    def post(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        world.post(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = post
        yield


class FarReport(RunReport):
    """Its warnings go to the first process, which shows and writes everything else."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _nothing(self, *_: object, **__: object) -> None: ...

    header = epoch_summary = log = finish = close = _nothing

    @contextlib.contextmanager
    def phase(self, label: str, total: int) -> Iterator[Bar]:
        yield Bar(label, total)

    def notice(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self.world.post(text)
