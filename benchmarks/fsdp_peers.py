"""FSDP2 in plain torch, Accelerate, Lightning and hs.Step on two gloo ranks: losses, and a NaN batch on one rank.

    python benchmarks/fsdp_peers.py

Same toy model, data, seed, clipping and AdamW in fp32. Each loop trains twice: on good batches, and with one batch of
NaN on rank 1 in the middle. Stored are the mean losses, the largest difference of any weight from plain FSDP2's, and
what is left of the weights after the NaN. A loop that refuses the CPU is stored with its error. Each runs in its own
processes, because trainers set up torch.distributed in their own way.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import halfstep as hs
from recording import store

NUM_RANKS, NUM_STEPS, NUM_ROWS, BAD_STEP, LR = 2, 40, 16, 20, 1e-2
Batches = list[tuple[Tensor, Tensor]]
Losses = list[Tensor]


class Block(nn.Sequential):
    """A class of its own: Accelerate finds what it shards by class name."""


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Linear(8, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 8)) for _ in range(2))
        self.blocks = nn.Sequential(*(Block(*own) for own in layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(x))
        return found


def make_model() -> Toy:
    torch.manual_seed(0)
    return Toy()


def make_batches(*, has_nan: bool) -> Batches:
    """Return this rank's rows of each global batch."""
    rank, each = int(os.environ["RANK"]), NUM_ROWS // NUM_RANKS
    draw = torch.Generator().manual_seed(1)
    found = []
    for number in range(NUM_STEPS):
        x = torch.randn(NUM_ROWS, 8, generator=draw)[rank * each : (rank + 1) * each]
        is_bad = has_nan and number == BAD_STEP and rank == 1
        found.append((x * float("nan") if is_bad else x, x[:, :4] * 2))
    return found


def make_adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=LR)


def compute_loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).pow(2).mean()


def shard(net: Toy) -> Toy:
    from torch.distributed.fsdp import fully_shard

    for block in net.blocks:
        fully_shard(block)
    fully_shard(net)
    return net


# --- the loops: each returns the trained model and this rank's losses ---


def train_plain(batches: Batches) -> tuple[nn.Module, Losses]:
    dist.init_process_group("gloo")
    net = shard(make_model())
    optimizer, losses = make_adamw(net), []
    for batch in batches:
        optimizer.zero_grad()
        loss = compute_loss(net, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return net, losses


def train_halfstep(batches: Batches) -> tuple[nn.Module, Losses]:
    dist.init_process_group("gloo")
    net = shard(make_model())
    step, losses = hs.Step(net, make_adamw(net), "fp32", clip_norm=1.0), []

    def loss_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = compute_loss(net, batch)
        losses.append(loss.detach())
        return loss

    for batch in batches:
        step(loss_fn, [batch])
    return net, losses


def train_accelerate(batches: Batches) -> tuple[nn.Module, Losses]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=plugin)
    net = make_model()
    prepared, optimizer = accelerator.prepare(net, make_adamw(net))
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = compute_loss(prepared, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return prepared, losses


def train_lightning(batches: Batches) -> tuple[nn.Module, Losses]:
    import lightning as lt
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses: Losses = []

    class Module(lt.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = make_model()
                mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
                from torch.distributed.fsdp import fully_shard

                for block in self.net.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = compute_loss(self.net, batch)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_adamw(self.net)

    module = Module()
    trainer = lt.Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=ModelParallelStrategy(NUM_RANKS, 1),
        max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    # A list would be a collection of loaders to it.
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.net, losses


LOOPS: dict[str, Callable[[Batches], tuple[nn.Module, Losses]]] = {
    "plain FSDP2": train_plain,
    "hs.Step": train_halfstep,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
}


# --- one rank of one loop ---


def run_rank(loop: str, folder: Path, *, has_nan: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = folder / os.environ["RANK"]
    try:
        net, losses = LOOPS[loop](make_batches(has_nan=has_nan))
    except Exception as error:
        out.write_text(json.dumps({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}))
        traceback.print_exc()
        return
    means = torch.stack(losses)
    dist.all_reduce(means)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    found = {"losses": [round(loss, 6) for loss in (means / NUM_RANKS).tolist()], "weights": flat.tolist()}
    out.write_text(json.dumps(found))


def launch(loop: str, *, has_nan: bool) -> dict[str, Any]:
    """Run a loop on all ranks, and return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        run = ["-m", "torch.distributed.run", f"--nproc_per_node={NUM_RANKS}", "--standalone", __file__]
        words = [sys.executable, *run, loop, folder, *(["nan"] if has_nan else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(words, env=environment, timeout=300, check=False, capture_output=True, text=True)
        out = Path(folder) / "0"
        if not out.exists():
            return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def summarise(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return found
    weights, reference = torch.tensor(found["weights"]), torch.tensor(plain["weights"])
    numbers = {
        "first_loss": found["losses"][0],
        "last_loss": found["losses"][-1],
        "finite_weights": float(weights.isfinite().double().mean()),
        "largest_difference_from_plain": float((weights - reference).abs().max()),
    }
    return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}


def main() -> None:
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], Path(sys.argv[2]), has_nan="nan" in sys.argv[3:])
        return
    results: dict[str, Any] = {}
    plain = launch("plain FSDP2", has_nan=False)
    for loop in LOOPS:
        good, bad = launch(loop, has_nan=False), launch(loop, has_nan=True)
        results[loop] = {"good_batches": summarise(good, plain), "nan_on_one_rank": summarise(bad, plain)}
        print(loop, json.dumps(results[loop], indent=1))
    facts = {
        "loops": results, "ranks": NUM_RANKS, "steps": NUM_STEPS, "bad_step": BAD_STEP,
        "versions": {name: version(name) for name in ("accelerate", "lightning")},
    }  # fmt: skip
    store("fsdp_peers", facts, torch.device("cpu"))


if __name__ == "__main__":
    main()
