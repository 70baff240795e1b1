"""The role of a rank in a run: what only rank 0 does and writes, and the trials that all ranks run together."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from halfstep.distributed.world import World, mark_agreed
from halfstep.errors import CheckpointError, HalfstepError
from halfstep.precision.plan import Plan
from halfstep_train.report.progress import Bar
from halfstep_train.report.run_report import Level, RunReport
from halfstep_train.run.folder import RunFolder
from halfstep_train.run.launch import Launch
from halfstep_train.tune.memory_low import CannotRun, Cost
from halfstep_train.tune.modes import Mode
from halfstep_train.tune.trials import Rehearsal, Trial, TrialSettings, TrialTime
from halfstep_train.workloads.base.workload import Workload

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RunRank:
    """This rank of a run; without a world it is the only one."""

    launch: Launch | None
    world: World | None

    @property
    def writes(self) -> bool:
        return self.world is None or self.world.is_first

    def run_on_first(self, make: Callable[[], Made]) -> Made:
        """Run on rank 0 and broadcast the result."""
        return make() if self.world is None else self.world.broadcast_from_first(make)

    def find_restarted_run(self, out: Path | None) -> Path | None:
        """Return the run to resume after torchrun has restarted its processes."""
        if self.launch is None or not self.launch.restarts:
            return None
        if out is None:
            raise mark_agreed(
                CheckpointError(
                    "torchrun has restarted the ranks, and the run was started without --out",
                    why="the default folder name contains the start time, so it cannot be found again",
                    fix="name it with --out DIR",
                )
            )
        return self.run_on_first(lambda: out if RunFolder(out).open_checkpoints().list_all() else None)


# --- trials that all ranks run together ---
#     rank 0   broadcasts: begin PLAN, cost MODE, cost MODE, end, begin ... done PLAN
#     others   run the same trial on their part of the batch, and report its cost
# The cost of a candidate is that of the slowest rank, and it must run on every rank. Rank 0 alone decides what to try
# next, because clocks and caches differ between ranks.


@dataclass(frozen=True, slots=True)
class AgreedTrials:
    """Trials that rank 0 leads and the other ranks follow."""

    world: World
    own: Rehearsal  # with this rank's part of the batch
    device: str

    @property
    def settings(self) -> TrialSettings:
        return self.own.settings

    @property
    def workload(self) -> Workload:
        return self.own.workload

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
                trial = stack.enter_context(self.own.begin(plan, **changes))
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


# --- reports of ranks that do not write ---


@contextlib.contextmanager
def post_warnings(world: World) -> Iterator[None]:
    """Send Python's warnings to rank 0, like those of the report."""

    def post(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
        world.post(f"{category.__name__}: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = post
        yield


class FarReport(RunReport):
    """The report of a rank that does not write: its warnings go to rank 0."""

    def __init__(self, world: World) -> None:
        self.world = world

    def _do_nothing(self, *_: object, **__: object) -> None: ...

    show_header = show_epoch = log = finish = close = add_files = _do_nothing
    failure = None

    @contextlib.contextmanager
    def show_phase(self, label: str, total: int, **_: object) -> Iterator[Bar]:
        yield Bar(label, total)

    def notice(self, text: str, level: Level = "info") -> None:
        if level != "info":
            self.world.post(text)
