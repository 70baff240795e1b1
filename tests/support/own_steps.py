"""A tiny model of the user's own in an `hs.Step`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import halfstep as hs


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr, fused=True)


def made(**more: Any) -> tuple[nn.Module, hs.Step]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return model, hs.Step(model, sgd(model), more.pop("precision", "fp32"), **more)


def loss_of(model: nn.Module) -> Any:
    return lambda x: F.mse_loss(model(x), x)


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
