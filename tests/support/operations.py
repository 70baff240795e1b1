"""Count the operations that a step dispatches, next to those of a plain loop: the host's work without a clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs

WARM_UP = 4  # the first steps build state, and watch parameters and the loss function


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(step: Callable[[], object]) -> int:
    for _ in range(WARM_UP):
        step()
    with Operations() as seen:
        step()
    return seen.counts.total()


def count_extra_operations(make: Callable[[], nn.Module], x: Tensor, y: Tensor, **options: Any) -> int:
    """Return how many more operations a step of hs.Step dispatches than a plain loop's, both in fp32 and clipped."""
    models = make().to(x.device), make().to(x.device)
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]

    def train_plainly() -> None:
        optimizers[0].zero_grad()
        F.cross_entropy(models[0](x), y).backward()
        nn.utils.clip_grad_norm_(models[0].parameters(), 1.0)
        optimizers[0].step()

    step = hs.Step(models[1], optimizers[1], "fp32", fast="off", clip_norm=1.0, **options)
    guarded = count_operations(lambda: step(lambda batch: F.cross_entropy(models[1](batch[0]), batch[1]), [(x, y)]))
    return guarded - count_operations(train_plainly)


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def make_normed(depth: int) -> nn.Module:
    """Return a network with `depth` BatchNorms: three buffers and four parameters each."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(8, 4))
