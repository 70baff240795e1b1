"""Two processes by gloo: does hs.Step(DDP(model)) train what plain DDP, Accelerate and Lightning do?

    torchrun --nproc_per_node=2 benchmarks/ddp_equality.py

Same data, batch, seed and AdamW over 50 steps in fp32, equal parts of a batch (peers do not weigh uneven ones). The
largest difference of any weight from plain DDP's is stored. Peers that are not installed are left out, and said so.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep as hs
from recording import store

STEPS, ROWS = 50, 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def batches() -> list[tuple[Tensor, Tensor]]:
    """This process's rows of each global batch."""
    draw, each = torch.Generator().manual_seed(1), ROWS // dist.get_world_size()
    found = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, 8, generator=draw)
        own = slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)
        found.append((x[own], x[own, :4] * 2))
    return found


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def plain(net: nn.Module) -> None:
    ddp = DistributedDataParallel(net)
    optimizer = adamw(ddp)
    for x, y in batches():
        optimizer.zero_grad()
        (ddp(x) - y).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()


def halfstep(net: nn.Module) -> None:
    ddp = DistributedDataParallel(net)
    step = hs.Step(ddp, adamw(ddp), "fp32", clip_norm=1.0)
    for x, y in batches():
        step(lambda batch: (ddp(batch[0]) - batch[1]).pow(2).mean(), [(x, y)])


def accelerate(net: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="no")
    ddp, optimizer = accelerator.prepare(net, adamw(net))
    for x, y in batches():
        optimizer.zero_grad()
        accelerator.backward((ddp(x) - y).pow(2).mean())
        accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()


def lightning(net: nn.Module) -> None:
    import lightning as lt

    class Module(lt.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            return (self.net(batch[0]) - batch[1]).pow(2).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.net)

    trainer = lt.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", max_epochs=1, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    # A list would be a collection of loaders to it.
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    kinds: dict[str, Callable[[nn.Module], None]] = {"plain DDP": plain, "halfstep": halfstep}
    peers = {"accelerate": accelerate, "lightning": lightning}
    missing = [name for name in peers if importlib.util.find_spec(name) is None]
    kinds |= {name: train for name, train in peers.items() if name not in missing}
    weights = {}
    for name, train in kinds.items():
        net = model()
        train(net)
        weights[name] = torch.cat([p.detach().flatten() for p in net.parameters()])
    gaps = {name: float((own - weights["plain DDP"]).abs().max()) for name, own in weights.items()}
    if dist.get_rank() == 0:
        for name, gap in gaps.items():
            print(f"{name}: at most {gap:.3g} from plain DDP after {STEPS} steps")
        for name in missing:
            print(f"{name}: not installed, not compared")
        facts = {
            "largest_difference": gaps, "steps": STEPS, "processes": dist.get_world_size(), "missing": missing,
            "versions": {name: version(name) for name in peers if name not in missing},
        }  # fmt: skip
        store("ddp_equality", facts, torch.device("cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
