"""`halfstep bench --explain` on the console."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from halfstep.report.tables import columns_table, pairs_table

NAME_LENGTH = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """One kind's part of a step."""

    kind: str
    ms: float
    share: float
    """Of the time of all kernels."""
    launches: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTime:
    """All launches of one kernel, a step."""

    name: str
    kind: str
    ms: float
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
    launch_gap_ms: float
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
        return asdict(self)


def explain_view(explanation: Explanation) -> RenderableType:
    """Kinds, what they say, and the longest kernels."""
    return Group(*_parts(explanation))


def _parts(explanation: Explanation) -> Iterator[RenderableType]:
    head = f"{explanation.title} on {explanation.device_name}: {explanation.step_ms:.2f} ms per step"
    yield Text(f"{head} (mean of {explanation.num_steps})", style="bold")
    yield ""
    yield _kinds_table(explanation)
    yield ""
    yield pairs_table(_findings(explanation))
    yield ""
    yield Text(f"the {len(explanation.top_kernels)} longest", style="bold")
    yield _kernels_table(explanation)
    yield from (Text(f"note: {note}", style="dim") for note in explanation.notes)


def _kinds_table(explanation: Explanation) -> RenderableType:
    rows = explanation.kinds
    columns = {
        "kind": [*(row.kind for row in rows), "all"],
        "ms per step": [*(f"{row.ms:.3f}" for row in rows), f"{explanation.kernel_ms:.3f}"],
        "share": [*(f"{row.share:.1%}" for row in rows), "100.0%"],
        "launches": [*(f"{row.launches:.0f}" for row in rows), f"{explanation.launches:.0f}"],
    }
    return columns_table(columns, left=("kind",))


def _findings(explanation: Explanation) -> Iterator[tuple[str, str]]:
    moved = f", at most {explanation.memory_gb:.3g} GB per step" if explanation.memory_gb is not None else ""
    yield "memory-bound", f"{explanation.memory_bound_share:.1%}{moved}"
    yield "casts", f"{explanation.cast_share:.1%}"
    yield "optimizer", f"{explanation.optimizer_share:.1%}"
    yield "launch gaps", f"{explanation.launch_gap_ms:.2f} ms"
    if explanation.floor_ms is not None:
        share = explanation.floor_ms / explanation.step_ms
        yield "floor", f"{explanation.floor_ms:.2f} ms of matrix products at the measured rate: {share:.0%} of the step"


def _kernels_table(explanation: Explanation) -> RenderableType:
    rows = explanation.top_kernels
    columns = {
        "ms per step": [f"{row.ms:.3f}" for row in rows],
        "launches": [f"{row.launches:.0f}" for row in rows],
        "kind": [row.kind for row in rows],
        "kernel": [_short(row.name) for row in rows],
    }
    table = columns_table(columns, left=("kind", "kernel"))
    table.columns[3].no_wrap, table.columns[3].overflow = False, "fold"
    return table


def _short(name: str) -> str:
    """Without what stands before every kernel of torch."""
    text = name.removeprefix("void ").replace("at::native::", "").replace("(anonymous namespace)::", "")
    return text if len(text) <= NAME_LENGTH else f"{text[: NAME_LENGTH - 1]}…"
