"""A comparison's numbers, row by row, for the table, the picture and `--json`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from halfstep.config.precision_names import precision_name
from halfstep.errors import counted
from halfstep.report.comparison_view import Line
from halfstep.report.page.read_run import SAMPLES, per_second, rate_of
from halfstep.run.memory.sizing import predict_largest_batch
from halfstep.use.compare import Comparison, config_of, differing_keys, seconds_to_quality, why_wide
from halfstep.use.compare_run import OUT_OF_MEMORY, Outcome
from halfstep.use.equivalence import Verdict


def lines_of(comparison: Comparison) -> list[Line]:
    found = comparison.verdicts()
    return [_line(comparison, row.name, found.get(row.name)) for row in comparison.request.rows]


def _line(comparison: Comparison, row: str, verdict: Verdict | None) -> Line:
    runs, paired = comparison.outcomes(row), comparison.paired(row)
    # Beside others, or in a format that is only simulated, a run says nothing about time or memory.
    alone = [run for run in runs if run.alone and run.summary and not run.summary["simulated"]]
    seconds, per_sample = _median(alone, "elapsed_s"), _median(alone, "trained_s", per="samples")
    price = comparison.request.price
    is_simulated = any(run.summary.get("simulated") for run in runs)
    times = [] if is_simulated else seconds_to_quality(comparison, [run for run in runs if run.alone])
    # The median over all seeds: where half of them never get there, neither does the median.
    to_quality_s = statistics.median(math.inf if time is None else time for time in times) if times else math.inf
    does_not_fit = any(run.end == OUT_OF_MEMORY for run in runs)
    return Line(
        name=row,
        ran=_ran(comparison, row),
        seconds_per_epoch=_median(alone, "trained_s", per="epochs"),
        samples_per_s=1 / per_sample if per_sample else None,
        rate=_rate(alone[0].summary, 1 / per_sample) if per_sample else None,
        memory_bytes=_median(alone, "peak_memory_bytes"),
        largest_batch=_largest_batch(comparison, alone),
        joules=_median(alone, "joules"),
        money=None if price is None or seconds is None else price * seconds / 3600,
        values=[run.value for run in paired],
        verdict=OUT_OF_MEMORY if does_not_fit else _word(verdict, is_wide=bool(why_wide(comparison))),
        interval=None if verdict is None or math.isnan(verdict.mean) else (verdict.low, verdict.high),
        to_quality_s=to_quality_s if math.isfinite(to_quality_s) else None,
        not_reached=times.count(None),
        curves=[[(step, value) for step, _, value in run.curve] for run in paired],
    )


def _ran(comparison: Comparison, row: str) -> str:
    """What ran, where it is not what the row asks for natively: `simulated`, `ran bf16`."""
    asked = precision_name(comparison.settings.get(row, {}).get("precision.default", "auto"))
    summaries = [run.summary for run in comparison.outcomes(row) if run.summary]
    if any(summary.get("simulated") for summary in summaries):
        return "simulated"
    others = {summary["precision"] for summary in summaries if "precision" in summary} - {asked}
    return f"ran {', '.join(sorted(others))}" if others and asked != "auto" else ""


def _rate(summary: Mapping[str, Any], samples_per_s: float) -> tuple[str, float]:
    """In the unit of the workload; runs of versions that did not store it have samples."""
    key = rate_of(summary)
    return per_second(key), samples_per_s * (1 if key == SAMPLES else summary[key] / summary[SAMPLES])


def _largest_batch(comparison: Comparison, alone: Sequence[Outcome]) -> int | None:
    """What the memory plan says fits the GPU that the row ran on."""
    memory = alone[0].summary.get("device_memory_bytes") if alone else None
    if memory is None or not str(alone[0].summary["device"]).startswith("cuda"):
        return None
    request, run = comparison.request, alone[0]
    row = next(row for row in request.rows if row.name == run.row)
    config = config_of(request, row, run.seed)
    return predict_largest_batch(config, run.summary["precision"], run.summary["steps_run"], memory)


def _word(verdict: Verdict | None, *, is_wide: bool) -> str:
    if verdict is None:
        return "baseline"
    return f"{verdict}, wide margin" if verdict.word == "same" and is_wide else str(verdict)


def _median(runs: Sequence[Outcome], key: str, *, per: str = "") -> float | None:
    values = [run.summary[key] / (run.summary[per] if per else 1) for run in runs if run.summary.get(key) is not None]
    return statistics.median(values) if values else None


def notes_of(comparison: Comparison) -> list[str]:
    """What a reader must know to believe the table."""
    request, margin = comparison.request, comparison.margin
    better = "" if comparison.mode == "max" else " (lower is better)"
    notes = [f"margin {margin:.4g} in {comparison.metric}{better}: {comparison.margin_from}"]
    if wide := why_wide(comparison):
        notes.append(wide)
    looks = ", ".join(map(str, request.looks))
    rule = "Holm's rule" if len(request.rows) > 2 else "two one-sided tests"
    notes.append(f"{counted(comparison.whole_seeds(), 'paired seed')} (looks at {looks}), {rule}, 5 % in all")
    for row in request.rows[1:]:
        differing = ", ".join(differing_keys(comparison, row)) or "no setting"
        notes.append(f"{row.name} differs from {request.baseline.name} in {differing}")
    for name, verdict in comparison.verdicts().items():
        if verdict.why:
            more = f"; about {counted(verdict.seeds_needed, 'seed')} would decide" if verdict.seeds_needed else ""
            notes.append(f"{name}: not shown, {verdict.why}{more}")
    notes += _failures(comparison)
    notes += _other_differences(comparison)
    if any(not run.alone for run in comparison.runs):
        notes.append("runs in parallel with others, or resumed: their time, memory and energy are left out")
    notes += [f"{row} is simulated: {missing}" for row, missing in comparison.simulated.items()]
    if any(run.summary.get("simulated") for run in comparison.runs):
        notes.append("simulated formats show numerics, never speed: their time and memory are left out")
    on_gpu = [run.summary for run in comparison.runs if str(run.summary.get("device")).startswith("cuda")]
    if any(summary.get("joules") is None for summary in on_gpu):
        notes.append("no energy: NVML, which counts it, is not there or does not know this GPU")
    unfinished = f"unfinished after {counted(len(comparison.runs), 'run')}; halfstep compare --resume goes on"
    return [*notes, f"ended: {comparison.ended}" if comparison.ended else unfinished]


def _failures(comparison: Comparison) -> list[str]:
    """A line for each row and reason, with its seeds."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for run in comparison.runs:
        if not math.isfinite(run.value):
            why = run.stopped or f"{comparison.metric} is {run.value}"
            seeds.setdefault((run.row, why), []).append(str(run.seed))
    return [f"{row}, seed{'s' * (len(own) > 1)} {', '.join(own)}: {why}" for (row, why), own in seeds.items()]


def _other_differences(comparison: Comparison) -> list[str]:
    """Where runs differ in more than their rows say: a format that was not granted, another machine, other data."""
    notes = []
    for row, settings in comparison.settings.items():
        if (ran := _ran(comparison, row)).startswith("ran "):
            notes.append(f"{row} asked for {settings['precision.default']} and {ran}")
    for key, what in {"device": "devices", "versions": "versions", "data": "data files"}.items():
        seen = dict.fromkeys(str(run.summary[key]) for run in comparison.runs if run.summary.get(key))
        if len(seen) > 1:
            notes.append(f"runs differ in more than the rows say: {what} {' and '.join(seen)}")
    return notes


def as_json(comparison: Comparison) -> dict[str, Any]:
    verdicts = comparison.verdicts()
    return {
        "metric": comparison.metric,
        "margin": comparison.margin,
        "margin_from": comparison.margin_from,
        "seeds": comparison.whole_seeds(),
        "ended": comparison.ended,
        "rows": [
            {
                "row": line.name,
                "ran": line.ran,
                "values": [value if math.isfinite(value) else None for value in line.values],
                "verdict": line.verdict,
                "difference": None if line.interval is None else list(line.interval),
                "seeds_needed": verdicts[line.name].seeds_needed if line.name in verdicts else None,
                "seconds_per_epoch": line.seconds_per_epoch,
                "samples_per_s": line.samples_per_s,
                "memory_bytes": line.memory_bytes,
                "largest_batch": line.largest_batch,
                "joules": line.joules,
                "money": line.money,
                "seconds_to_same_quality": line.to_quality_s,
                "seeds_that_never_reached_it": line.not_reached,
            }
            for line in lines_of(comparison)
        ],
        "notes": notes_of(comparison),
    }
