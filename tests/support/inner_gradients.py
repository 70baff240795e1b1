"""Loss functions that take a gradient themselves: captured, they train as eager steps do."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import captured_faults
import halfstep as hs
from captured_faults import Loop, Trained, make_net

Loss = Callable[[hs.Step, nn.Module, Tensor, Tensor], Tensor]
NUM_STEPS = 12


def penalty(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """WGAN-GP."""
    between = torch.lerp(x, x.flip(0), torch.rand(len(x), 1, device=x.device)).requires_grad_()
    slope = step.grad(model(between), between)
    assert isinstance(slope, Tensor)
    return F.cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).square().mean()


def penalty_by_torch(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """R1, the gradient of the outputs with respect to the batch."""
    x = x.detach().requires_grad_()
    logits = model(x)
    (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + 0.1 * slope.square().sum(1).mean()


def physics(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A second derivative, as in a PINN."""
    x = x.clone().requires_grad_()
    u = model(x)
    first = step.grad(u, x)
    assert isinstance(first, Tensor)
    second = step.grad(first[:, 0], x)
    assert isinstance(second, Tensor)
    return (first[:, 1] - 0.1 * second[:, 0]).square().mean() + F.cross_entropy(u, y)


def inner_steps(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML."""
    weights = dict(model.named_parameters())
    for _ in range(2):
        loss = F.cross_entropy(functional_call(model, weights, (x,)), y)
        gradients = step.grad(loss, list(weights.values()))
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
    return F.cross_entropy(functional_call(model, weights, (x.flip(0),)), y)


def first_order_steps(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """MAML of the first order: torch.autograd.grad with an iterator and arguments by position."""
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), model.parameters(), None, True, False)
    weights = {name: w - 0.1 * g for (name, w), g in zip(model.named_parameters(), gradients, strict=True)}
    return F.cross_entropy(functional_call(model, weights, (x.flip(0),)), y)


def adversarial(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """FGSM: a gradient that is not differentiated again."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
    return F.cross_entropy(model(x + 0.1 * slope.sign()), y)


def balanced(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Two losses, weighed by their gradients in the last layer, as in VQGAN."""
    logits = model(x)
    losses = F.cross_entropy(logits, y), logits.square().mean()
    last = [one for one in model.parameters() if one.ndim == 2][-1]
    norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in losses]
    return losses[0] + (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach() * losses[1]


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def through_function(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A penalty that is zero in the first steps: torch's compiler loses a part of its gradient."""
    x = x.detach().requires_grad_()
    slope = step.grad(Cubed.apply(model(x)), x)
    assert isinstance(slope, Tensor)
    return F.cross_entropy(model(x), y) + F.relu(slope.norm(dim=1) - 0.8).sum()


def beside_a_hook(step: hs.Step, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A hook on a weight, in which eager code changes this gradient, too."""
    weight = next(iter(model.parameters()))
    if not weight._backward_hooks:
        weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight)
    return F.cross_entropy(model(x), y) + (slope * weight).sum()


CASES: dict[str, Loss] = {
    function.__name__: function
    for function in (penalty, penalty_by_torch, physics, inner_steps, first_order_steps, adversarial, balanced)
}
LEFT_EAGER: dict[str, Loss] = {"autograd.Function": through_function, "hooks": beside_a_hook}
"""By a part of the reason: what is not captured, because it would train differently."""


def make_loop(name: str, device: torch.device) -> Loop:
    model, steps = make_net(device), {}
    loop = Loop(model, lambda batch: (CASES | LEFT_EAGER)[name](steps["now"], model, *batch))
    loop.before = lambda step, _: steps.update(now=step)
    return loop


def train(name: str, device: torch.device, fast: str, precision: str = "fp32", bad_at: Container[int] = ()) -> Trained:
    make = lambda device: make_loop(name, device)  # noqa: E731
    return captured_faults.train(make, device, fast, precision=precision, bad_at=bad_at, length=NUM_STEPS)


def assert_same(name: str, device: torch.device, precision: str = "fp32") -> None:
    """Captured steps that run torch's kernels equal eager steps bit for bit, and drop the same bad step."""
    expected, found = (train(name, device, fast, precision, bad_at=[8]) for fast in ("off", "graph"))
    assert (found.why_eager, found.step.mode) == ("", "graph")
    assert "up to rounding" in str(found.step.certificate)
    captured_faults.assert_same_history(found, expected)
    assert not found.history[8]["committed"]


def assert_left_eager(name: str, device: torch.device) -> None:
    expected, found = (train(name, device, fast) for fast in ("off", "graph"))
    assert name in found.why_eager
    captured_faults.assert_same_history(found, expected)


def assert_close(name: str, device: torch.device, precision: str = "fp32", fast: str = "compile") -> None:
    """What ran is compiled code, or torch's kernels in a graph; it rounds in another way than eager steps."""
    expected, found = (train(name, device, one, precision) for one in ("off", fast))
    mode = "graph" if fast == "graph" else "compile+graph"
    assert (found.why_eager, found.step.mode) == ("", mode), str(found.step.certificate)
    rel = 0.3 if name == "penalty" and fast == "compile" else 0.02  # Inductor draws other random numbers
    for now, then in zip(found.history, expected.history, strict=True):
        assert now["loss"] == pytest.approx(then["loss"], rel=rel)
