"""Faults planted into captured steps: each must be found before the graph is used, or by a later check.

Each returns the number of steps after which it was found, and what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.fast import fast_path as fast

FACTOR = [1.0]
NUM_STEPS, CHANGED_AT = 100, 30


@torch.library.custom_op("halfstep_faults::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * FACTOR[0]


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: gradient * FACTOR[0])


def train(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    loss_of: Callable[[nn.Module, Any], Tensor],
    change: Callable[[nn.Module], None] = lambda model: None,
    dropout: float = 0.0,
) -> tuple[hs.Step, list[str]]:
    """Train for some steps, with a change in the middle, comparing replays as often as possible."""
    monkeypatch.setattr(fast, "CHECK_SHARE", 1e9)
    said: list[str] = []
    monkeypatch.setattr(fast, "warn_user", said.append)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    step = hs.Step(model, optimizer, "fp32", fast=hs.Fast("graph", pure_ops=["halfstep_faults::scaled"]))
    for number in range(NUM_STEPS):
        if number == CHANGED_AT:
            change(model)
        batch = torch.randn(6, 4).to(device), torch.randint(0, 3, (6,)).to(device)
        step(lambda batch: loss_of(model, batch), [batch])
    return step, said


def get_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def get_scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(scaled(model(batch[0])), batch[1])


@contextmanager
def edit_replays(monkeypatch: pytest.MonkeyPatch, device: torch.device, edit: Callable[[Any], None]) -> Iterator[None]:
    """Run `edit(replay)` before each replay."""
    whole, _ = fast.CAPTURES[device.type]

    class Edited(whole):  # type: ignore[misc, valid-type]
        def __call__(self, *arguments: Any) -> Any:
            edit(self)
            return super().__call__(*arguments)

    monkeypatch.setitem(fast.CAPTURES, device.type, (Edited, Edited))
    yield


class WriteOnTheSide:
    """Change a weight with each replay, after some that were right."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, replay: Any) -> None:
        self.num_replays += 1
        if self.num_replays > 20:
            with torch.no_grad():
                replay.step.model[0].weight.add_(1e-3)


def assert_found_by_check(step: hs.Step, said: list[str]) -> None:
    assert step.mode == "eager"
    assert "steps are suspect" in step._fast.why_eager
    assert len(said) == 1
    assert f"The last {fast.LOOK_EVERY} steps are suspect" in said[0]


def assert_found_before_use(step: hs.Step, said: list[str]) -> None:
    assert step.mode == "eager"
    assert "differs by" in step._fast.why_eager
    assert not said
