"""What a watch costs captured steps: U-Net 31M and GPT-2, weights and gradients alone, and with activations.

    python benchmarks/watch_cost.py [--out DIR] [--only unet,gpt2] [--rounds 8] [--small]

Rounds of `EVERY` steps with one observation and rounds without take turns in one process, so that clocks and
temperature drift together; the difference is the time of one observation, from which the cost at watch=200 and
watch=50 follows. One long round at watch=50 checks that directly. Peak memory is what torch has reserved after the
rounds with and without, captured graphs included. GPT-2 is the 124M model, with random tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfstep.evidence.watch import Watch
from halfstep.own_loop.prefetch import prefetch
from halfstep.step.batches import count_samples
from halfstep.step.step import GuardedStep
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.step_ledger import AnyEngine, drop_outputs
from halfstep_train.use.observe_step import assemble_step, prepare_window
from recording import finish_device_work, store

GOALS = {"weights and gradients, watch=200": 0.005, "watch=200": 0.03, "watch=50": 0.08}
EVERY = 20
WARM_UP = 14
CASES: dict[str, list[str]] = {
    "unet": ["data.image_size=512", "train.batch_size=8", "train.fast=graph", "data.num_workers=0"],
    "gpt2": ["model.depth=12", "model.heads=12", "model.dim=768", "model.context=1024",
             "train.batch_size=16", "train.fast=graph", "data.num_workers=0"],
}  # fmt: skip
SMALL: dict[str, list[str]] = {
    "unet": ["data.image_size=32", "model.base_channels=4", "model.depth=2", "train.batch_size=2", "train.fast=off"],
    "gpt2": [
        "model.depth=1",
        "model.heads=2",
        "model.dim=16",
        "model.context=32",
        "train.fast=off",
        "train.batch_size=2",
    ],
}


class Steps:
    """Steps of a run with and without a watch: feed, engine, guard."""

    def __init__(self, parts: Assembly, engine: AnyEngine) -> None:
        assert isinstance(parts.step, GuardedStep)
        self.parts, self.engine, self.step = parts, engine, parts.step
        batches = parts.train_loader.iterate_epoch(0)
        self.host = [batch for batch, _ in zip(batches, range(4), strict=False)]
        # Made before the first capture, so that graphs keep the gradients they write.
        self.watch = Watch(self.step, EVERY, notice=print)

    def run(self, num: int, *, every: int, has_activations: bool = True) -> float:
        """Return the seconds of a step with an observation every so many steps; 0: none."""
        self.step.watch = self.watch if every else None
        self.watch.why_no_activations = "" if has_activations else "not measured"
        first = self.step.attempted
        feed = prefetch((self.host[k % len(self.host)] for k in range(num)), self.parts.device)
        finish_device_work()
        start = time.perf_counter()
        for batch in feed:
            # The step in the middle of each interval is observed, so that its two steps until the reading are inside.
            is_due = every and (self.step.attempted - first) % every == every // 2
            self.watch.every = 1 if is_due else 2**40
            facts = self.engine([batch])
            if every:
                if self.watch.lacks_activations:
                    prepared = prepare_window(self.parts, [batch])[0]
                    self.watch.look_aside(
                        drop_outputs(self.engine.parts.eager), prepared, num_rows=count_samples(prepared)
                    )
                self.watch.finish(facts)
            self.parts.guard.watch(facts)
        finish_device_work()
        return (time.perf_counter() - start) / num


def measure(steps: Steps, rounds: int, *, has_activations: bool) -> dict[str, Any]:
    """Return the time of a step and of one observation, in ms."""
    steps.run(EVERY, every=EVERY, has_activations=has_activations)  # first observations allocate
    pairs = []
    for number in range(rounds):
        times = {}
        for is_on in (number % 2 == 0, number % 2 == 1):
            times[is_on] = steps.run(EVERY, every=EVERY if is_on else 0, has_activations=has_activations)
        pairs.append((times[True], times[False]))
    step_s = statistics.median(off for _, off in pairs)
    observation_s = statistics.median((on - off) * EVERY for on, off in pairs)
    return {
        "step_ms": step_s * 1e3,
        "observation_ms": observation_s * 1e3,
        "pairs_ms": [[on * 1e3, off * 1e3] for on, off in pairs],
        **{f"cost at {every}": observation_s / (every * step_s) for every in (200, 50)},
    }


def get_reserved(device: torch.device) -> int:
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def write_random_tokens(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for split, num in (("train", 200_000), ("val", 2_000)):
        draw.integers(0, 50_257, num, dtype=np.uint16).tofile(folder / f"{split}.bin")


def run_case(name: str, words: list[str], rounds: int, *, is_small: bool, tokens: Path) -> dict[str, Any]:
    flags: dict[str, object] = {"precision": None if is_small else "bf16"}
    if name == "gpt2":
        flags["data_dir"] = str(tokens)
    with assemble_step(name, flags=flags, overrides=words) as (_, parts, engine, _):
        steps = Steps(parts, engine)
        steps.run(WARM_UP, every=0)
        found: dict[str, Any] = {"words": words, "is_captured": bool(engine.graphs)}
        found["reserved_bytes"] = {"off": get_reserved(parts.device)}
        found["weights and gradients"] = measure(steps, rounds, has_activations=False)
        found["reserved_bytes"]["weights and gradients"] = get_reserved(parts.device)
        found["all"] = measure(steps, rounds, has_activations=True)
        found["reserved_bytes"]["all"] = get_reserved(parts.device)
        long = [(steps.run(100, every=50), steps.run(100, every=0)) for _ in range(2)]
        found["direct cost at 50"] = statistics.median(on / off - 1 for on, off in long)
        found["num_rows"] = len(steps.watch.rows)
        device = parts.device
    found["costs"] = {
        "weights and gradients, watch=200": found["weights and gradients"]["cost at 200"],
        "watch=200": found["all"]["cost at 200"],
        "watch=50": found["all"]["cost at 50"],
    }
    del steps, parts, engine
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default="unet,gpt2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="for trying the script on a CPU")
    arguments = parser.parse_args()
    cases = SMALL if arguments.small else CASES
    with tempfile.TemporaryDirectory() as folder:
        write_random_tokens(Path(folder))
        found = {
            name: run_case(name, cases[name], arguments.rounds, is_small=arguments.small, tokens=Path(folder))
            for name in arguments.only.split(",")
        }
    for name, row in found.items():
        for what, cost in row["costs"].items():
            print(f"{name}, {what}: {cost:+.2%}, goal {GOALS[what]:.1%}")
        gib = {what: f"{size / 2**30:.2f} GiB" for what, size in row["reserved_bytes"].items()}
        print(f"{name}: {row['all']['step_ms']:.2f} ms a step, direct at 50: {row['direct cost at 50']:+.2%}, {gib}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    store("watch_cost", {"goals": GOALS, "every": EVERY, "cases": found}, device, arguments.out)


if __name__ == "__main__":
    main()
