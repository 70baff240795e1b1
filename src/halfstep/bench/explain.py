"""`halfstep bench --explain`: where a step's time goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halfstep.bench.explain_facts import Breakdown, KernelTime, StepFacts, breakdown
from halfstep.bench.explain_kernels import Kind
from halfstep.bench.explain_trace import FeedOf, timed_steps, trace
from halfstep.bench.problem import Runner

TOP_KERNELS = 10
WORTH_SAYING = 0.01
"""Share of the step; less is within the spread of a measurement."""
HOST_BOUND = 0.1
"""Share of launch gaps in a step from which the host sets the pace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """One kind's part of a step."""

    kind: str
    ms: float
    share: float
    """Of the time of all kernels."""
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """One runner's step, taken apart."""

    title: str
    device_name: str
    num_steps: int
    """Timed by the clock."""
    step_ms: float
    """By the clock, without the profiler."""
    kernel_ms: float
    busy_ms: float
    idle_ms: float
    launch_gap_ms: float
    data_wait_ms: float | None
    """None where no data were read."""
    floor_ms: float | None
    launches: float
    memory_bound_share: float
    memory_gb: float | None
    """What the memory-bound kernels move at most: their time at the measured bandwidth."""
    cast_share: float
    optimizer_share: float
    kinds: tuple[KindTime, ...]
    """The longest first; they add up to `kernel_ms`."""
    top_kernels: tuple[KernelTime, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        content = asdict(self)
        kernels = [{**kernel, "kind": str(kernel["kind"])} for kernel in content["top_kernels"]]
        return {**content, "top_kernels": kernels}


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
