"""What a profile cannot know about a step, and what it shows, added up by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from halfstep.bench.explain_kernels import MEMORY_BOUND, Kind, kind_of_kernel, kind_of_operator
from halfstep.bench.explain_trace import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """How the step was run, and what its device was measured to do."""

    precision: str
    """The canonical word: fp32, tf32, bf16, fp16, fp8."""
    channels_last: bool
    device: torch.device
    device_name: str
    num_workers: int = 0
    """Processes that read data."""
    faster_data: str = ""
    """The setting that gets data faster; empty where none are read."""
    flops: float | None = None
    """Counted for one step, forward and backward."""
    matmul_tflops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Measured rate by precision; a precision that is not there was not measured."""
    bandwidth_gb_s: float | None = None

    @property
    def floor_ms(self) -> float | None:
        """The step, were it matrix products alone at their measured rate."""
        rate = self.matmul_tflops.get(self.precision)
        return self.flops / rate / 1e9 if self.flops and rate else None


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All launches of one kernel, a step."""

    name: str
    kind: Kind
    ms: float
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Where a step's time goes."""

    kernels: tuple[KernelTime, ...]
    """The longest first."""
    step_ms: float
    busy_ms: float
    """In which anything runs."""
    launch_gap_ms: float
    """Nothing runs, but not for want of data: the host is late with its launches."""
    data_wait_ms: float | None
    """Host time blocked in fetching; None where no data were read."""
    exposed_wait_ms: float
    """That part of it in which nothing runs."""

    @property
    def kernel_ms(self) -> float:
        """The sum over all kernels; more than `busy_ms` where streams overlap."""
        return sum(kernel.ms for kernel in self.kernels)

    @property
    def launches(self) -> float:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def idle_ms(self) -> float:
        return self.launch_gap_ms + self.exposed_wait_ms

    def ms(self, *kinds: Kind) -> float:
        return sum(kernel.ms for kernel in self.kernels if kernel.kind in kinds)

    def launches_of(self, *kinds: Kind) -> float:
        return sum(kernel.launches for kernel in self.kernels if kernel.kind in kinds)

    def share(self, *kinds: Kind) -> float:
        """Of the time of all kernels."""
        return self.ms(*kinds) / self.kernel_ms if self.kernel_ms else 0.0

    @property
    def memory_bound_share(self) -> float:
        return self.share(*MEMORY_BOUND)


def breakdown(trace: Trace, facts: StepFacts) -> Breakdown:
    """Add up a trace by kernel, a step."""
    kind_of = kind_of_kernel if facts.device.type == "cuda" else kind_of_operator
    return Breakdown(
        kernels=_by_kernel(trace, kind_of),
        step_ms=trace.step_ms,
        busy_ms=trace.busy_ms,
        launch_gap_ms=trace.launch_gap_ms,
        data_wait_ms=trace.data_wait_ms,
        exposed_wait_ms=trace.exposed_wait_ms,
    )


def _by_kernel(trace: Trace, kind_of: Callable[[str], Kind]) -> tuple[KernelTime, ...]:
    times_us: defaultdict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        times_us[event.name].append(event.self_us)
    kernels = [
        KernelTime(name=name, kind=kind_of(name), ms=trace.a_step_ms(sum(us)), launches=len(us) / trace.num_steps)
        for name, us in times_us.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: kernel.ms, reverse=True))
