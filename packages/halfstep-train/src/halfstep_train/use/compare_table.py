"""Show the result of a comparison: as a table and as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_bytes, format_count
from halfstep.precision.names import normalise_precision
from halfstep_train.report.console import make_columns_table, print_text, split_columns
from halfstep_train.report.page.read_run import SAMPLES, find_rate_key, format_rate_unit
from halfstep_train.use.compare import (
    OUT_OF_MEMORY,
    Comparison,
    RunOutcome,
    find_differences,
)
from halfstep_train.use.equivalence import RowVerdict


def build_lines(comparison: Comparison) -> list[TableLine]:
    """Build all rows of the table, the baseline first."""
    found = comparison.judge()
    return [_build_line(comparison, row.name, found.get(row.name)) for row in comparison.request.rows]


def _build_line(comparison: Comparison, row: str, verdict: RowVerdict | None) -> TableLine:
    """Build one row of the table from the row's runs and verdict."""
    runs, paired = comparison.select_outcomes(row), comparison.select_paired(row)
    # The times and memory of runs in parallel or in a simulated format mean nothing.
    alone = [run for run in runs if run.alone and run.summary and not run.summary["simulated"]]
    seconds, per_sample = _compute_median(alone, "elapsed_s"), _compute_median(alone, "trained_s", per="samples")
    price = comparison.request.price
    key = find_rate_key(alone[0].summary) if alone else SAMPLES
    units_per_sample = 1.0 if key == SAMPLES else alone[0].summary[key] / alone[0].summary[SAMPLES]
    judged = "baseline" if verdict is None else str(verdict)
    judged += ", wide margin" if verdict is not None and verdict.word == "same" and comparison.is_wide else ""
    return TableLine(
        row=row,
        ran=_describe_ran(comparison, row),
        values=[run.value for run in paired],
        verdict=OUT_OF_MEMORY if any(run.end == OUT_OF_MEMORY for run in runs) else judged,
        difference=None if verdict is None or math.isnan(verdict.mean) else (verdict.low, verdict.high),
        seeds_needed=verdict.seeds_needed if verdict else None,
        seconds_per_epoch=_compute_median(alone, "trained_s", per="epochs"),
        samples_per_s=1 / per_sample if per_sample else None,
        memory_bytes=_compute_median(alone, "peak_memory_bytes"),
        joules=_compute_median(alone, "joules"),
        money=None if price is None or seconds is None else price * seconds / 3600,
        rate=(format_rate_unit(key), units_per_sample / per_sample) if per_sample else None,
        curves=[[(step, value) for step, _, value in run.curve] for run in paired],
    )


def _describe_ran(comparison: Comparison, row: str) -> str:
    """Describe what ran if it is not what the row asks for natively: `simulated`, `ran bf16`."""
    asked = normalise_precision(comparison.settings.get(row, {}).get("precision.default", "auto"))
    summaries = [run.summary for run in comparison.select_outcomes(row) if run.summary]
    if any(summary.get("simulated") for summary in summaries):
        return "simulated"
    others = {summary["precision"] for summary in summaries if "precision" in summary} - {asked}
    return f"ran {', '.join(sorted(others))}" if others and asked != "auto" else ""


def _compute_median(runs: Sequence[RunOutcome], key: str, *, per: str = "") -> float | None:
    values = [run.summary[key] / (run.summary[per] if per else 1) for run in runs if run.summary.get(key) is not None]
    return statistics.median(values) if values else None


def collect_notes(comparison: Comparison) -> list[str]:
    """Return the notes below the table: margin, test, failures, differences between runs."""
    request, margin = comparison.request, comparison.margin
    better = "" if comparison.mode == "max" else " (lower is better)"
    notes = [f"margin {margin:.4g} in {comparison.metric}{better}: {comparison.margin_from}"]
    if comparison.is_wide:
        notes.append('this margin is wide, so "same" means little; with more data or steps, seeds differ less')
    rule = "Holm's rule" if len(request.rows) > 2 else "two one-sided tests"
    notes.append(f"{format_count(comparison.count_whole_seeds(), 'paired seed')}, {rule}, 5 % in all")
    for row in request.rows[1:]:
        of_row, of_baseline = (comparison.settings[name] for name in (row.name, request.baseline.name))
        differing = ", ".join(find_differences(of_row, of_baseline)) or "no setting"
        notes.append(f"{row.name} differs from {request.baseline.name} in {differing}")
    for name, verdict in comparison.judge().items():
        if verdict.why:
            more = f"; about {format_count(verdict.seeds_needed, 'seed')} would decide" if verdict.seeds_needed else ""
            notes.append(f"{name}: not shown, {verdict.why}{more}")
    notes += _list_failures(comparison)
    notes += _list_other_differences(comparison)
    if any(not run.alone for run in comparison.runs):
        notes.append("time, memory and energy of runs in parallel or resumed runs are left out")
    notes += [f"{row} is simulated: {missing}" for row, missing in comparison.simulated.items()]
    if any(run.summary.get("simulated") for run in comparison.runs):
        notes.append("time and memory of simulated formats are left out: a simulation shows numerics, not speed")
    unfinished = (
        f"unfinished after {format_count(len(comparison.runs), 'run')}; continue it with halfstep compare --resume"
    )
    return [*notes, f"ended: {comparison.ended}" if comparison.ended else unfinished]


def _list_failures(comparison: Comparison) -> list[str]:
    """List failed runs, one line per row and reason, with the seeds."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for run in comparison.runs:
        if not math.isfinite(run.value):
            why = run.stopped or f"{comparison.metric} is {run.value}"
            seeds.setdefault((run.row, why), []).append(str(run.seed))
    return [f"{row}, seed{'s' * (len(own) > 1)} {', '.join(own)}: {why}" for (row, why), own in seeds.items()]


def _list_other_differences(comparison: Comparison) -> list[str]:
    """List differences between runs beyond their settings: format not granted, other machine, other data."""
    notes = []
    for row, settings in comparison.settings.items():
        if (ran := _describe_ran(comparison, row)).startswith("ran "):
            notes.append(f"{row} asked for {settings['precision.default']} and {ran}")
    for key, what in {"device": "devices", "versions": "versions", "data": "data files"}.items():
        seen = dict.fromkeys(str(run.summary[key]) for run in comparison.runs if run.summary.get(key))
        if len(seen) > 1:
            notes.append(f"runs differ in more than their settings: {what} {' and '.join(seen)}")
    return notes


def convert_comparison(comparison: Comparison) -> dict[str, Any]:
    """Convert the result to plain JSON types."""
    return {
        "metric": comparison.metric,
        "margin": comparison.margin,
        "margin_from": comparison.margin_from,
        "seeds": comparison.count_whole_seeds(),
        "ended": comparison.ended,
        "rows": [line.to_json() for line in build_lines(comparison)],
        "notes": collect_notes(comparison),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLine:
    """One row of the table; None for values that were not measured by a run alone on the device."""

    row: str
    ran: str
    """`simulated` or `ran bf16`, if the row did not run natively what it asks for."""
    values: Sequence[float]
    verdict: str
    difference: tuple[float, float] | None
    seeds_needed: int | None
    seconds_per_epoch: float | None
    samples_per_s: float | None
    memory_bytes: float | None
    joules: float | None
    money: float | None
    rate: tuple[str, float] | None
    """Throughput in the unit of the workload: `("tokens/s", 1234.5)`."""
    curves: Sequence[Sequence[tuple[int, float]]]
    """(step, metric) of each seed."""

    @property
    def title(self) -> str:
        return f"{self.row} ({self.ran})" if self.ran else self.row

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in asdict(self).items() if name not in ("rate", "curves")}
        return record | {"values": [value if math.isfinite(value) else None for value in self.values]}


def build_columns(lines: Sequence[TableLine], metric: str) -> dict[str, list[str]]:
    """Return the table's cells by column title, for the terminal and the HTML page."""
    columns: dict[str, list[str]] = {"row": [line.title for line in lines]}
    rate = next((line.rate[0] for line in lines if line.rate), "samples/s")
    columns |= {
        "s/epoch": [_format_number(line.seconds_per_epoch) for line in lines],
        rate: [_format_number(line.rate and line.rate[1]) for line in lines],
        "memory": [format_bytes(line.memory_bytes, digits=3) if line.memory_bytes else "" for line in lines],
        "J/run": [_format_number(line.joules) for line in lines],
        "money/run": [_format_number(line.money) for line in lines],
    }
    columns[metric] = [_format_spread(line.values) for line in lines]
    bounds = [line.difference for line in lines]
    columns["difference"] = ["" if one is None else f"{one[0]:+.2g} … {one[1]:+.2g}" for one in bounds]
    columns["verdict"] = [line.verdict for line in lines]
    # Drop columns without any measurement.
    return {title: cells for title, cells in columns.items() if any(cells)}


def show_comparison(comparison: Comparison, console: Console) -> None:
    columns = build_columns(build_lines(comparison), comparison.metric)
    for table in split_columns(columns, console.width, names=("row",)):
        console.print(make_columns_table(table, left=("row", "verdict")))
    for note in collect_notes(comparison):
        print_text(console, Text(note, style="dim"))


def compute_band(
    curves: Sequence[Sequence[tuple[int, float]]],
) -> tuple[list[int], list[float], list[float], list[float]]:
    """Return steps, means, minima and maxima at the steps that every seed has."""
    if not curves:
        return [], [], [], []
    found = [dict(curve) for curve in curves]
    steps = sorted(set.intersection(*(set(one) for one in found)))
    values = [[one[step] for one in found] for step in steps]
    return steps, [statistics.mean(v) for v in values], [min(v) for v in values], [max(v) for v in values]


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _format_spread(values: Sequence[float]) -> str:
    if not values or not all(map(math.isfinite, values)):
        return "no metric" if values else "no run"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):#.4g} ± {deviation:.2g}"
