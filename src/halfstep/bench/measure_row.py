"""One runner, measured apart from all others; whatever stops it becomes the row's reason.

It trains in a thread of its own, backward included: torch keeps cuDNN's algorithms for each thread, and in the thread
of an earlier row it would train with what that one had found (see `fresh_thread`).
"""

from __future__ import annotations

import contextlib
import statistics
import time

import torch

from halfstep.bench.apart import apart, clean
from halfstep.bench.compile_cache import CacheWatch, Found, empty_cache, forget_in_memory
from halfstep.bench.row import Row
from halfstep.bench.runner import Problem, Runner
from halfstep.bench.step_timer import Pause, Schedule, StepTimer, wait_for
from halfstep.errors import HalfstepError, MemoryLimitError
from halfstep.measure.memory import format_bytes
from halfstep.tune.fresh_thread import in_fresh_thread
from halfstep.tune.memory_limit import first_line

NOTHING_COMPILED = "it compiles nothing, so its start is the same with an empty cache: no cold start"
START_MATTERS = 1.05
"""A start that takes this much more memory than the training after it is told."""


def measured_row(
    runner: Runner, problem: Problem, schedule: Schedule, *, cold_start: bool, pause: Pause | None = None
) -> Row:
    """The row of this runner; `cold_start` also times its first step with an empty compiler cache."""
    with apart(problem.device):
        try:
            return _measured(runner, problem, schedule, cold_start=cold_start, pause=pause)
        # Anything at all: a peer's own error must cost its own row and no other.
        except Exception as error:
            error.__traceback__ = None  # its frames hold the model, and with it the memory of the next row
            return not_measured(runner.name, runner.variant, runner.precision, why_not(error))


def not_measured(name: str, variant: str, precision: str, reason: str) -> Row:
    return Row(name=name, variant=variant, precision=precision, reason=reason)


def why_not(error: Exception) -> str:
    """One line of what stopped a row."""
    if isinstance(error, torch.OutOfMemoryError | MemoryLimitError):
        return f"out of memory: {first_line(error)}"
    if isinstance(error, HalfstepError):
        return f"{error.what} ({error.fix})" if error.fix else error.what
    return f"{type(error).__name__}: {first_line(error)}"


def _measured(runner: Runner, problem: Problem, schedule: Schedule, *, cold_start: bool, pause: Pause | None) -> Row:
    device = problem.device
    with empty_cache() if cold_start else contextlib.nullcontext():
        cold_start_s = _cold_start_s(runner, device) if cold_start else None
        timer = StepTimer(schedule, device, pause)
        loss = in_fresh_thread(lambda: runner.train(schedule.steps, timer), device)
        found = timer.found()
    ms = tuple(1e3 * seconds for seconds in found.window_s)
    return Row(
        name=runner.name,
        variant=runner.variant,
        precision=runner.precision,
        window_ms=ms,
        peak_bytes=found.peak_bytes,
        start_peak_bytes=found.start_peak_bytes,
        reserved_bytes=found.reserved_bytes,
        joules_per_sample=found.joules_a_step / problem.samples if found.joules_a_step is not None else None,
        loss=loss,
        start_s=found.start_s,
        cold_start_s=cold_start_s,
        cache=found.cache,
        samples_per_s=problem.samples / statistics.median(ms) * 1e3,
        remarks=(
            *_remarks(found.peak_bytes, found.start_peak_bytes),
            *([NOTHING_COMPILED] if cold_start and cold_start_s is None else []),
        ),
        clock_limits=found.clock_limits,
    )


def first_step(runner: Runner, device: torch.device) -> tuple[float, Found]:
    """Seconds from nothing to the end of the first step, and how the compiler found its cache."""
    watch, began = CacheWatch(), time.perf_counter()
    seconds: list[float] = []

    def after_step() -> None:
        wait_for(device)
        seconds.append(time.perf_counter() - began)

    runner.train(1, after_step)
    return seconds[0], watch.found()


def _cold_start_s(runner: Runner, device: torch.device) -> float | None:
    """With nothing compiled before; None where nothing was compiled at all."""
    seconds, found = in_fresh_thread(lambda: first_step(runner, device), device)
    clean(device)
    forget_in_memory()
    return seconds if found else None


def _remarks(peak: int | None, start_peak: int | None) -> list[str]:
    is_larger = peak and start_peak and start_peak > START_MATTERS * peak
    return [f"its start takes {format_bytes(start_peak)}"] if is_larger and start_peak else []
