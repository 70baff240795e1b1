"""`halfstep bench --explain`: where a step's time goes, from a profile and from what a profile cannot know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from halfstep.bench.explain_kernels import MEMORY_BOUND, Kind, kind_of_kernel, kind_of_operator
from halfstep.bench.explain_trace import Trace, trace
from halfstep.bench.problem import Runner
from halfstep.report.explain_view import Explanation, KernelTime, KindTime


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """How the step was run, and what its device was measured to do."""

    channels_last: bool
    device: torch.device
    device_name: str
    floor_ms: float | None = None
    """The step, were it matrix products alone at their measured rate."""
    bandwidth_gb_s: float | None = None


TOP_KERNELS = 10
WORTH_SAYING = 0.01
"""Share of the step; less is within the spread of a measurement."""
HOST_BOUND = 0.1
"""Share of launch gaps in a step from which the host sets the pace."""


def explain(runner: Runner, *, steps: int, facts: StepFacts) -> Explanation:
    """Time and profile `steps` steps of a runner."""
    seen = trace(runner, steps=steps, device=facts.device)
    return explained(seen, facts, title=f"{runner.name} {runner.variant} {runner.precision}")


def explained(step: Trace, facts: StepFacts, *, title: str) -> Explanation:
    """The explanation of steps that were traced already."""
    kernels = kernels_of(step, kind_of_kernel if facts.device.type == "cuda" else kind_of_operator)
    kinds = {row.kind: row for row in _kinds(kernels)}
    memory_ms = sum(row.ms for kind, row in kinds.items() if kind in MEMORY_BOUND)
    kernel_ms = sum(kernel.ms for kernel in kernels)
    return Explanation(
        title=title,
        device_name=facts.device_name,
        num_steps=step.num_steps,
        step_ms=step.step_ms,
        kernel_ms=kernel_ms,  # more than `busy_ms` where streams overlap
        busy_ms=step.busy_ms,
        launch_gap_ms=step.launch_gap_ms,
        floor_ms=facts.floor_ms,
        launches=sum(kernel.launches for kernel in kernels),
        memory_bound_share=memory_ms / kernel_ms if kernel_ms else 0.0,
        memory_gb=memory_ms * facts.bandwidth_gb_s / 1e3 if facts.bandwidth_gb_s else None,
        cast_share=kinds[Kind.CAST].share if Kind.CAST in kinds else 0.0,
        optimizer_share=kinds[Kind.OPTIMIZER].share if Kind.OPTIMIZER in kinds else 0.0,
        kinds=tuple(kinds.values()),
        top_kernels=kernels[:TOP_KERNELS],
        notes=tuple(_notes(step, kernels, facts)),
    )


def kernels_of(step: Trace, kind_of: Callable[[str], Kind]) -> tuple[KernelTime, ...]:
    """A step's kernels, the longest first."""
    times_us: defaultdict[str, list[float]] = defaultdict(list)
    for event in step.events:
        times_us[event.name].append(event.self_us)
    kernels = [
        KernelTime(name=name, kind=kind_of(name), ms=step.a_step_ms(sum(us)), launches=len(us) / step.num_steps)
        for name, us in times_us.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: kernel.ms, reverse=True))


def _kinds(kernels: Sequence[KernelTime]) -> list[KindTime]:
    """The longest first."""
    ms, launches = defaultdict[str, float](float), defaultdict[str, float](float)
    for kernel in kernels:
        ms[kernel.kind] += kernel.ms
        launches[kernel.kind] += kernel.launches
    total = sum(ms.values()) or 1.0
    rows = [KindTime(kind=str(kind), ms=ms[kind], share=ms[kind] / total, launches=launches[kind]) for kind in ms]
    return sorted(rows, key=lambda row: (-row.ms, row.kind))


def _notes(step: Trace, kernels: Sequence[KernelTime], facts: StepFacts) -> Iterator[str]:
    if facts.device.type == "cuda" and step.launch_gap_ms > HOST_BOUND * step.step_ms:
        yield "the host is slower than the device: shorter kernels alone change little"
    turned = [kernel for kernel in kernels if kernel.kind is Kind.LAYOUT]
    turned_ms = sum(kernel.ms for kernel in turned)
    if facts.channels_last and turned and turned_ms >= WORTH_SAYING * step.step_ms:
        yield f"{turned_ms:.2f} ms of layout copies although channels_last is on: {turned[0].name}"
    if facts.device.type == "cpu":
        yield (
            "recording slows a CPU's operators, small ones most: times are scaled to the clock's, shares are rough; "
            "gaps are what Python does between them"
        )
