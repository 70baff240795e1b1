"""The bench as a picture: a bar a row, time on the left and, where it was counted, memory on the right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import counted
from halfstep.report.bench_table import OLDER_UNIT, digits, title
from halfstep.report.picture_file import FAINT, INK, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

COLOURS = {"fp32": "#616e7c", "tf32": "#8e44ad", "bf16": "#2f6fde", "fp16": "#0b9ac0", "fp8": "#12805c"}
OTHER = "#b7791f"
PEER_ALPHA = 0.45
"""Peers stand back behind halfstep's own rows."""
INCHES_A_ROW = 0.36
ROOM_FOR_LABELS = 1.55
"""Of the longest bar: the numbers stand behind the bars."""


def draw_bench(record: Mapping[str, Any], path: Path) -> None:
    """Write the picture; rows that say nothing about speed are left out of it."""
    rows = [row for row in record["rows"] if row["window_ms"] and not row["simulated"]]
    figure = new_figure((11.5, 1.5 + INCHES_A_ROW * max(len(rows), 2)))
    figure.suptitle(title(record), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    has_memory = any(row["peak_bytes"] for row in rows)
    panels = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2)) if has_memory else [figure.subplots()]
    _draw_times(panels[0], rows, record.get("unit", OLDER_UNIT))
    if has_memory:
        _draw_memory(panels[1], rows)
    if notes := list(_notes(record, len(rows), has_memory=has_memory)):
        figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8.5, color=FAINT)
    save_figure(figure, path)


def _notes(record: Mapping[str, Any], num_drawn: int, *, has_memory: bool) -> Iterator[str]:
    """What is missing in the picture, and why."""
    if num_drawn and not has_memory:
        yield f"memory: {record['memory']}"
    if left_out := len(record["rows"]) - num_drawn:
        yield f"not drawn: {counted(left_out, 'row')} that could not be measured, or whose format is simulated here"


def _draw_times(axes: Axes, rows: Sequence[Row], unit: Mapping[str, Any]) -> None:
    _bars(axes, rows, [row["ms"] for row in rows], "time per step, ms (line: fastest to slowest window)")
    _spreads(axes, rows)
    _labels(axes, [row["ms_max"] for row in rows], [_time_label(row, unit) for row in rows])


def _draw_memory(axes: Axes, rows: Sequence[Row]) -> None:
    sizes = [(row["peak_bytes"] or 0) / 1e9 for row in rows]
    _bars(axes, rows, sizes, "peak memory, GB")
    _labels(axes, sizes, [f"{digits(size)} GB" if size else "not counted" for size in sizes])


def _bars(axes: Axes, rows: Sequence[Row], lengths: Sequence[float], name: str) -> None:
    places = range(len(rows))
    bars = axes.barh(places, lengths, height=0.7, color=[COLOURS.get(row["precision"], OTHER) for row in rows])
    for bar, row in zip(bars, rows, strict=True):
        bar.set_alpha(1.0 if row["name"] == "halfstep" else PEER_ALPHA)
    axes.set_yticks(places, [f"{row['name']} {row['variant']}  {row['precision']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    axes.set_xlim(0, ROOM_FOR_LABELS * max(lengths, default=1.0) or 1.0)
    axes.set_xlabel(name, fontsize=9, color=FAINT)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _spreads(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        for colour, width in (("white", 4.0), (INK, 1.6)):  # a rim, to be seen on a dark bar
            ends = [row["ms_min"], row["ms_max"]]
            axes.plot(ends, [place, place], color=colour, linewidth=width, solid_capstyle="butt")


def _labels(axes: Axes, ends: Sequence[float], labels: Sequence[str]) -> None:
    for place, (end, label) in enumerate(zip(ends, labels, strict=True)):
        axes.annotate(label, (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK)


def _time_label(row: Row, unit: Mapping[str, Any]) -> str:
    rate = digits(row["samples_per_s"] * unit["per_sample"], 4)
    facts = [f"{digits(row['ms'], 4)} ms", f"{rate} {unit['name']}s/s"]
    facts += [f"{row['speedup_fp32']:.1f}x fp32"] if row["speedup_fp32"] is not None else []
    return "  ".join(facts)
