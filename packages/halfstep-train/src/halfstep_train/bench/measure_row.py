"""Measure one runner, isolated from all others; if it fails, the row records the reason.

The runner trains in a new thread, backward included: torch caches cuDNN's algorithm choices per thread, so a reused
thread would train with the choices of an earlier row (see `fresh_thread`).

The runner calls a timer after each step: warm-up, then windows. On CUDA a window is the time between two events on the
stream, so host and device overlap as in training. The host waits only three times: after the first step, after the
warm-up, and at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from halfstep.backend_flags import read_flags, write_flags
from halfstep.errors import HalfstepError, MemoryLimitError, summarise_error
from halfstep.hardware.clock import wait_for
from halfstep.hardware.driver import Driver
from halfstep.hardware.memory import get_peak_memory_bytes, release_unused_memory, reset_peak
from halfstep.hardware.nvml import EnergyMeter, ask_nvml
from halfstep_train.bench.problem import Problem, Runner
from halfstep_train.run.monitor import list_limits
from halfstep_train.tune.fresh_thread import forget_compiled, run_in_fresh_thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Measurements of one runner; without windows it was not measured, and `reason` says why."""

    name: str
    variant: str
    precision: str
    reason: str = ""
    remarks: tuple[str, ...] = ()
    window_ms: tuple[float, ...] = ()
    """Milliseconds per step, one value per window."""
    samples_per_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    joules_per_sample: float | None = None
    floor_ms: float | None = None
    loss: float | None = None
    start_s: float | None = None
    cache: str = ""
    """State of the compiler's cache at the start: cold, warm, or empty if nothing was compiled."""
    clock_limits: tuple[str, ...] = ()
    """What limited the device's clocks at the end."""
    speedup_fp32: float | None = None
    speedup_tf32: float | None = None

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant} {self.precision}"

    @property
    def is_measured(self) -> bool:
        return bool(self.window_ms)

    @property
    def ms(self) -> float:
        """Return the median window's milliseconds."""
        return statistics.median(self.window_ms)

    @property
    def spread_ms(self) -> float:
        """Return the slowest window minus the fastest, in milliseconds."""
        return max(self.window_ms) - min(self.window_ms)

    @property
    def floor_share(self) -> float | None:
        return self.floor_ms / self.ms if self.is_measured and self.floor_ms is not None else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, including the values derived from the windows."""
        values = dataclasses.asdict(self)
        if self.loss is not None and not math.isfinite(self.loss):
            values["loss"] = None  # JSON has no NaN; a warning reports it
        if self.is_measured:
            values |= {"ms": self.ms, "ms_min": min(self.window_ms), "ms_max": max(self.window_ms)}
            values["floor_share"] = self.floor_share
        return values


NUM_WINDOWS = 5

PAUSE_AFTER = 3
"""Steps after which everything is compiled, well before the warm-up ends."""

Pause = Callable[[], None]
Mark = float | torch.cuda.Event
"""A point in time: on the device for CUDA, else on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How many steps run, and which of them are timed."""

    warm_up: int
    """Steps for compilation, cuDNN's choices, capture and rising clocks."""
    ramp: int
    """Steps after the wait that ends the warm-up, until the host is ahead of the device again."""
    window: int
    """Steps of one window."""

    @property
    def steps(self) -> int:
        """Return the steps until the last window ends."""
        return self.warm_up + self.ramp + self.window * NUM_WINDOWS


def make_schedule(timed_steps: int, device: torch.device) -> Schedule:
    """Split `timed_steps` into equal windows and drop the remainder."""
    window = timed_steps // NUM_WINDOWS
    if device.type == "cuda":
        return Schedule(warm_up=10, ramp=2, window=window)
    return Schedule(warm_up=2, ramp=0, window=window)


class StepTimer:
    """Time the steps of a row: a runner calls it after each one. Memory is None on a CPU."""

    def __init__(self, schedule: Schedule, device: torch.device, samples: int, pause: Pause | None = None) -> None:
        """Start the clock of a row.

        `pause` is called once, early in the warm-up: a benchmark that alternates between processes waits there.
        """
        self.schedule, self.device, self.samples, self.pause = schedule, device, samples, pause
        self._compilers = CacheWatch()
        self.began = time.perf_counter()
        self.count = 0
        self.marks: list[Any] = []  # each a Mark
        self.measured: dict[str, Any] = {}
        """Fields of the row."""
        reset_peak(device)

    def __call__(self) -> None:
        """Count one step, and mark the time where a window begins or ends."""
        self.count += 1
        if self.count == 1:
            wait_for(self.device)
            # At the first step: a capture, steps later, compiles further kernels.
            self.measured |= {"start_s": time.perf_counter() - self.began, "cache": self._compilers.get_state()}
        if self.count == PAUSE_AFTER and self.pause is not None:
            self.pause()
        if self.count == self.schedule.warm_up:
            wait_for(self.device)
            reset_peak(self.device)  # until now kernels were chosen and graphs captured
            self._energy = EnergyMeter(self.device)
        # The first mark (at 0) is the start of the first window.
        timed = self.count - self.schedule.warm_up - self.schedule.ramp
        if timed >= 0 and timed % self.schedule.window == 0:
            self.marks.append(self._mark())
        if self.count == self.schedule.steps:
            self._end()

    def _mark(self) -> Mark:
        if self.device.type != "cuda":
            wait_for(self.device)
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _end(self) -> None:
        """Read memory, energy and times of the row.

        This happens in the call after the last step, because later the runner frees its CUDA graphs and their memory.
        """
        limits = read_clock_limits(self.device)  # before the wait: an idle device has no reason to slow down
        wait_for(self.device)
        joules, num_samples = self._energy.read_joules(), self.samples * (self.schedule.steps - self.schedule.warm_up)
        each_ms = 1e3 / self.schedule.window
        pairs = itertools.pairwise(self.marks)
        windows_s = (b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in pairs)
        window_ms = tuple(each_ms * seconds for seconds in windows_s)
        on_cpu = self.device.type == "cpu"
        self.measured |= {
            "window_ms": window_ms,
            "samples_per_s": self.samples / statistics.median(window_ms) * 1e3,
            # While training, with a graph's memory. A process keeps memory that earlier rows freed: on a CPU each row
            # would look larger than the one before.
            "peak_bytes": None if on_cpu else get_peak_memory_bytes(self.device),
            "reserved_bytes": torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else None,
            "joules_per_sample": None if joules is None else joules / num_samples,
            "clock_limits": limits,
        }


def measure_row(runner: Runner, problem: Problem, schedule: Schedule, *, pause: Pause | None = None) -> Row:
    """Measure this runner and return its row."""
    with isolate_row(problem.device):
        try:
            return _measure(runner, problem, schedule, pause)
        # Catch any error: if one runner fails, the other rows must still be measured.
        except Exception as error:
            error.__traceback__ = None  # its frames would keep the model, and thereby memory, alive for the next row
            return make_unmeasured_row(runner.name, runner.variant, runner.precision, describe_failure(error))


def make_unmeasured_row(name: str, variant: str, precision: str, reason: str) -> Row:
    return Row(name=name, variant=variant, precision=precision, reason=reason)


def describe_failure(error: Exception) -> str:
    """Summarise in one line what stopped a row."""
    if isinstance(error, torch.OutOfMemoryError | MemoryLimitError):
        return f"out of memory: {summarise_error(error)}"
    if isinstance(error, HalfstepError):
        return f"{error.what} ({error.fix})" if error.fix else error.what
    return f"{type(error).__name__}: {summarise_error(error)}"


def _measure(runner: Runner, problem: Problem, schedule: Schedule, pause: Pause | None) -> Row:
    """Train the schedule's steps with a timer and build the row from it."""
    timer = StepTimer(schedule, problem.device, problem.samples, pause)
    loss = run_in_fresh_thread(lambda: runner.train(schedule.steps, timer), problem.device)
    assert timer.count == schedule.steps, f"the runner made {timer.count} of {schedule.steps} steps"
    return Row(name=runner.name, variant=runner.variant, precision=runner.precision, loss=loss, **timer.measured)


# --- isolation of a row: flags, memory, compiled code, other users of the device ---

CacheState = Literal["", "cold", "warm"]
"""Whether compiled code came from the cache; empty if nothing was compiled."""

OURS = ("halfstep.", "halfstep_train.")


class CacheWatch:
    """Reports whether torch's compiler hit its disk cache since the watch was made; ignores Triton's own cache."""

    def __init__(self) -> None:
        self._before = _read_cache_counts()

    def get_state(self) -> CacheState:
        hits, misses = (now - before for now, before in zip(_read_cache_counts(), self._before, strict=True))
        return "cold" if misses else "warm" if hits else ""


def _read_cache_counts() -> tuple[int, int]:
    """Return the number of cache hits, and of compilations because of a miss or because the graph cannot be cached."""
    from torch._dynamo.utils import counters

    inductor = counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]


def forget_our_kernels() -> None:
    """Unload halfstep's Triton kernels, so that the next call looks for them on disk."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import JITFunction

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Triton 3.9 unloads them from the device, where they may still be running
    ours = [module for name, module in list(sys.modules.items()) if name.startswith(OURS)]
    for kernel in (value for module in ours for value in vars(module).values() if isinstance(value, JITFunction)):
        kernel.device_caches.clear()


@contextmanager
def isolate_row(device: torch.device) -> Iterator[None]:
    """Isolate a row: clean the device before and after, and restore the TF32, cuDNN and grad flags on exit."""
    flags, cudnn = read_flags(), torch.backends.cudnn
    switches = (cudnn.benchmark, cudnn.deterministic, torch.is_grad_enabled())
    clean_device(device)
    try:
        yield
    finally:
        write_flags(flags)
        cudnn.benchmark, cudnn.deterministic = switches[:2]
        torch.set_grad_enabled(switches[2])
        clean_device(device)


def clean_device(device: torch.device) -> None:
    """Drop compiled code, cached memory and garbage."""
    # Compiled code keeps weights alive, and dynamo gives up on a function it has compiled eight times.
    forget_compiled()
    forget_our_kernels()
    release_unused_memory(device)


def read_clock_limits(device: torch.device) -> tuple[str, ...]:
    """Return what limits the GPU's clocks at this moment; empty if nothing does, or NVML is missing."""

    # The older of the function's two names: drivers before 535 lack the other.
    bits = ask_nvml(device, lambda nvml, handle: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
    return list_limits(bits)


def find_other_users(device: torch.device) -> str:
    """Describe other work on the device that may disturb the measurement; empty if there is none."""
    if device.type == "cpu":
        return Driver().describe_load()
    others = Driver().describe_gpu_users(str(device))
    return f"{others}: times will be too long" if others else ""
