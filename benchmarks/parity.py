"""Does low precision cost accuracy? Runs of several precisions with the same seeds by `halfstep train`, compared."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equivalence import equivalence
from halfstep.report.metrics_file import read
from halfstep.run.train import train
from halfstep.workloads import from_dict
from recording import shown_settings, store

Settings = Mapping[str, object]

ALWAYS: Settings = {
    "precision.strict": True,
    # One validation and one checkpoint, at the end.
    "train.validate_every": 10_000,
    "train.checkpoint_every": 100_000,
    "train.early_stopping_patience": 0,
    "log.quiet": True,
}


def parity_flags(description: str | None, *, name: str) -> argparse.ArgumentParser:
    """What every comparison can be told; `--set` takes any setting of `halfstep train`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--precisions", default="fp32,bf16,fp16", help="the first one is the baseline")
    parser.add_argument("--seeds", type=at_least_one, default=5)
    parser.add_argument(
        "--at-once", type=at_least_one, default=1, metavar="N", help="processes, each with a seed of its own"
    )
    parser.add_argument("--simulate", action="store_true", help="numerics only, for a machine without the formats")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", default=name)
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    return parser


def at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}, where a number from 1 on is wanted")
    return int(word)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is trained with each seed: one run in each precision."""

    workload: str
    settings: Settings
    precisions: tuple[str, ...]
    simulate: bool
    overrides: list[str]
    folder: Path
    metrics: tuple[str, ...]

    def runs_of(self, seed: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name in self.precisions:
            chosen = {"precision": name, "precision.simulate": self.simulate and name != "fp32", "train.seed": seed}
            loaded = from_dict(self.workload, {**ALWAYS, **self.settings, **chosen}, overrides=self.overrides)
            found[name] = one_run(loaded, self.folder / f"run{seed}", self.metrics)
            print(name, seed, json.dumps(found[name]), flush=True)
        return found


def compare(
    arguments: argparse.Namespace,
    workload: str,
    settings: Settings,
    folder: Path,
    *,
    metrics: tuple[str, ...],
    of_loss: bool = False,
) -> None:
    """Train every precision with every seed, judge the first metric, store all; a killed run keeps its whole seeds.

    The margin of a percentage is in points; `of_loss` takes max(1 % of the baseline's mean, twice its deviation).
    """
    comparison = Comparison(
        workload=workload,
        settings=settings,
        precisions=tuple(arguments.precisions.split(",")),
        simulate=arguments.simulate,
        overrides=arguments.set,
        folder=folder,
        metrics=metrics,
    )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in comparison.precisions}
    for found in seed_by_seed(comparison, arguments.seeds, arguments.at_once):
        for name, run in found.items():
            runs[name].append(run)
        judge(arguments, runs, headline=metrics[0], of_loss=of_loss)


def seed_by_seed(comparison: Comparison, num_seeds: int, at_once: int) -> Iterator[dict[str, dict[str, Any]]]:
    """In order. The first one runs alone: it packs the pictures for all."""
    yield comparison.runs_of(0)
    if at_once == 1:
        yield from map(comparison.runs_of, range(1, num_seeds))
        return
    # Not forked: a process that has used the GPU cannot hand it down.
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as processes:
        yield from processes.map(comparison.runs_of, range(1, num_seeds))


def judge(
    arguments: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], *, headline: str, of_loss: bool = False
) -> None:
    """Print and store what the runs so far say."""
    found = {name: [run[headline] for run in done] for name, done in runs.items()}
    baseline, *others = found
    margin = {"margin": max(0.01 * statistics.mean(found[baseline]), 2 * spread(found[baseline]))} if of_loss else {}
    verdicts = {name: equivalence(found[baseline], found[name], **margin) for name in others}
    for name, values in found.items():
        print(f"{name}: {headline} {statistics.mean(values):.4f} +- {spread(values):.4f}", verdicts.get(name, ""))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store(
        arguments.name,
        {"settings": shown_settings(arguments), "runs": runs, "verdicts": verdicts},
        device,
        arguments.out,
    )


def spread(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def one_run(loaded: Any, out: Path, metrics: tuple[str, ...]) -> dict[str, Any]:
    start = time.perf_counter()
    records = read(train(loaded, out=out) / "metrics.jsonl")
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    last = [record for record in records if record["kind"] == "val"][-1]
    steps = [record for record in records if record["kind"] == "train"]
    memory = max((record["memory_bytes"] for record in steps), default=None)
    return {
        **{name: last[name] for name in metrics},
        "loss": last["loss"],
        "skipped": max((record["skipped"] for record in steps), default=0),
        "seconds": seconds,
        "peak_memory_gb": memory / 1e9 if memory is not None else "no step was reported",
    }
