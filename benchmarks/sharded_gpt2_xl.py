"""A step of sharded GPT-2 XL in a world of one by NCCL, compiled, against the unsharded step; and its memory.

    python benchmarks/sharded_gpt2_xl.py [--batch 16] [--unit 64] [--rounds 7] [--steps 8] [--seconds 220] [--out DIR]

The trainings take turns in one process: a round is a few steps of each, so that clocks and heat are shared. The cost is
the median over rounds of the ratio of their times, with the smallest and the largest. A world of one sends nothing:
what is left is FSDP2's copies of each block, its hooks, and the step's sums over ranks.

    sharded   train.shard=true: each block compiled; units of a few blocks gathered and freed. `--unit` sets how many
              millions of parameters a unit has at least (run/sharded_model.py), such as 1 for a unit per block
    blocks    unsharded, each block compiled the same way: what sharding costs
    whole     unsharded, as `train.fast=compile` does it: the region compiled as a whole, which takes minutes.
              Left out if `--seconds` are nearly over

The peak of the sharded training alone is compared with `halfstep plan --memory --ranks 1`. `--small` is for trying the
script on a CPU with a tiny model, where steps are eager and talk by gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from halfstep.distributed.world import World
from halfstep.hardware.memory import get_peak_memory_bytes, reset_peak
from halfstep.hardware.probe import probe
from halfstep.own_loop.repeated_blocks import find_blocks
from halfstep.step.randomness import seed_everything
from halfstep_train.bench.problem import build_random_workload, load_bench_config, set_mode, set_precision
from halfstep_train.config.schema import RunConfig
from halfstep_train.run import sharded_model
from halfstep_train.run.assemble import assemble, decide_plan
from halfstep_train.run.memory.planner import Cell, MemoryPlanner
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.tune.modes import Mode
from ranks_cost import TimedTraining
from recording import store

GOAL = 1.10
WHOLE_S = 120.0
"""Seconds that must be left for compiling the whole region and timing it."""


class Training(TimedTraining):
    """One of those that take turns."""

    def __init__(self, config: RunConfig, how: str, mode: Mode, device: torch.device) -> None:
        seed_everything(config.train.seed)
        workload = build_random_workload(config)
        blocks = find_blocks(workload.model, of_any=True)
        plan = dataclasses.replace(decide_plan(config, workload, probe(str(device))), mode=mode)
        if how == "sharded":
            plan = dataclasses.replace(plan, shards=True, shard_blocks=tuple(blocks))
        elif how == "blocks":
            workload = dataclasses.replace(workload, blocks={type(workload.model.get_submodule(blocks[0])): None})
        self.num_units = len(sharded_model.group_blocks(workload.model, blocks)) if how == "sharded" else 0
        parts = assemble(config, workload, plan, World() if how == "sharded" else None)
        super().__init__(config, parts, mode, device)


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--unit", type=float, help="millions of parameters, default: as a run does")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    if arguments.unit:
        sharded_model.UNIT_PARAMETERS = int(1e6 * arguments.unit)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
    if device.type == "cuda":
        torch.cuda.init()  # or there are no statistics of memory to reset
    mode: Mode = "compile" if device.type == "cuda" else "eager"
    name, precision = ("gpt2", "fp32") if arguments.small else ("gpt2_xl", "bf16")
    size = {"batch_size": 2 if arguments.small else arguments.batch}
    config = load_bench_config(name, (), size, small=arguments.small)
    config = set_mode(set_precision(config, precision, simulate=False), mode)
    found: dict[str, Any] = {"backend": backend, "goal": GOAL, "batch": size["batch_size"], "mode": mode}

    def keep(**more: Any) -> None:
        found.update(more, seconds=round(time.monotonic() - start))
        print(more, f"after {found['seconds']} s", flush=True)
        name = "sharded_gpt2_xl" + (f"_batch_{arguments.batch}" if arguments.batch != 16 else "")
        name += f"_unit_{arguments.unit:g}" if arguments.unit else ""
        store(name, found, device, arguments.out)

    reset_peak(device)
    both = {"sharded": Training(config, "sharded", mode, device)}
    both["sharded"].window_ms(3)
    # Before others need memory too.
    keep(peak_bytes=get_peak_memory_bytes(device), units=both["sharded"].num_units)
    both["blocks"] = Training(config, "blocks", mode, device)
    keep(**measure(both, arguments))
    planner = MemoryPlanner(build_traceable_step(config), probe(str(device)))
    predicted = planner.predict(Cell.of(config.train, precision, mode).spread(1, "shard"))
    peak = found["peak_bytes"]
    keep(
        predicted_bytes=predicted.total,
        predicted={key: value for key, value in predicted.components.items() if value},
        predicted_off=predicted.total / peak - 1 if peak else None,
    )
    if time.monotonic() - start < arguments.seconds - WHOLE_S or arguments.small:
        both["whole"] = Training(config, "whole", mode, device)
        keep(**measure(both, arguments))
    dist.destroy_process_group()


def measure(both: dict[str, Training], arguments: argparse.Namespace) -> dict[str, Any]:
    """The cost of the sharded training over each other one."""
    for training in both.values():
        training.window_ms(3)
    rounds = [{which: one.window_ms(arguments.steps) for which, one in both.items()} for _ in range(arguments.rounds)]
    costs = {}
    for other in (which for which in both if which != "sharded"):
        ratios = [one["sharded"] / one[other] for one in rounds]
        costs[other] = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {
        "ms": {which: statistics.median(one[which] for one in rounds) for which in both},
        "sharded_over": costs,
        "rounds": len(rounds),
        "steps_a_round": arguments.steps,
        "losses": {which: training.loss for which, training in both.items()},
        "modes": {which: training.engine.mode for which, training in both.items()},
        "remarks": {which: training.remarks for which, training in both.items()},
    }


if __name__ == "__main__":
    main()
