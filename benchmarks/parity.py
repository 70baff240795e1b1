"""Does low precision cost accuracy? `halfstep compare` with paired seeds; its result is stored here.

    python benchmarks/parity.py unet --data DIR --set train.max_steps=60
    python benchmarks/parity.py resnet --data DIR --seeds 25 --at-once 5 --set train.epochs=10 --set train.fast=off
    python benchmarks/parity.py diffusion --data DIR --set train.epochs=25
    python benchmarks/parity.py shakespeare --data DIR --at-once 15 --set train.max_steps=1500
    python benchmarks/parity.py slotcontrast --at-once 8

unet: DIR holds `image/` and `label/` (ISBI 2012: 30 slices of 512x512). The last six slices are held out, because
neighbouring slices of one volume are nearly the same picture. resnet and diffusion: DIR is an image folder (a part of
Imagenette: 1,000 and 250 pictures). With so few the accuracy itself means nothing; only the differences between
precisions do. shakespeare: DIR holds input.txt, for nanoGPT's "baby GPT", whose author reports a best validation loss
of 1.47; the best loss counts, as there, and the margin is 1 % of that loss's perplexity. slotcontrast: generated clips,
or videos in DIR; the loss is judged in addition to FG-ARI. `--set` takes any setting of `halfstep train`. On a CPU add
--simulate and small sizes. Results that were stored before these scripts were merged name the commit that has them.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep_train.report.metrics_file import read
from halfstep_train.use.compare import ComparedRow, CompareRequest, Comparison, create_comparison, run_comparison
from halfstep_train.use.equivalence import FEWEST_SEEDS, RowVerdict, choose_margin, judge_rows
from halfstep_train.workloads.slots.demo import write_demo
from recording import shown_settings, store

Settings = Mapping[str, object]

ALWAYS: Settings = {
    # One validation and one checkpoint, at the end.
    "train.validate_every": 10_000,
    "train.checkpoint_every": 100_000,
    "train.early_stopping_patience": 0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    workload: str
    settings: Settings
    cache_file: str = ""
    """Name of a cache that all runs share."""
    margin: float | None = None
    best: bool = False
    also: tuple[str, ...] = ()


CASES = {
    "unet": Case(
        workload="unet",
        settings={
            "data.image_size": 512, "data.num_workers": 0, "model.base_channels": 64, "train.batch_size": 8,
            "train.max_steps": 150, "train.epochs": 10_000,
        },
    ),
    "resnet": Case(
        workload="resnet50",
        settings={
            "preset": "quick", "data.image_size": 128, "data.num_workers": 4, "train.batch_size": 64,
            "train.epochs": 20,
        },
        cache_file="pictures.pack",
    ),
    "diffusion": Case(
        workload="diffusion",
        settings={
            "data.image_size": 32, "data.num_workers": 4, "model.channels": [64, 128, 128], "model.attention": [1],
            "optimizer.lr": 2e-4, "schedule.warmup_steps": 50, "ema.decay": 0.99, "train.batch_size": 50,
            "train.epochs": 40,
        },
    ),
    "shakespeare": Case(
        workload="gpt2",
        settings={
            "preset": "shakespeare", "data.num_workers": 1, "train.fast": "off", "train.validate_every_steps": 250,
        },
        cache_file="shakespeare.tokens",
        margin=0.01 * math.exp(1.47),
        best=True,
    ),
    "slotcontrast": Case(
        workload="slotcontrast",
        settings={
            "data.image_size": 224, "data.num_workers": 0, "model.backbone": "vit_small_patch14_dinov2",
            "model.backbone_weights": "random", "model.slots": 7, "schedule.warmup_steps": 50,
            "schedule.half_life_steps": 250, "train.fast": "off", "train.batch_size": 8, "train.val_batch_size": 4,
            "train.max_steps": 300, "train.validate_every_steps": 0, "train.epochs": 10_000,
        },
        also=("loss",),
    ),
}  # fmt: skip
NUM_HELD_OUT = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--data", help="needed by all cases but slotcontrast")
    parser.add_argument("--precisions", default="fp32,bf16,fp16", help="the first one is the baseline")
    parser.add_argument("--seeds", type=int, default=FEWEST_SEEDS)
    parser.add_argument("--margin", type=float, help="in the metric's unit; default: half a point, or 1 %% of a loss")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs in parallel")
    parser.add_argument("--simulate", action="store_true", help="numerics only, for a machine without the formats")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    case, arguments.name = CASES[arguments.case], f"{arguments.case}_parity"
    if arguments.data is None and arguments.case != "slotcontrast":
        parser.error(f"{arguments.case} needs --data DIR")
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.data is None:
            arguments.data = str(Path(scratch) / "clips")
            write_demo(Path(arguments.data), side=128)
        arguments.margin = arguments.margin if arguments.margin is not None else case.margin
        settings = {**case.settings, "data.dir": arguments.data}
        if case.cache_file:
            settings["data.cache_file"] = str(Path(scratch) / case.cache_file)
        if arguments.case == "unet":
            settings["data.val_list"] = str(write_validation_list(Path(arguments.data), Path(scratch)))
        compare(arguments, case.workload, settings, Path(scratch), also=case.also, best=case.best)


def write_validation_list(data: Path, folder: Path) -> Path:
    images = (path.name for path in (data / "image").iterdir())
    names = sorted(images, key=lambda name: int("".join(filter(str.isdigit, name))))
    path = folder / "held_out.txt"
    path.write_text("\n".join(names[-NUM_HELD_OUT:]) + "\n")
    return path


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


if __name__ == "__main__":
    main()
