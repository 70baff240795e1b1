"""Planted faults for loops of other trainers, and what a dropped step must leave unchanged."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from halfstep.integrations.guard import HostAdvice

ADVICE = HostAdvice(overflow="bf16", clip="clip=1", step="loop.step()")
Fault = Literal["batch", "loss", "gradient", "statistics"]
FAULTS: tuple[Fault, ...] = ("batch", "loss", "gradient", "statistics")


class Net(nn.Module):
    """A small model with BatchNorm statistics, that a test can let fail in one way at one call."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.fault: Fault | None = None

    def forward(self, x: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        if self.fault == "batch":
            x = x * float("nan")
        if self.fault == "statistics":
            norm = self.body[1]
            assert isinstance(norm.running_var, Tensor)
            norm.running_var.fill_(float("inf"))
        logits = self.body(x)
        if self.fault == "gradient":  # the loss stays finite, one gradient does not
            logits = logits + 0 * PoisonGradient.apply(self.body[3].bias)
        if labels is None:
            return logits
        loss = nn.functional.cross_entropy(logits, labels)
        if self.fault == "loss":
            loss = loss * float("inf")
        return {"loss": loss, "logits": logits}


class PoisonGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], float("nan"))


def make_data(num: int = 64, width: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=generator), torch.randint(0, 2, (num,), generator=generator)


def copy_state(*holders: Any) -> list[Any]:
    """Copy the state of modules, optimizers, schedulers and scalers."""
    return [copy.deepcopy(holder.state_dict()) for holder in holders]


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        views = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
        return torch.equal(*views)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if callable(one) and callable(other):
        return True  # such as the functions that a LambdaLR stores
    return bool(one == other)


def assert_bad_steps_change_nothing(script: Any, *, is_fp16: bool) -> None:
    """Plant each fault in a script with `train` and `state`, whose fourth state is the scaler in fp16."""
    script.train(2)
    for fault in FAULTS:
        before = script.state
        script.train(1, fault)
        after = script.state
        if is_fp16 and fault == "gradient":
            assert after[3]["scale"] < before[3]["scale"]  # an overflow of gradients lowers the scale
            before[3] = after[3]
        assert same_bits(before, after), fault
        script.train(1)
        assert not same_bits(before[:3], script.state[:3])


def find_dropped(script: Any, rank: int) -> list[bool]:
    """Train while rank 1 alone is at fault; return whether each fault changed nothing on this rank."""
    script.train(2)
    found = []
    for fault in FAULTS:
        before = script.state
        script.train(1, fault if rank == 1 else None)
        found.append(same_bits(before, script.state))
        script.train(1)
        assert not same_bits(before[:3], script.state[:3])
    return found


def reset_accelerate() -> None:
    """Forget the state of Accelerate, if it was imported."""
    if state := sys.modules.get("accelerate.state"):
        for kind in (state.AcceleratorState, state.PartialState, state.GradientState):
            kind._reset_state()


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()
