"""Does low precision cost a language model anything? Characters of Shakespeare in nanoGPT's setting, paired seeds.

    python benchmarks/shakespeare_parity.py --data DIR [--precisions fp32,bf16,fp16] [--seeds 5] [--at-once 15]

DIR holds input.txt (tiny Shakespeare: 1.1 M characters, 65 of them distinct). The setting is the preset `shakespeare`,
nanoGPT's "baby GPT": 6 blocks, 384 channels, context 256, batch 64, dropout 0.2, 5000 steps; its author reports a best
validation loss of 1.47. Validation every 250 steps, and the best loss counts, as there. Every (seed, precision) is a
process, several of them beside each other on one GPU, eager (`--set train.fast=graph` for another way). Where the time
does not do for all of them: `--first-seed 3 --seeds 2` goes on, and `--merge FILE` takes in what was stored before.
Of the losses the margin is 1 % of fp32's mean or twice its deviation, whichever is larger. On a CPU add --simulate and
small sizes: --set train.max_steps=20 --set model.depth=1.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from equivalence import equivalence
from halfstep.report.metrics_file import read
from halfstep.run.train import train
from halfstep.workloads import from_dict
from parity import parity_flags, spread
from recording import shown_settings, store

GOAL = 1.50
MARGIN = 0.01
EVERY = 250


def main() -> None:
    parser = parity_flags(__doc__, name="shakespeare_parity")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--merge", action="append", default=[], metavar="FILE", help="runs of an earlier call")
    arguments = parser.parse_args()
    precisions = arguments.precisions.split(",")
    runs: dict[str, dict[int, dict[str, Any]]] = merged(arguments.merge)
    for name in precisions:
        runs.setdefault(name, {})
    with tempfile.TemporaryDirectory() as scratch:
        cache = str(Path(scratch) / "shakespeare.tokens")
        prepared = job(arguments, precisions[0], 0, scratch, cache)
        from_dict("gpt2", prepared["settings"], overrides=arguments.set)  # a typo is told before minutes of others
        seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        jobs = [job(arguments, name, seed, scratch, cache) for seed in seeds for name in precisions]
        with ProcessPoolExecutor(arguments.at_once, mp_context=multiprocessing.get_context("spawn")) as processes:
            for done in as_completed([processes.submit(one_run, given) for given in jobs]):
                found = done.result()
                runs[found["precision"]][found["seed"]] = found
                print(json.dumps(found), flush=True)
                judge(arguments, runs)


def merged(files: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """fp32 first: it is what others are held against."""
    found: dict[str, dict[int, dict[str, Any]]] = {"fp32": {}} if files else {}
    for file in files:
        for name, runs in json.loads(Path(file).read_text())["runs"].items():
            found.setdefault(name, {}).update({run["seed"]: run for run in runs})
    return found


def job(arguments: Any, precision: str, seed: int, scratch: str, cache: str) -> dict[str, Any]:
    settings = {
        "preset": "shakespeare",
        "data.dir": arguments.data,
        # A cache of its own for each, since several would write one at the same time.
        "data.cache_file": f"{cache}-{precision}-{seed}",
        "data.num_workers": 1,
        "train.fast": "off",
        "precision": precision,
        "precision.strict": True,
        "precision.simulate": arguments.simulate and precision != "fp32",
        "train.seed": seed,
        "train.validate_every_steps": EVERY,
        "train.checkpoint_every": 100_000,
        "log.quiet": True,
    }
    return {"settings": settings, "overrides": arguments.set, "precision": precision, "seed": seed, "out": scratch}


def one_run(given: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    loaded = from_dict("gpt2", given["settings"], overrides=given["overrides"])
    folder = train(loaded, out=Path(given["out"]) / f"{given['precision']}-{given['seed']}")
    records = read(folder / "metrics.jsonl")
    losses = {record["step"]: record["loss"] for record in records if record["kind"] == "val"}
    best = min(losses, key=lambda step: losses[step])
    return {
        "precision": given["precision"],
        "seed": given["seed"],
        "loss": losses[best],
        "step": best,
        "last_loss": losses[max(losses)],
        "skipped": max((record.get("skipped", 0) for record in records), default=0),
        "seconds": time.perf_counter() - start,
    }


def judge(arguments: Any, runs: dict[str, dict[int, dict[str, Any]]]) -> None:
    """What the seeds that are whole say so far."""
    whole = sorted(set.intersection(*(set(found) for found in runs.values())))
    losses = {name: [found[seed]["loss"] for seed in whole] for name, found in runs.items()}
    baseline, *others = losses
    verdicts: dict[str, Any] = {}
    if whole:
        margin = max(MARGIN * statistics.mean(losses[baseline]), 2 * spread(losses[baseline]))
        verdicts = {name: equivalence(losses[baseline], losses[name], margin=margin) for name in others}
        for name, values in losses.items():
            reached = "reached" if max(values) <= GOAL else "missed"
            mean = f"{statistics.mean(values):.4f} +- {spread(values):.4f}"
            print(f"{name}: best validation loss {mean}, goal {GOAL} {reached}", verdicts.get(name, ""))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    listed = {name: [found[seed] for seed in sorted(found)] for name, found in runs.items()}
    kept = {"settings": shown_settings(arguments), "goal": GOAL, "runs": listed, "verdicts": verdicts}
    store(arguments.name, kept, device, arguments.out)


if __name__ == "__main__":
    main()
