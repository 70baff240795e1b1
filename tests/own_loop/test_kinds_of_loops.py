"""Kinds of training loops as public repositories write them: with hs.Step in fp32 they keep every bit on a CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import halfstep as hs


def test_clipping_sums_the_norm_in_the_order_of_the_model_whatever_the_groups() -> None:
    """GPT scripts sort weights into groups with and without decay; clip_grad_norm_ takes model.parameters()."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())))
        named = list(model.named_parameters())
        groups = [[p for n, p in named if p.ndim > 1], [p for n, p in reversed(named) if p.ndim == 1]]
        return model, torch.optim.AdamW(
            [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], 1e-2, fused=True
        )

    data = torch.randn(30, 8, 16, generator=torch.Generator().manual_seed(1))
    plain, optimizer = make()
    for x in data:
        optimizer.zero_grad()
        F.mse_loss(plain(x), x).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
    model, optimizer = make()
    step = hs.Step(model, optimizer, "fp32", clip_norm=0.1)
    for x in data:
        step(lambda x: F.mse_loss(model(x), x), [x])
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
