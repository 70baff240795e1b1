"""Does low precision cost accuracy? What all `*_parity.py` share: `halfstep compare` with its result stored here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.use.compare import CompareRequest, Comparison, create_comparison, run_comparison
from halfstep_train.use.compare_run import ComparedRow
from halfstep_train.use.equivalence import FEWEST_SEEDS, RowVerdict, choose_margin, judge_rows
from recording import shown_settings, store

Settings = Mapping[str, object]

ALWAYS: Settings = {
    # One validation and one checkpoint, at the end.
    "train.validate_every": 10_000,
    "train.checkpoint_every": 100_000,
    "train.early_stopping_patience": 0,
}


def parity_flags(description: str | None, *, name: str, needs_data: bool = True) -> argparse.ArgumentParser:
    """What every comparison can be told; `--set` takes any setting of `halfstep train`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=needs_data)
    parser.add_argument("--precisions", default="fp32,bf16,fp16", help="the first one is the baseline")
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument("--margin", type=float, help="in the metric's unit; default: half a point, or 1 %% of a loss")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs beside each other")
    parser.add_argument("--simulate", action="store_true", help="numerics only, for a machine without the formats")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default=name)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    return parser


def compare(
    arguments: argparse.Namespace,
    workload: str,
    settings: Settings,
    folder: Path,
    *,
    also: tuple[str, ...] = (),
    best: bool = False,
) -> Comparison:
    """Train every precision with every seed and judge the headline metric; a killed call keeps what was whole.

    Metrics named in `also` are judged as well, with a margin by the same rule.
    """
    request = CompareRequest(
        target=workload,
        overrides=tuple(said({**ALWAYS, "precision.simulate": arguments.simulate, **settings}) + arguments.set),
        rows=tuple(
            ComparedRow(name=name, overrides=(f"precision={name}",)) for name in arguments.precisions.split(",")
        ),
        seeds=arguments.seeds,
        margin=arguments.margin,
        at_once=arguments.at_once,
        best=best,
    )
    where, comparison = create_comparison(request, folder / "comparison")

    def say(line: str) -> None:
        print(line, flush=True)
        if comparison.count_whole_seeds():
            keep(arguments, where, comparison, also)

    run_comparison(where, comparison, say)
    for name, verdict in comparison.judge().items():
        print(f"{name}: {verdict} ({verdict.low:+.4g} to {verdict.high:+.4g}, margin {verdict.margin:.4g})")
    return comparison


def said(settings: Settings) -> list[str]:
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def keep(arguments: argparse.Namespace, where: Path, comparison: Comparison, also: tuple[str, ...]) -> None:
    """What the runs so far say, with the last validation of each."""
    rows = [row.name for row in comparison.request.rows]
    runs = {name: [run_record(where, run) for run in comparison.select_outcomes(name)] for name in rows}
    count = comparison.count_whole_seeds()
    judged = {comparison.metric: {name: as_json(found, count) for name, found in comparison.judge().items()}}
    judged |= {metric: others(comparison, runs, metric) for metric in also}
    record = {
        "settings": shown_settings(arguments),
        "metric": comparison.metric,
        "margin_from": comparison.margin_from,
        "runs": runs,
        "verdicts": judged[comparison.metric],
        "also": {metric: found for metric, found in judged.items() if metric != comparison.metric},
    }
    store(arguments.name, record, torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.out)


def run_record(where: Path, run: Any) -> dict[str, Any]:
    last = last_validation(where / "runs" / f"{run.row}-{run.seed}")
    summary = {key: run.summary.get(key) for key in ("skipped", "elapsed_s")}
    return {"seed": run.seed, **last, "judged": run.value, **summary, "stopped": run.stopped}


def last_validation(folder: Path) -> dict[str, float]:
    validations = [record for record in read(folder / "metrics.jsonl") if record["kind"] == "val"]
    return {key: value for key, value in (validations or [{}])[-1].items() if isinstance(value, float)}


def others(comparison: Comparison, runs: dict[str, list[Any]], metric: str) -> dict[str, Any]:
    count = comparison.count_whole_seeds()
    values = {name: [run[metric] for run in found[:count]] for name, found in runs.items()}
    baseline = values.pop(comparison.request.baseline.name)
    margin = choose_margin(baseline, in_points=metric != "loss" and all(0 <= value <= 1 for value in baseline))
    return {name: as_json(found, count) for name, found in judge_rows(baseline, values, margin).items()}


def as_json(found: RowVerdict, num_seeds: int) -> dict[str, Any]:
    return {"verdict": str(found), "mean_difference": found.mean, "interval_90": [found.low, found.high],
            "margin": found.margin, "seeds": num_seeds, "why": found.why}  # fmt: skip
