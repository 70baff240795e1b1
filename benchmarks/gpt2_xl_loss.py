"""GPT-2 XL in bf16-true with split master and 8-bit moments: is its loss within strict fp32's seed spread?

    python benchmarks/gpt2_xl_loss.py --data DIR [--seeds 3] [--go-on] [--at-once 2] [--seconds 240] [--out DIR]

DIR holds input.txt (tiny Shakespeare). Its bytes are the tokens, and the vocabulary stays GPT-2's 50257, so that the
model is the whole XL: 1,557,611,200 parameters and 47 rows of padding. A run makes 200 steps of 1×1024 tokens, a
quarter of the batch in gpt2_speed.py: strict fp32 takes a second for one of those on an H200.

Both rows start from the same random weights for each seed, and all runs see the same windows in the same order: the
spread between fp32's seeds is that of their first weights alone. What counts is the training loss over the last 20
steps and the loss on 32 held-out windows; the row passes a measure where its largest distance from fp32 with the same
seed is no larger than the distance between fp32's best and worst seed. Below three seeds there is no verdict.

Each run is a process of its own. All build their model at once, and --at-once of them train beside each other. After
--seconds those still at work are ended; what had finished is stored, and --go-on makes the others. Steps are eager
(`--set train.fast=graph` for another mode). `--small` is for trying the script on a CPU, in simulated formats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2_speed import SMALL, SPLIT
from halfstep.errors import TrainingStopped
from halfstep.hardware.probe import probe
from halfstep.own_loop.prefetch import prefetch
from halfstep.step.guard import Action
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, assemble, build_workload, decide_plan
from halfstep_train.run.engine import make_engine
from halfstep_train.run.rehearsal import RunRehearsal
from halfstep_train.run.validate import validate
from halfstep_train.tune.choose import tune_plan
from halfstep_train.workloads import load
from parity import said
from recording import RESULTS, shown_settings, store

STEPS, LAST = 200, 20
CONTEXT, HELD_OUT = 1024, 32
ROWS: dict[str, tuple[str, ...]] = {"fp32": ("precision=fp32",), "split": ("precision=bf16-true", *SPLIT)}
MEASURES = ("last_loss", "held_out_loss")
FEWEST_SEEDS = 3
DATA_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    row: str
    seed: int
    """Of the weights."""
    data: str
    settings: tuple[str, ...]


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        write_ids(Path(arguments.data) / "input.txt", Path(scratch), small=arguments.small)
        settings = (*(SMALL_SETTINGS if arguments.small else ()), *arguments.set)
        jobs = [
            Job(row=row, seed=seed, data=scratch, settings=(*ROWS[row], *settings))
            for seed in range(arguments.seeds)
            for row in ROWS
        ]
        for job in jobs:
            config_for(job)  # a wrong setting shows before anything starts
        runs = stored_runs(arguments) if arguments.go_on else []
        done = {(run["row"], run["seed"]) for run in runs}
        jobs = [job for job in jobs if (job.row, job.seed) not in done]
        for run in finished(jobs, at_once=arguments.at_once, seconds=arguments.seconds):
            runs.append(run)
            print({name: value for name, value in run.items() if name != "losses"}, flush=True)
            record = {"settings": shown_settings(arguments), "runs": runs, "verdicts": verdicts(runs)}
            store("gpt2_xl_loss", record, torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.out)
    for measure, found in verdicts(runs).items():
        print(measure, found)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--go-on", action="store_true", help="keep the runs that are stored, make those that are not")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="runs that train beside each other")
    parser.add_argument("--seconds", type=float, default=240, help="runs that take longer are not waited for")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--small", action="store_true", help="a tiny model, for trying this on a CPU")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    return parser.parse_args()


def stored_runs(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Those of an earlier call with the same settings, in benchmarks/results or, where it has some, in --out."""
    folders = [Path(folder) for folder in (arguments.out, RESULTS) if folder]
    path = next((path for folder in folders if (path := folder / "gpt2_xl_loss.json").is_file()), None)
    if path is None:
        return []
    record = json.loads(path.read_text())
    for name in ("set", "small"):
        if record["settings"][name] != getattr(arguments, name):
            sys.exit(f"{path} was made with --{name} {record['settings'][name]}: its runs are not those of this call")
    runs: list[dict[str, Any]] = record["runs"]
    return runs


SMALL_SETTINGS = (*SMALL, "model.vocab=256", "train.max_steps=22", "schedule.warmup_steps=2", "precision.simulate=true")


def write_ids(text: Path, folder: Path, *, small: bool) -> None:
    """Bytes as ids of the whole vocabulary: nine tenths for training, and the first windows of the rest."""
    ids = np.frombuffer(text.read_bytes(), np.uint8).astype(np.uint16)
    cut = len(ids) * 9 // 10
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:][: (1 if small else HELD_OUT) * CONTEXT + 1].tofile(folder / "val.bin")


# --- one run ---


def config_for(job: Job) -> RunConfig:
    settings: dict[str, object] = {
        "data.dir": job.data,
        "data.num_workers": 1,
        "train.batch_size": 1,
        "train.max_steps": STEPS,
        "train.seed": DATA_SEED,
        "train.fast": "off",
        "optimizer.lr": 2e-4,  # GPT-3's for a model of this size (Brown et al. 2020)
        "schedule.warmup_steps": 20,
        "precision.strict": True,
    }
    words = [*said(settings), *job.settings]
    last = dict(word.split("=", 1) for word in words)
    return load("gpt2_xl", overrides=[f"{key}={value}" for key, value in last.items()]).config


def run(job: Job, may_begin: Any, results: Any) -> None:
    began = time.monotonic()
    config = config_for(job)
    # The model of this seed; the order of the windows is that of `config`.
    workload = build_workload(config.replace(train={"seed": job.seed}))
    built_s = time.monotonic() - began
    may_begin.wait()
    began = time.monotonic()
    plan = tune_plan(decide_plan(config, workload, probe(config.device)), RunRehearsal(config, workload), print)
    losses, held_out = trained(assemble(config, workload, plan))
    results.put(
        {
            "row": job.row,
            "seed": job.seed,
            "parameters": sum(parameter.numel() for parameter in workload.model.parameters()),
            "last_loss": statistics.mean(losses[-LAST:]),
            "held_out_loss": held_out,
            "built_s": built_s,
            "trained_s": time.monotonic() - began,
            "ended_at": time.strftime("%Y-%m-%d %H:%M"),
            "losses": losses,
        }
    )


def trained(parts: Assembly) -> tuple[list[float], float]:
    """The training loss of each step, and the held-out loss after the last one."""
    assert parts.mode is not None, "the plan was tuned"
    engine = make_engine(parts, parts.mode, lambda text, level: print(text, flush=True))
    loader, facts = parts.train_loader, []
    windows = parts.step.windows(prefetch(loader.iterate_epoch(0), parts.device))
    for window in itertools.islice(windows, parts.train.max_steps):
        facts.append(engine(window, loader.list_sizes(len(facts), 1)))
        verdict = parts.guard.watch(facts[-1])
        if verdict.action is not Action.CONTINUE:
            raise TrainingStopped(f"training stopped: {verdict.reason}", fix=verdict.fix)
    held_out = validate(parts.workload, parts.model, parts.plan, parts.val_loader)
    return [step.read().loss for step in facts], held_out["loss"]


# --- all runs ---


def finished(jobs: Sequence[Job], *, at_once: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Results as they come. A run that fails makes room for the next one and gives none."""
    spawn, end = multiprocessing.get_context("spawn"), time.monotonic() + seconds
    results: Any = spawn.Queue()
    turns = [spawn.Event() for _ in jobs]
    processes = [spawn.Process(target=run, args=(job, turn, results)) for job, turn in zip(jobs, turns, strict=True)]
    for process in processes:
        process.start()
    try:
        while True:
            at_work = [process for process, turn in zip(processes, turns, strict=True) if turn.is_set()]
            num_busy = sum(process.is_alive() for process in at_work)
            for turn in turns[len(at_work) :][: max(at_once - num_busy, 0)]:
                turn.set()
            try:
                yield results.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > end or not any(process.is_alive() for process in processes):
                    return
    finally:
        for process in processes:
            process.kill()


def verdicts(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each measure: fp32's seeds, and how far the other row is from them."""
    found = {}
    for measure in MEASURES:
        values = {row: {run["seed"]: run[measure] for run in runs if run["row"] == row} for row in ROWS}
        fp32, split = values["fp32"], values["split"]
        if not (pairs := sorted(fp32.keys() & split.keys())):
            continue
        spread = max(fp32.values()) - min(fp32.values())
        differences = {seed: split[seed] - fp32[seed] for seed in pairs}
        largest = max(map(abs, differences.values()))
        found[measure] = {
            "fp32": fp32,
            "split": split,
            "fp32_spread": spread,
            "differences": differences,
            "largest_difference": largest,
            "verdict": "too few seeds" if len(pairs) < FEWEST_SEEDS else "within" if largest <= spread else "outside",
        }
    return found


if __name__ == "__main__":
    main()
