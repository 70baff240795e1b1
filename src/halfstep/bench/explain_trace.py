"""A few steps of a runner, timed by the clock and then seen by the profiler.

A profiled step is slower than a real one, above all where the host is the limit, so the same run is timed first
without the profiler. Times of kernels hold under it; idle time does not, and counts only as far as the clock agrees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, schedule

from halfstep.bench.problem import Runner
from halfstep.errors import ConfigError, HardwareError, format_count
from halfstep.hardware.clock import Stopwatch

LEAST_STEPS = 3
WARM_UP_STEPS = {"cuda": 10, "cpu": 2}
"""Compilation, cuDNN's choice of algorithms and graph capture are over by then."""
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
        """Nothing runs: seen in the span, and no more than the clock leaves beside the work."""
        return max(0.0, min(self.span_ms, self.step_ms) - self.busy_ms)


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
            f"{format_count(steps, 'step')}: too few to explain",
            why="single steps differ by more than what is to be seen",
            fix=f"--steps {LEAST_STEPS} or more",
        )


def wake_profiler(device: torch.device) -> None:
    """Start it where torch was imported: the first start in another thread is an error on the terminal."""
    with profile(activities=[_activity(device)], acc_events=True):
        pass


def trace(runner: Runner, *, steps: int, device: torch.device) -> Trace:
    """Train past the warm-up, time `steps` steps, then profile as many."""
    if device.type not in WARM_UP_STEPS:
        raise HardwareError(
            f"--explain cannot look into {device.type}", why="it reads CUDA kernels and CPU operators", fix="--device"
        )
    refuse_too_few(steps)
    session = _Session(steps, device)
    with session.profiler:
        runner.train(session.num_steps, session.after_step)
    events = tuple(_events(session.profiler.events(), device))
    if not events:
        raise HardwareError(
            f"the profiler saw nothing run on {device}",
            why="another profiler holds the device, or the driver does not let this user count",
            fix="end the other one; NVIDIA: allow GPU performance counters for all users",
        )
    return Trace(events=events, num_steps=steps, step_ms=session.timed_s * 1e3 / steps, is_host=device.type == "cpu")


class _Session:
    """Counts steps: warm-up, timed ones, one for the profiler, profiled ones."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.device = device
        self._begin = WARM_UP_STEPS[device.type]
        self._end = self._begin + steps
        self.num_steps = self._end + 1 + steps
        self._done = 0
        self._watch = Stopwatch()
        self.timed_s = 0.0
        plan = schedule(wait=self._end, warmup=1, active=steps, repeat=1)
        self.profiler = profile(activities=[_activity(device)], schedule=plan, acc_events=True)

    def after_step(self) -> None:
        self._done += 1
        if self._done in (self._begin, self._end, self._end + 1, self.num_steps) and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._done == self._begin:
            self._watch.restart()
        elif self._done == self._end:
            self.timed_s = self._watch.elapsed_s
        self.profiler.step()


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
