"""Schedules that cycle momentum or betas on a GPU: followed in captured steps, without a wait for Adam and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs

pytestmark = pytest.mark.gpu
NUM_STEPS, BAD = 20, 12
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
}


def train(name: str, fast: Any) -> tuple[nn.Module, list[float], hs.Step]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    kind, settings = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), 0.01, **settings)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, NUM_STEPS)
    step = hs.Step(model, optimizer, "fp32", fast=fast, schedule=scheduler)
    momenta = []
    for number in range(NUM_STEPS):
        x = torch.randn(6, 4, device="cuda") * (float("nan") if number == BAD else 1.0)
        step(lambda x: model(x).square().mean(), [x])
        group = optimizer.param_groups[0]
        momenta.append(float(group["betas"][0] if "betas" in group else group["momentum"]))
    assert scheduler.state_dict()["last_epoch"] == NUM_STEPS - 1
    return model, momenta, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_cycled_momentum_is_followed(name: str) -> None:
    eager, expected, _ = train(name, "off")
    model, momenta, step = train(name, "graph")
    assert step.mode == ("graph, commit eager" if name == "SGD" else "graph")
    assert momenta == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(model[0].weight, eager[0].weight, rtol=1e-4, atol=1e-5)
    if name != "SGD":
        assert "in the form for graphs" in str(step.certificate)
