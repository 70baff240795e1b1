"""Time trial steps on a copy of the model, so that the run itself stays bit-identical."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from halfstep.errors import summarise_error
from halfstep.hardware.clock import Clock, Stopwatch, wait_for
from halfstep.hardware.memory import LiveBytes, get_peak_memory_bytes, reset_peak
from halfstep.precision.plan import Plan
from halfstep.step.phases import PhasedStep
from halfstep.step.step import GuardedStep
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.data.loader import Loader
from halfstep_train.tune.channels_last import is_only_tried
from halfstep_train.tune.fresh_thread import run_in_fresh_thread
from halfstep_train.tune.memory_low import CannotRun, Cost, DoesNotFit, NotCaptured
from halfstep_train.tune.modes import UNCAPTURED, Batch, Level, Mode, Notice
from halfstep_train.workloads.base.workload import Workload

TIMED_STEPS = 5  # least steps of a round; fewer if the time for trials is short
LASTING_ROUNDS = 6
"""On a GPU a round has so many steps that this many fill the time: at its end the device waits for the host, and rests,
which it does not in a run."""
ROUNDS = 3  # the median of at least this many rounds counts: the first may have a cold cache
LASTING_S = 1.5
"""On a GPU rounds go on for so long, and the last two thirds count: at its power cap an H200 took longer for a step
after half a second than before (benchmarks/NOTES.md)."""


def time_lasting_step(a_round: Callable[[int], float], time: TrialTime, lasting_s: float) -> float:
    """Return the seconds of a step under sustained load: the median over rounds. `a_round` runs a number of steps and
    returns the seconds of one. If time is short, rounds are fewer and shorter."""
    once_s = max(a_round(1), 1e-9)
    if time.run_s is None:
        time.expect(once_s)
    affordable_s = time.for_one_s
    affordable = affordable_s / once_s
    wanted = max(TIMED_STEPS, lasting_s / LASTING_ROUNDS / once_s)
    num_steps = max(1, int(min(wanted, affordable / ROUNDS)))
    until = time.clock() + min(lasting_s, affordable_s)
    rounds = [a_round(num_steps)]
    while not time.is_over and (len(rounds) < min(ROUNDS, affordable / num_steps) or time.clock() < until):
        rounds.append(a_round(num_steps))
    return statistics.median(rounds[-max(ROUNDS, 2 * len(rounds) // 3) :])


class Steps(Protocol):
    """The interface of an engine that runs the steps of a trial."""

    @property
    def mode(self) -> Mode: ...

    def __call__(self, window: list[Batch]) -> object: ...
    def forget_graphs(self) -> None: ...


class Rehearsed(Protocol):
    """The parts of an assembled copy of a run that a trial uses."""

    name: str
    train: TrainConfig
    plan: Plan
    model: nn.Module
    device: torch.device
    step: GuardedStep | PhasedStep


class Rehearsal(Protocol):
    """Assembles copies of a run for trials. Passed in, because this package does not build runs."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def workload(self) -> Workload: ...

    def begin(self, plan: Plan, **changes: Mapping[str, Any]) -> AbstractContextManager[Trial]:
        """Assemble a copy for one trial; `changes` are other settings, by section."""


def measure_cost(mode: Mode, plan: Plan, rehearsal: Rehearsal, **changes: Mapping[str, Any]) -> Cost:
    """Return the cost of a step in this mode, or compiled if it cannot be captured, as the run itself would
    continue."""
    try:
        return _measure_in(mode, plan, rehearsal, changes)
    except NotCaptured:
        pass  # retry outside of the handler: the error's frames hold the model
    return _measure_in("compile", plan, rehearsal, changes)


def _measure_in(mode: Mode, plan: Plan, rehearsal: Rehearsal, changes: Mapping[str, Mapping[str, Any]]) -> Cost:
    with rehearsal.begin(plan, **changes) as trial:
        return trial.measure(mode)


class Trial:
    """Steps on a copy of the model, always with the same batch; each measurement runs in a fresh thread."""

    def __init__(self, parts: Rehearsed, engine: Callable[[Any, Mode, Notice], Steps], batch: Batch) -> None:
        self.parts, self.engine = parts, engine
        self.window = [{name: value.to(parts.device) for name, value in batch.items()}] * parts.step.accumulate
        self.announce: Callable[[], object] = lambda: None
        """Called before each measurement: all of them together may take longer than other ranks wait for a message."""

    def measure(self, mode: Mode, time: TrialTime | None = None, *, cudnn_benchmark: bool | None = None) -> Cost:
        """Return milliseconds and peak bytes of a step in this mode; raise CannotRun if it does not run."""
        self.announce()
        if cudnn_benchmark is not None:
            self.parts.plan = dataclasses.replace(self.parts.plan, cudnn_benchmark=cudnn_benchmark)
        return run_in_fresh_thread(lambda: self._measure(mode, time or TrialTime()), self.parts.device)

    def _measure(self, mode: Mode, time: TrialTime) -> Cost:
        if mode == "graph" and (reason := self.parts.step.why_never_captured()):
            raise NotCaptured(reason)

        def ended(text: str, level: Level) -> None:
            if engine.mode != mode:  # stop before it compiles in another mode
                raise (NotCaptured if engine.mode == "compile" else CannotRun)(text)

        engine = self.engine(self.parts, mode, ended)
        try:
            peak = self._warm_up(engine, time)
            found = Cost(self._time_steps(engine, time) * 1e3, peak)
        except torch.OutOfMemoryError as error:
            raise DoesNotFit("out of memory") from error
        except CannotRun:
            raise
        except Exception as error:
            if mode == "eager" and not is_only_tried(self.parts.train.channels_last, self.parts.name, self.parts.plan):
                raise  # the run itself would fail with it
            raise CannotRun(f"{type(error).__name__}: {summarise_error(error)}") from error
        finally:
            engine.forget_graphs()
        return found

    def _warm_up(self, engine: Steps, time: TrialTime) -> int:
        """Run enough steps for compilation, first commits and capture; return the peak of the last two, with the
        graph."""
        device = self.parts.device
        with time.count_start():
            engine(self.window)
            wait_for(self.parts.device)
        for _ in range(UNCAPTURED - 2):
            engine(self.window)
        if device.type != "cuda":
            with LiveBytes() as live:
                engine(self.window)
            return int(live.peak)
        wait_for(device)
        reset_peak(device)
        for _ in range(2):
            engine(self.window)
        return get_peak_memory_bytes(device) or 0

    def _time_steps(self, engine: Steps, time: TrialTime) -> float:
        def time_round(num_steps: int) -> float:
            start = time.clock()
            for _ in range(num_steps):
                engine(self.window)
            wait_for(self.parts.device)
            return (time.clock() - start) / num_steps

        wait_for(self.parts.device)
        return time_lasting_step(time_round, time, LASTING_S if self.parts.device.type == "cuda" else 0.0)


def load_first_batch(train: TrainConfig, workload: Workload) -> Batch:
    """Load the first training batch, on the host."""
    with closing(Loader(workload.train_samples, batch_size=train.batch_size, seed=train.seed, shuffle=True)) as loader:
        return next(loader.iterate_epoch(0))


# --- the time limit of trials: at most a minute, and at most a twentieth of the expected run ---
#
# Two accounts:
#     starts   the first step of each candidate, in which code is compiled and cuDNN tries its algorithms. It cannot be
#              interrupted, so its usual duration is considered before: all starts together must fit into a twentieth of
#              the run. A run in that mode would begin with it anyway, and compiled code is cached on disk.
#     steps    everything else, limited by the clock: asked before each candidate, and for how many steps one is timed.


MOST_S = 60.0
SHARE = 0.05  # of the expected run that trials may take
CANDIDATES = 4
"""A candidate is timed for at most a fourth of the time: the first must not use up what the others need."""


class TrialTime:
    """The time that trials have used and may still use."""

    def __init__(
        self, num_steps: float = math.inf, *, most_s: float = math.inf, clock: Clock = time.perf_counter
    ) -> None:
        self.num_steps, self.most_s, self.clock = num_steps, most_s, clock
        self.run_s: float | None = None  # expected time of the run; None before anything was timed
        self.starts_s = 0.0
        self._total = Stopwatch(clock=clock)

    def expect(self, step_s: float) -> None:
        """Set the expected time of the run from the time of a step."""
        self.run_s = step_s * self.num_steps

    @property
    def limit_s(self) -> float:
        return self.most_s if self.run_s is None else min(self.most_s, SHARE * self.run_s)

    @property
    def spent_s(self) -> float:
        """Return the time spent on everything but the candidates' starts."""
        return self._total.elapsed_s - self.starts_s

    @property
    def is_over(self) -> bool:
        return self.spent_s >= self.limit_s

    @property
    def for_one_s(self) -> float:
        """Return the time for which one candidate may be timed, starting now."""
        return max(0.0, min(self.limit_s / CANDIDATES, self.limit_s - self.spent_s))

    def has_room_for(self, start_s: float) -> bool:
        """True if a start that usually takes this long fits into the run's share, with the starts before it.

        A candidate without a start always fits: a slow start before it is no reason to leave it out.
        """
        return start_s == 0 or self.run_s is None or self.starts_s + start_s <= SHARE * self.run_s

    @contextmanager
    def count_start(self) -> Iterator[None]:
        start = Stopwatch(clock=self.clock)
        try:
            yield
        finally:
            self.starts_s += start.elapsed_s


def count_total_steps(train: TrainConfig, num_batches: int) -> int:
    """Return the number of steps of the run, if nothing stops it early."""
    planned = train.epochs * math.ceil(num_batches / train.accumulate)
    return min(planned, train.max_steps) if train.max_steps else planned
