"""`halfstep bench --explain` on the console, and as a picture: one bar, stacked by kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from halfstep.report.bench_view import problem_title
from halfstep.report.picture_file import INK, new_figure, save_figure
from halfstep.report.tables import columns_table, pairs_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME_LENGTH = 64
NUMBERED_FROM = 0.06
"""Share of its bar from which a piece has room for its milliseconds."""
GAPS, GAPS_COLOUR = "launch gaps", "#e4e7eb"
"""Nothing runs meanwhile; the console calls it the same."""
COLOURED = [index for index in range(20) if index not in (14, 15)]
"""Of matplotlib's tab20: without its greys, which are idle time's."""
DARK = 0.5
"""Below this luma white is read better than ink."""


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
    yield GAPS, f"{explanation.launch_gap_ms:.2f} ms"
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


def draw_explanations(explanations: Sequence[Explanation], record: Mapping[str, Any], path: Path) -> None:
    """Write one bar a step, stacked by kind, idle time at its end; a kind has the same colour in each.

    `record` tells of problem and device, as that of a bench does.
    """
    figure = new_figure((10.0, 2.9 + 0.6 * len(explanations)))
    axes: Axes = figure.subplots()
    bars = [_pieces(explanation) for explanation in explanations]
    pieces = dict.fromkeys(kind for bar in bars for kind in bar)
    kinds = [kind for kind in pieces if kind != GAPS]
    colours = {kind: _colour(index) for index, kind in enumerate(kinds)} | {GAPS: GAPS_COLOUR}
    for row, bar in enumerate(bars):
        _stack(axes, row, bar, colours)
    axes.set_yticks(range(len(bars)), [explanation.title for explanation in explanations], fontsize=9)
    axes.invert_yaxis()
    figure.suptitle(_picture_title(explanations, record), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel("ms per step", fontsize=9, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    _name_kinds(axes, colours)
    save_figure(figure, path)


def _picture_title(explanations: Sequence[Explanation], record: Mapping[str, Any]) -> str:
    """What was trained, and below it by whom, in which mode and precision, and where."""
    who_way_precision = zip(*(explanation.title.split() for explanation in explanations), strict=True)
    rows = " ".join("/".join(dict.fromkeys(words)) for words in who_way_precision)
    return (
        f"where a step goes: {problem_title(record)}\n{rows}: {record['device']}, torch {record['versions']['torch']}"
    )


def _pieces(explanation: Explanation) -> dict[str, float]:
    pieces = {row.kind: row.ms for row in explanation.kinds} | {GAPS: explanation.launch_gap_ms}
    return {kind: ms for kind, ms in pieces.items() if ms > 0}


def _colour(index: int) -> Any:
    from matplotlib import colormaps

    palette = colormaps["tab20"]
    return palette(COLOURED[index % len(COLOURED)])


def _ink_on(colour: Any) -> str:
    """What can be read on it, by its luma (ITU-R BT.709)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < DARK else INK


def _stack(axes: Axes, row: int, bar: Mapping[str, float], colours: Mapping[str, Any]) -> None:
    total, begin = sum(bar.values()), 0.0
    for kind, ms in bar.items():
        axes.barh(row, ms, left=begin, height=0.7, color=colours[kind], edgecolor="white", linewidth=0.5)
        if ms >= NUMBERED_FROM * total:
            axes.text(
                begin + ms / 2, row, f"{ms:.3g}", ha="center", va="center", fontsize=8, color=_ink_on(colours[kind])
            )
        begin += ms


def _name_kinds(axes: Axes, colours: Mapping[str, Any]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    axes.figure.legend(handles=patches, loc="outside lower left", ncols=4, fontsize=8, frameon=False)
