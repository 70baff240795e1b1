"""What sharding costs: steps of GPT-2 XL sharded in a world of one by NCCL, compared with the same model unsharded.

    python benchmarks/shard_cost.py [--rounds 7] [--batch 4] [--precision bf16] [--out DIR]

Both are hs.Steps whose blocks are compiled one by one, on the same batch in one process, and take turns: a round is a
window of steps of each, so that clocks and heat are shared. The cost is the median over rounds of the ratio of their
times. A world of one sends nothing: what is left is FSDP2's copies into and out of its buffers, its hooks, and the
step's reductions. Peak memory is measured with both models allocated. `--small` is for trying the script on a CPU.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import halfstep as hs
from halfstep.workloads.language.gpt2 import Block, build_gpt2
from recording import store, time_steps

GOAL = 1.10
WARM_UP, STEPS = 10, 10
SMALL = {"depth": 2, "heads": 2, "dim": 64, "vocab": 96, "context": 32}


class Training:
    """One of the two that take turns."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace, *, shards: bool) -> None:
        torch.manual_seed(0)
        self.model = build_gpt2("gpt2_xl", **(SMALL if arguments.small else {})).to(device)
        blocks: list[nn.Module] = [module for module in self.model.modules() if isinstance(module, Block)]
        if shards:
            for block in blocks:
                fully_shard(block)
            fully_shard(self.model)
        else:
            for block in blocks:
                block.compile()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        fast: Any = "compile" if shards else "off"
        precision = "fp32" if arguments.small else arguments.precision
        self.step = hs.Step(self.model, optimizer, precision, clip_norm=1.0, fast=fast)
        size = self.model.size
        tokens = torch.randint(size.vocab, (arguments.batch, size.context + 1), device=device)
        self.window = [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]
        self.outcome: Any = None

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self.model(*batch)
        return loss

    def make_step(self) -> None:
        self.outcome = self.step(self.compute_loss, self.window)

    def time_window_ms(self, steps: int) -> float:
        """Return the milliseconds per step."""
        return time_steps(self.make_step, warmup=0, steps=steps, windows=1)["ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", help="folder for the JSON, default benchmarks/results")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{one.getsockname()[1]}"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=where, rank=0, world_size=1)
    both = {"unsharded": Training(device, arguments, shards=False), "sharded": Training(device, arguments, shards=True)}
    warm_up, steps = (2, 1) if arguments.small else (WARM_UP, STEPS)
    for training in both.values():
        training.time_window_ms(warm_up)
    rounds = [{which: one.time_window_ms(steps) for which, one in both.items()} for _ in range(arguments.rounds)]
    ratios = [one["sharded"] / one["unsharded"] for one in rounds]
    found = {
        "model": "a small GPT-2" if arguments.small else "GPT-2 XL",
        "backend": backend,
        "goal": GOAL,
        "ms": {which: statistics.median(one[which] for one in rounds) for which in both},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "rounds": len(rounds),
        "steps_a_round": steps,
        "batch": arguments.batch,
        "precision": both["sharded"].step.plan.granted,
        "modes": {which: training.step.mode for which, training in both.items()},
        "losses": {which: training.outcome.loss for which, training in both.items()},
    }
    print(found)
    store("shard_cost", found, device, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
