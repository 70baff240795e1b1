"""What a process group costs: steps of a world of one by NCCL, captured, against steps without ranks.

    python benchmarks/ranks_cost.py [--only unet,gpt2] [--rounds 7] [--out DIR]

Both train in one process and take turns: a round is a window of steps of each, so that clocks and heat are shared.
The cost is the median over rounds of the ratio of their times. A world of one sends nothing: what is left is DDP's
buckets, two sums and the flags. `--small` is for trying the script on a CPU, where steps are eager and talk by gloo.
"""

from __future__ import annotations

import argparse
import itertools
import socket
import statistics
from typing import Any

import torch
import torch.distributed as dist

from halfstep.distributed.world import World
from halfstep.hardware.probe import probe
from halfstep.own_loop.prefetch import prefetch
from halfstep.step.facts import Facts, PhasedFacts
from halfstep.step.randomness import seed_everything
from halfstep_train.bench.problem import (
    BenchMode,
    build_problem,
    build_random_workload,
    load_bench_config,
    set_mode,
    set_precision,
)
from halfstep_train.config.schema import RunConfig
from halfstep_train.run.assemble import Assembly, assemble, decide_plan
from halfstep_train.run.engine import make_engine
from halfstep_train.run.rehearsal import RunRehearsal
from halfstep_train.tune.choose import tune_plan
from halfstep_train.tune.modes import Mode
from recording import store, time_steps

CASES = {
    "unet": ("U-Net 31M, 512×512, 8", {"batch_size": 8, "image_size": 512}),
    "gpt2": ("GPT-2 124M, 16×1024", {"batch_size": 16}),
    "resnet50": ("ResNet-50, 224, 64", {"batch_size": 64, "image_size": 224}),
}
GOAL = 1.03
WARM_UP, STEPS = 20, 20
"""DDP asks for eleven steps before a capture."""


class TimedTraining:
    """Steps of an assembled training on one random batch."""

    def __init__(self, config: RunConfig, parts: Assembly, mode: Mode, device: torch.device) -> None:
        self.remarks: list[str] = []
        self.engine = make_engine(parts, mode, lambda text, level: self.remarks.append(text))
        self._batches = prefetch(itertools.repeat(build_problem(config, device).host_batch), device)
        self._facts: Facts | PhasedFacts

    def step(self) -> None:
        facts = self.engine([next(self._batches)])
        self.engine.parts.guard.watch(facts)
        self._facts = facts

    def window_ms(self, steps: int) -> float:
        """Milliseconds per step."""
        return time_steps(self.step, warmup=0, steps=steps, windows=1)["ms"]

    @property
    def loss(self) -> float:
        return self._facts.read().loss


class Training(TimedTraining):
    """One of the two that take turns."""

    def __init__(self, config: RunConfig, world: World | None, device: torch.device) -> None:
        seed_everything(config.train.seed)
        workload, hardware = build_random_workload(config), probe(str(device))
        plan = tune_plan(decide_plan(config, workload, hardware), RunRehearsal(config, workload), lambda line: None)
        parts = assemble(config, workload, plan, world)
        assert parts.mode is not None, "the plan was tuned"
        super().__init__(config, parts, parts.mode, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="unet,gpt2")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
    found = {}
    for name in arguments.only.split(","):
        title, size = CASES[name]
        found[name] = {"title": title, **cost_of(name, size, device, arguments)}
        print(name, found[name], flush=True)
        store("ranks_cost", {"backend": backend, "goal": GOAL, "cases": found}, device, arguments.out)
    dist.destroy_process_group()


def cost_of(name: str, size: dict[str, int], device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    mode: BenchMode = "graph" if device.type == "cuda" else "eager"
    config = load_bench_config(name, (), {"batch_size": 2} if arguments.small else size, small=arguments.small)
    config = set_mode(set_precision(config, "bf16" if mode == "graph" else "fp32", simulate=False), mode)
    both = {"without": Training(config, None, device), "world_of_one": Training(config, World(), device)}
    warm_up, steps = (1, 1) if arguments.small else (WARM_UP, STEPS)
    for training in both.values():
        training.window_ms(warm_up)
    rounds = [{which: training.window_ms(steps) for which, training in both.items()} for _ in range(arguments.rounds)]
    ratios = [one["world_of_one"] / one["without"] for one in rounds]
    return {
        "ms": {which: statistics.median(one[which] for one in rounds) for which in both},
        "cost": statistics.median(ratios) - 1,
        "cost_min": min(ratios) - 1,
        "cost_max": max(ratios) - 1,
        "rounds": len(rounds),
        "steps_a_round": steps,
        "modes": {which: training.engine.mode for which, training in both.items()},
        "captured": {which: len(training.engine.graphs) for which, training in both.items()},
        "losses": {which: training.loss for which, training in both.items()},
        "remarks": {which: training.remarks for which, training in both.items()},
    }


if __name__ == "__main__":
    main()
