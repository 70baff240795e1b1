"""A few steps of a runner, timed by the clock and then seen by the profiler.

A profiled step is slower than a real one, above all where the host is the limit, so the same run is timed first
without the profiler. Times of kernels hold under it; idle time does not, and counts only as far as the clock agrees.

Data that are read meanwhile are waited for as in a long run: what was read ahead during compilation is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from halfstep.bench.ours import Feed
from halfstep.bench.problem import Runner
from halfstep.errors import ConfigError, HardwareError, counted
from halfstep.measure.clock import Stopwatch

LEAST_STEPS = 3
WARM_UP_STEPS = {"cuda": 10, "cpu": 2}
"""Compilation, cuDNN's choice of algorithms and graph capture are over by then."""
FeedOf = Callable[[], Feed]
"""What the runner reads from at the moment; each training has its own."""
ROUNDS = 2
SETTLING_STEPS = 4
"""With data of one's own, after those read ahead were thrown away: two are on the device still, and a loader that is
fast enough is ahead again after two more."""
NOT_WORK = frozenset({"Context Sync", "Stream Sync", "Event Sync"})
"""Waits that the profiler lists among the kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One kernel, copy or operator."""

    name: str
    start_us: float
    end_us: float
    self_us: float
    """Without what is nested in it; on a GPU nothing is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What a few steps were made of."""

    events: tuple[Event, ...]
    num_steps: int
    step_ms: float
    """By the clock, without the profiler."""
    data_wait_ms: float | None = None
    """A step's wait for its batch, by the clock too; None where no data were read."""
    profiled_wait_us: float = 0.0
    """What all profiled steps waited: more or less than the timed ones did, for data come in bursts."""
    is_host: bool = False
    """Operators of a CPU, each of them slowed by being recorded."""

    @property
    def busy_ms(self) -> float:
        """A step's time in which anything runs, however many streams run it."""
        return self.a_step_ms(covered_us(self.events))

    @property
    def span_ms(self) -> float:
        """From the first event's start to the last one's end, a step."""
        return self.a_step_ms(self._span_us)

    def a_step_ms(self, us: float) -> float:
        """Recorded time as a step's; on a CPU shortened as far as the whole span is longer than the clock says."""
        recorded_ms = us / 1e3 / self.num_steps
        if not self.is_host:
            return recorded_ms
        return recorded_ms * min(1.0, self.step_ms * self.num_steps * 1e3 / self._span_us)

    @property
    def _span_us(self) -> float:
        return max(e.end_us for e in self.events) - min(e.start_us for e in self.events)

    @property
    def launch_gap_ms(self) -> float:
        """Nothing runs, not for want of data: seen in the span, and no more than the clock leaves beside the work."""
        seen_ms = self.span_ms - self.a_step_ms(self.profiled_wait_us)
        return max(0.0, min(seen_ms, self.step_ms - (self.data_wait_ms or 0.0)) - self.busy_ms)

    @property
    def exposed_wait_ms(self) -> float:
        """The wait for data during which nothing runs; a GPU may have work left while the host waits."""
        return min(self.data_wait_ms or 0.0, max(0.0, self.step_ms - self.busy_ms - self.launch_gap_ms))


def covered_us(events: Iterable[Event]) -> float:
    """Length of the union of all intervals."""
    total, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e.start_us):
        total += max(0.0, event.end_us - max(event.start_us, reached))
        reached = max(reached, event.end_us)
    return total


def refuse_too_few(steps: int) -> None:
    """Raise ConfigError for steps that say nothing."""
    if steps < LEAST_STEPS:
        raise ConfigError(
            f"{counted(steps, 'step')}: too few to explain",
            why="single steps differ by more than what is to be seen",
            fix=f"--steps {LEAST_STEPS} or more",
        )


def timed_steps(steps: int, num_workers: int) -> int:
    """Where data are read, whole rounds of all workers: they bring their batches in bursts."""
    size = max(1, num_workers)
    return max(ROUNDS, -(-steps // size)) * size


def wake_profiler(device: torch.device) -> None:
    """Start it where torch was imported: the first start in another thread is an error on the terminal."""
    with profile(activities=[_activity(device)], acc_events=True):
        pass


def trace(
    runner: Runner, *, steps: int, device: torch.device, feed: FeedOf | None = None, num_workers: int = 0
) -> Trace:
    """Train past the warm-up, time `steps` steps, then profile as many; `feed` where the runner reads data."""
    if device.type not in WARM_UP_STEPS:
        raise HardwareError(
            f"--explain cannot look into {device.type}", why="it reads CUDA kernels and CPU operators", fix="--device"
        )
    refuse_too_few(steps)
    session = _Session(steps, device, feed, num_workers)
    with session.profiler:
        runner.train(session.num_steps, session.after_step)
    events = tuple(_events(session.profiler.events(), device))
    if not events:
        raise HardwareError(
            f"the profiler saw nothing run on {device}",
            why="another profiler holds the device, or the driver does not let this user count",
            fix="end the other one; NVIDIA: allow GPU performance counters for all users",
        )
    timed_s, waited_s = session.timed()
    return Trace(
        events=events,
        num_steps=steps,
        step_ms=timed_s * 1e3 / session.num_timed,
        data_wait_ms=waited_s * 1e3 / session.num_timed if feed else None,
        profiled_wait_us=session.profiled()[1] * 1e6,
        is_host=device.type == "cpu",
    )


class _Session:
    """Counts steps: warm-up, settling ones where data are read, timed ones, one for the profiler, profiled ones."""

    def __init__(self, steps: int, device: torch.device, feed: FeedOf | None, num_workers: int) -> None:
        self.device, self.feed = device, feed
        self.num_timed = timed_steps(steps, num_workers) if feed else steps
        self._stock_ends = WARM_UP_STEPS[device.type]
        self._begin = self._stock_ends + (SETTLING_STEPS if feed else 0)
        self._end = self._begin + self.num_timed
        self._profile = self._end + 1
        self.num_steps = self._profile + steps
        self._done = 0
        self._watch = Stopwatch()
        self._laps: dict[int, tuple[float, float]] = {}
        plan = schedule(wait=self._end, warmup=1, active=steps, repeat=1)
        self.profiler = profile(activities=[_activity(device)], schedule=plan, acc_events=True)

    def after_step(self) -> None:
        self._done += 1
        if self._done in (self._begin, self._end, self._profile, self.num_steps):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._laps[self._done] = self._watch.elapsed_s, self.feed().waited_s if self.feed else 0.0
        if self.feed is not None and self._done == self._stock_ends:
            self.feed().use_up()
        self.profiler.step()

    def timed(self) -> tuple[float, float]:
        """Seconds of the steps that only the clock saw, and those waited for data in them."""
        return self._between(self._begin, self._end)

    def profiled(self) -> tuple[float, float]:
        return self._between(self._profile, self.num_steps)

    def _between(self, first: int, last: int) -> tuple[float, float]:
        (began_s, waited_before_s), (ended_s, waited_s) = self._laps[first], self._laps[last]
        return ended_s - began_s, waited_s - waited_before_s


def _activity(device: torch.device) -> ProfilerActivity:
    # CUDA alone: recording operators too would slow the host and widen the gaps that are to be measured.
    return ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU


def _events(seen: Sequence[FunctionEvent] | None, device: torch.device) -> Iterator[Event]:
    for event in seen or ():
        # Annotations (`ProfilerStep`, `Optimizer.step`) span what happens inside them.
        if event.device_type.name != device.type.upper() or event.is_user_annotation or event.name in NOT_WORK:
            continue
        start_us, end_us = event.time_range.start, event.time_range.end
        self_us = end_us - start_us if device.type == "cuda" else event.self_cpu_time_total
        yield Event(name=_name(event), start_us=start_us, end_us=end_us, self_us=self_us)


def _name(event: FunctionEvent) -> str:
    """A CPU copy with the operator that asked for it: a cast and a change of layout are both `aten::copy_`."""
    parent = event.cpu_parent
    return f"{event.name} in {parent.name}" if event.name == "aten::copy_" and parent else str(event.name)
