"""`halfstep bench --explain`: where a step's time goes, from a profile and from what a profile cannot know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from halfstep.bench.explain_kernels import MEMORY_BOUND, Kind, kind_of_kernel, kind_of_operator
from halfstep.bench.explain_trace import FeedOf, Trace, timed_steps, trace
from halfstep.bench.problem import Runner
from halfstep.report.explain_view import Explanation, KernelTime, KindTime


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

    def ms(self, *kinds: str) -> float:
        return sum(kernel.ms for kernel in self.kernels if kernel.kind in kinds)

    def launches_of(self, *kinds: str) -> float:
        return sum(kernel.launches for kernel in self.kernels if kernel.kind in kinds)

    def share(self, *kinds: str) -> float:
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


TOP_KERNELS = 10
WORTH_SAYING = 0.01
"""Share of the step; less is within the spread of a measurement."""
HOST_BOUND = 0.1
"""Share of launch gaps in a step from which the host sets the pace."""


def explain(runner: Runner, *, steps: int, facts: StepFacts, feed: FeedOf | None = None) -> Explanation:
    """Time and profile `steps` steps of a runner; `feed` where it reads data."""
    num_timed = timed_steps(steps, facts.num_workers) if feed else steps
    step = breakdown(trace(runner, steps=steps, device=facts.device, feed=feed, num_workers=facts.num_workers), facts)
    return explained(step, facts, title=f"{runner.name} {runner.variant} {runner.precision}", num_steps=num_timed)


def explained(step: Breakdown, facts: StepFacts, *, title: str, num_steps: int) -> Explanation:
    """The explanation of a step that was taken apart already."""
    memory_ms = step.memory_bound_share * step.kernel_ms
    return Explanation(
        title=title,
        device_name=facts.device_name,
        num_steps=num_steps,
        step_ms=step.step_ms,
        kernel_ms=step.kernel_ms,
        busy_ms=step.busy_ms,
        idle_ms=step.idle_ms,
        launch_gap_ms=step.launch_gap_ms,
        data_wait_ms=step.data_wait_ms,
        floor_ms=facts.floor_ms,
        launches=step.launches,
        memory_bound_share=step.memory_bound_share,
        memory_gb=memory_ms * facts.bandwidth_gb_s / 1e3 if facts.bandwidth_gb_s else None,
        cast_share=step.share(Kind.CAST),
        optimizer_share=step.share(Kind.OPTIMIZER),
        kinds=_kinds(step),
        top_kernels=step.kernels[:TOP_KERNELS],
        notes=_notes(step, facts),
    )


def _kinds(step: Breakdown) -> tuple[KindTime, ...]:
    present = {kernel.kind for kernel in step.kernels}
    rows = [
        KindTime(kind=str(kind), ms=step.ms(kind), share=step.share(kind), launches=step.launches_of(kind))
        for kind in present
    ]
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.kind)))


def _notes(step: Breakdown, facts: StepFacts) -> tuple[str, ...]:
    notes = []
    if facts.faster_data and (step.data_wait_ms or 0.0) >= WORTH_SAYING * step.step_ms:
        notes.append(f"{step.data_wait_ms:.2f} ms per step waiting for the loader: {facts.faster_data}")
    if facts.device.type == "cuda" and step.launch_gap_ms > HOST_BOUND * step.step_ms:
        notes.append("the host is slower than the device: shorter kernels alone change little")
    turned = next((k for k in step.kernels if k.kind is Kind.LAYOUT), None)
    if facts.channels_last and turned and step.ms(Kind.LAYOUT) >= WORTH_SAYING * step.step_ms:
        notes.append(f"{step.ms(Kind.LAYOUT):.2f} ms of layout copies although channels_last is on: {turned.name}")
    if facts.device.type == "cpu":
        notes.append(
            "recording slows a CPU's operators, small ones most: times are scaled to the clock's, shares are rough; "
            "gaps are what Python does between them"
        )
    return tuple(notes)
