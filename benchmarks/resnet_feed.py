"""Does the input pipeline keep the GPU busy? Guarded steps fed from a packed cache against data already on the device.

    python benchmarks/resnet_feed.py --data DIR [--device cuda] [--workers 8] [--batch 256] [--rounds 7] [--out DIR]

One model, one optimizer, one step, eager or not (`--set train.fast=graph`), and three ways to its images, which
take turns so that a drift of the clocks meets all alike:

    packed     the real Loader and prefetch from the cache file, crops and changes on the device
    resident   one batch of stored bytes that stays on the device, crops and changes on the device
    ready      one batch of finished images that stays on the device: the step alone

Goal: packed within 5 % of resident. A small folder is repeated to `--images`, so that an epoch does not end within a
window; every window of `packed` starts a new epoch with empty queues, and its warm-up steps are not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.hardware.probe import probe
from halfstep.own_loop.prefetch import prefetch
from halfstep_train.data.image_samples import TrainingImages
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.engine import Engine
from halfstep_train.tune.channels_last import match_layout
from halfstep_train.workloads import load
from parity import said
from recording import shown_settings, store, time_steps

Batch = dict[str, Tensor]
GOAL = 0.05


class Repeated:
    """A packed data set over and over, up to a number of samples."""

    def __init__(self, samples: TrainingImages, total: int) -> None:
        self.samples, self.total = samples, max(total, len(samples))

    def __len__(self) -> int:
        return self.total

    def sample(self, index: int, *, key: tuple[int, int, int]) -> Batch:
        return self.samples.sample(index % len(self.samples), key=key)

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> Batch:
        return self.samples.make_batch(indices % len(self.samples), seed=seed, epoch=epoch)


class Ways:
    """The same guarded step, by where its images come from: each method begins a window and gives its step."""

    def __init__(self, parts: Assembly) -> None:
        self.parts, self.numbers = parts, itertools.count()
        self.engine = Engine(parts, parts.mode or "eager", lambda text, level: print(text))
        self.stored = next(prefetch(parts.train_loader.iterate_epoch(0), parts.device))
        self.finished = self.prepared(self.stored)

    def packed(self) -> Callable[[], object]:
        feed = prefetch(self.parts.train_loader.iterate_epoch(next(self.numbers)), self.parts.device)
        return lambda: self.step(self.prepared(next(feed)))

    def resident(self) -> Callable[[], object]:
        return lambda: self.step(self.prepared(self.stored))

    def ready(self) -> Callable[[], object]:
        return lambda: self.step(self.finished)

    def prepared(self, batch: Batch) -> Batch:
        seen = self.parts.workload.prepare_batch(batch, key=(0, next(self.numbers), 0), training=True)
        return match_layout(self.parts.model, seen)

    def step(self, batch: Batch) -> object:
        return self.parts.guard.watch(self.engine.step([batch]))


def assembled(arguments: argparse.Namespace, scratch: Path) -> Assembly:
    settings: dict[str, object] = {
        "device": arguments.device,
        "precision": arguments.precision,
        "precision.strict": True,
        "data.dir": arguments.data,
        "data.cache_file": str(scratch / "pictures.pack"),
        "data.image_size": arguments.size,
        "data.num_workers": arguments.workers,
        "train.batch_size": arguments.batch,
        "train.epochs": 1000,
        "optimizer.lr": 1e-4,  # only time counts: nothing may diverge, or the guard would stop the run
    }
    config = load(arguments.workload, overrides=[*said(settings), *arguments.set]).config
    workload = build_workload(config)
    assert isinstance(workload.train_samples, TrainingImages)
    workload = dataclasses.replace(workload, train_samples=Repeated(workload.train_samples, arguments.images))
    return assemble(config, workload, decide_plan(config, workload, probe(config.device)))


def measured(ways: Ways, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds per step of every window."""
    begin = {"packed": ways.packed, "resident": ways.resident, "ready": ways.ready}
    times: dict[str, list[float]] = {name: [] for name in begin}
    for number in range(arguments.rounds + 1):
        for name, window in begin.items():
            found = time_steps(window(), warmup=arguments.warmup, steps=arguments.steps, windows=1)["ms"]
            if number > 0:  # the first round tunes kernels and fills the page cache
                times[name].append(found)
    return times


def summarised(times: dict[str, list[float]], batch: int) -> dict[str, Any]:
    rates = {name: [batch / ms * 1e3 for ms in found] for name, found in times.items()}
    losses = {
        name: [ours / theirs - 1 for ours, theirs in zip(times["packed"], times[name], strict=True)]
        for name in ("resident", "ready")
    }
    return {
        "images_per_s": {
            name: {"median": statistics.median(found), "slowest": min(found), "fastest": max(found)}
            for name, found in rates.items()
        },
        "packed_slower_than": {
            name: {"median": statistics.median(found), "least": min(found), "most": max(found)}
            for name, found in losses.items()
        },
        "goal": GOAL,
        "goal_met": statistics.median(losses["resident"]) <= GOAL,
        "windows_ms": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workload", default="resnet50")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=30, help="of a window")
    parser.add_argument("--warmup", type=int, default=10, help="steps before a window")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        parts = assembled(arguments, Path(scratch))
        ways = Ways(parts)
        results = summarised(measured(ways, arguments), arguments.batch) | {"mode": ways.engine.mode}
    for name, row in results["images_per_s"].items():
        print(f"{name:9} {row['median']:8.1f} images/s ({row['slowest']:.1f} to {row['fastest']:.1f})")
    for name, row in results["packed_slower_than"].items():
        print(f"packed against {name}: {row['median']:+.2%} time ({row['least']:+.2%} to {row['most']:+.2%})")
    store("resnet_feed", {"settings": shown_settings(arguments), **results}, parts.device, arguments.out)


if __name__ == "__main__":
    main()
