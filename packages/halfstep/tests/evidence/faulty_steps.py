"""Train with hs.Step until a fault is kept as a capsule, and replay that capsule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.evidence.capsule import list_capsules
from halfstep.evidence.replay import Replayed

Batch = dict[str, Tensor]


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Shaped(nn.Module):
    """A layer, and a function behind it."""

    def __init__(self, then: Callable[..., Tensor], out: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.then = nn.Linear(8, out), then

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.then(self.layer(x), *more)


def keep_fault(
    folder: Path,
    model: nn.Module,
    loss_fn: Callable[[Batch], Any],
    batch: Batch,
    precision: str = "fp32",
    *,
    lr: float = 1e-3,
    num_steps: int = 1,
    **settings: Any,
) -> Path:
    """Return the capsule of the first fault."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr, fused=not any(p.is_complex() for p in trained))
    step = hs.Step(model, optimizer, hs.Precision(precision, simulate=precision != "fp32"), capsules=folder, **settings)
    step.scaler.value.fill_(1.0)  # as after a long search for a scale
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was saved; find the cause.*")
        try:
            for _ in range(num_steps):
                step(loss_fn, [batch])
            step.finish()
        except (IndexError, RuntimeError, hs.TrainingStopped) as error:
            del error
    return list_capsules(folder)[0]


def replay_fault(
    folder: Path, model: nn.Module, loss_fn: Callable[[Batch], Any], batch: Batch, *given: Any, **more: Any
) -> Replayed:
    return hs.replay(keep_fault(folder, model, loss_fn, batch, *given, **more), model, loss_fn)
