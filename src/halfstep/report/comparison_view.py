"""A comparison as a table and as curves with bands."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_bytes
from halfstep.report.picture_file import FAINT, INK, new_figure, save_figure
from halfstep.report.tables import columns_table, print_text

COLOURS = ("#1f2933", "#2f6fde", "#e8710a", "#12805c", "#8e44ad", "#0b9ac0")
"""Distinct for colour-blind readers too; the baseline is the dark one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One row of the table; None where nothing was measured, or not by a run alone on the device."""

    name: str
    ran: str = ""
    """`simulated` or `ran bf16`, where the row did not run natively what it asks for."""
    seconds_per_epoch: float | None
    samples_per_s: float | None
    rate: tuple[str, float] | None
    """Throughput in the unit of the workload: `("tokens/s", 1234.5)`."""
    memory_bytes: float | None
    largest_batch: int | None
    """That is predicted to fit the device; None without a GPU."""
    joules: float | None
    money: float | None
    values: Sequence[float]
    verdict: str
    interval: tuple[float, float] | None
    to_quality_s: float | None
    not_reached: int
    curves: Sequence[Sequence[tuple[int, float]]] = ()
    """(step, metric) of each seed."""

    @property
    def title(self) -> str:
        return f"{self.name} ({self.ran})" if self.ran else self.name


def comparison_columns(lines: Sequence[Line], metric: str) -> dict[str, list[str]]:
    """The table's cells by title, for a terminal and for a page."""
    columns: dict[str, list[str]] = {"row": [line.title for line in lines]}
    rate = next((line.rate[0] for line in lines if line.rate), "samples/s")
    measured: Mapping[str, list[str]] = {
        "s/epoch": [_number(line.seconds_per_epoch) for line in lines],
        rate: [_number(line.rate and line.rate[1]) for line in lines],
        "memory": [format_bytes(line.memory_bytes, digits=3) if line.memory_bytes else "" for line in lines],
        "largest\nbatch": [f"{line.largest_batch:,}" if line.largest_batch else "" for line in lines],
        "J/run": [_number(line.joules) for line in lines],
        "money/run": [_number(line.money) for line in lines],
    }
    columns |= measured
    spreads = [statistics.stdev(line.values) for line in lines if len(line.values) > 1]
    columns[metric] = [_spread(line.values, decimals(spreads)) for line in lines]
    bounds = [line.interval for line in lines if line.interval is not None]
    places = decimals([high - low for low, high in bounds])
    columns["difference"] = [_interval(line.interval, places) for line in lines]
    columns["time to\nsame quality"] = [_quality(line) for line in lines]
    columns["verdict"] = [line.verdict for line in lines]
    # A column that nobody could measure says nothing.
    return {title: cells for title, cells in columns.items() if any(cells)}


def show_comparison(lines: Sequence[Line], metric: str, notes: Sequence[str], console: Console) -> None:
    console.print(columns_table(comparison_columns(lines, metric), left=("row", "verdict")))
    for note in notes:
        print_text(console, Text(note, style="dim"))


def draw_comparison(lines: Sequence[Line], metric: str, path: Path) -> None:
    """The metric over steps: the mean over seeds as a line, the seeds' range as a band."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure((8.4, 4.8))
    axes = figure.subplots()
    for number, (line, colour) in enumerate(zip(lines, itertools.cycle(COLOURS), strict=False)):
        steps, means, lows, highs = band(line.curves)
        if steps:
            # Rows that are the same lie on each other: later ones are thinner, so that all of them are seen.
            width = 1.5 + 1.8 * (len(lines) - 1 - number)
            axes.plot(steps, means, color=colour, linewidth=width, marker="o", markersize=width + 1.5, label=line.title)
            axes.fill_between(steps, lows, highs, color=colour, alpha=0.12, linewidth=0)
            if len(steps) == 1:  # of which a band shows nothing
                axes.vlines(steps, lows, highs, color=colour, linewidth=width / 2, alpha=0.5)
                axes.set_xlim(steps[0] - 1, steps[0] + 1)
            for edge in (lows, highs):
                axes.plot(steps, edge, color=colour, linewidth=width / 2, alpha=0.5)
    axes.set_xlabel("step", color=FAINT)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_ylabel(metric, color=INK)
    axes.grid(color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title("mean over seeds, band: smallest to largest", color=FAINT, fontsize=9, loc="left")
    if axes.lines:
        axes.legend(frameon=False)
    save_figure(figure, path)


def band(curves: Sequence[Sequence[tuple[int, float]]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """At the steps that every seed has."""
    if not curves:
        return [], [], [], []
    found = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    values = [[one[step] for one in found] for step in steps]
    return steps, [statistics.mean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def decimals(spreads: Sequence[float]) -> int:
    """Places in which the smallest of them shows two digits: four at least, eight at most."""
    smallest = min((spread for spread in spreads if 0 < spread < math.inf), default=1.0)
    return min(max(4, 1 - math.floor(math.log10(smallest))), 8)


def _spread(values: Sequence[float], places: int) -> str:
    if not values or not all(map(math.isfinite, values)):
        return "no metric" if values else "no run"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{places}f} ± {deviation:.{places}f}"


def _interval(bounds: tuple[float, float] | None, places: int) -> str:
    return "" if bounds is None else f"{bounds[0]:+.{places}f} … {bounds[1]:+.{places}f}"


def _quality(line: Line) -> str:
    if line.to_quality_s is None:
        return "not reached" if line.not_reached else ""
    return f"{line.to_quality_s:.1f} s" + (f" ({line.not_reached} not)" if line.not_reached else "")
