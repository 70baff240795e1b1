"""What evidence costs a run: the ring of windows with its recorder, and the NVML thread, on a captured U-Net step.

    python benchmarks/evidence_cost.py [--out DIR] [--rounds 12] [--steps 40] [--small]

U-Net 31M, 512x512, batch 8, bf16, one CUDA graph; each batch comes from pinned host memory as a run's prefetcher brings
it. Recording: windows kept in the ring of K + 1, and every step's facts shown to the recorder, against neither.
Monitor: the thread that asks NVML once a second, against none. Rounds with and without take turns in one process, and
each pair gives one ratio: clocks and temperature drift together. Stored are all of them, their median and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from halfstep.evidence.recorder import Recorder
from halfstep.hardware.monitor import Monitor
from halfstep.own_loop.prefetch import prefetch
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.capsules import make_capsule_context
from halfstep_train.run.folder import RunFolder, RunSource
from halfstep_train.run.step_ledger import AnyEngine
from halfstep_train.use.observe_step import assemble_step
from recording import finish_device_work, store

GOALS = {"recording": 0.01, "monitor": 0.005}
WARM_UP = 12
SMALL = ["data.image_size=32", "model.base_channels=4", "model.depth=2", "train.batch_size=2", "train.fast=off"]
FULL = ["data.image_size=512", "train.batch_size=8", "train.fast=graph", "data.num_workers=0"]


class Steps:
    """Steps of a run without its loop's reports: feed, engine, guard."""

    def __init__(self, parts: Assembly, engine: AnyEngine) -> None:
        self.parts, self.engine = parts, engine
        batches = parts.train_loader.iterate_epoch(0)
        self.host = [batch for batch, _ in zip(batches, range(4), strict=False)]
        self.recorder: Recorder | None = None

    def run(self, num: int) -> float:
        """Seconds a step."""
        feed = prefetch((self.host[k % len(self.host)] for k in range(num)), self.parts.device)
        finish_device_work()
        start = time.perf_counter()
        for batch in feed:
            with self.recorder.watch([batch]) if self.recorder is not None else nullcontext():
                facts = self.engine([batch])
            self.parts.guard.watch(facts)
        finish_device_work()
        return (time.perf_counter() - start) / num


@contextmanager
def recording(steps: Steps, folder: Path) -> Iterator[None]:
    parts = steps.parts
    context = make_capsule_context(parts, RunFolder(folder), RunSource(config="", code={}, base_lr=0.0))
    steps.recorder = recorder = Recorder(folder, parts.model, parts.step, context, notice=print)
    parts.guard.observers.append(recorder.observe)
    try:
        yield
    finally:
        parts.guard.observers.remove(recorder.observe)
        steps.recorder = None


@contextmanager
def monitored(steps: Steps, folder: Path) -> Iterator[None]:
    monitor = Monitor(steps.parts.device, folder / "monitor.jsonl")
    monitor.start()
    try:
        yield
    finally:
        monitor.stop()


def cost(steps: Steps, within: Callable[[Steps, Path], Any], rounds: int, num: int) -> dict[str, Any]:
    """Time with over time without, less 1; who goes first changes from round to round."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            times = {}
            for is_on in (number % 2 == 0, number % 2 == 1):
                if is_on:
                    with within(steps, Path(folder)):
                        times[True] = steps.run(num)
                else:
                    times[False] = steps.run(num)
            pairs.append((times[True], times[False]))
    costs = [on / off - 1 for on, off in pairs]
    low, middle, high = statistics.quantiles(costs, n=4)
    return {
        "cost": middle,
        "quartiles": [low, high],
        "ms_with": statistics.median(on for on, _ in pairs) * 1e3,
        "ms_without": statistics.median(off for _, off in pairs) * 1e3,
        "pairs_ms": [[on * 1e3, off * 1e3] for on, off in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--small", action="store_true", help="for trying the script on a CPU")
    arguments = parser.parse_args()
    words = SMALL if arguments.small else FULL
    with assemble_step("unet", flags={"precision": None if arguments.small else "bf16"}, overrides=words) as (
        _,
        parts,
        engine,
        _,
    ):
        steps = Steps(parts, engine)
        steps.run(WARM_UP)
        found = {
            name: {"goal": GOALS[name], **cost(steps, within, arguments.rounds, arguments.steps)}
            for name, within in (("recording", recording), ("monitor", monitored))
        }
        is_captured, device = bool(engine.graphs), parts.device
    for name, row in found.items():
        print(f"{name}: {row['cost']:+.3%} of {row['ms_without']:.2f} ms, goal {row['goal']:.1%}")
    settings = {"workload": "unet", "words": words, "rounds": arguments.rounds, "steps": arguments.steps}
    store("evidence_cost", {**settings, "is_captured": is_captured, **found}, device, arguments.out)


if __name__ == "__main__":
    main()
