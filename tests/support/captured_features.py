"""Features of hs.Step in captured steps: each trains with and without the fast path, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import captured_faults
import halfstep as hs
from captured_faults import ROWS, Loop, get_loss

NUM_STEPS, BAD_STEP = 14, 9


def make_net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(device)


def plain(device: torch.device, optimizer: Callable[..., Any] | None = None, **settings: Any) -> Loop:
    model = make_net(device)
    made = optimizer and optimizer(model.parameters())
    return Loop(model, lambda batch: get_loss(model, batch), settings=settings, optimizer=made)


def weighted(device: torch.device) -> Loop:
    loop = plain(device, accumulate=2)
    loop.loss_fn = lambda batch: (get_loss(loop.model, batch), (batch[1] > 0).sum())
    return loop


def several_optimizers(device: torch.device) -> Loop:
    loop = plain(device)
    first, last = loop.model[0], loop.model[3]  # type: ignore[index]
    loop.optimizer = [
        torch.optim.SGD(first.parameters(), 1e-2, momentum=0.9, fused=True),
        torch.optim.Adam(last.parameters(), 1e-2, fused=True),
    ]
    return loop


def unfused(device: torch.device) -> Loop:
    return plain(device, partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, capturable=device.type == "cuda"))


def unfused_rmsprop(device: torch.device) -> Loop:
    return plain(device, partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, capturable=device.type == "cuda"))


def muon(device: torch.device, **settings: Any) -> Loop:
    """Matrices by Muon, the rest by AdamW."""
    loop = plain(device, **settings)
    parameters = list(loop.model.parameters())
    loop.optimizer = [
        torch.optim.Muon([p for p in parameters if p.ndim == 2], 1e-2),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], 1e-2, fused=True),
    ]
    return loop


def scheduled_muon(device: torch.device) -> Loop:
    loop = muon(device, schedule=lambda step: 1.0 / (1 + step), accumulate=2)
    if device.type == "cpu":  # where Muon takes its learning rate as a number
        loop.why_eager = "change at every step"
    return loop


def frozen_encoder(device: torch.device) -> Loop:
    loop = plain(device)
    loop.model[0].requires_grad_(False)  # type: ignore[index]
    return loop


def adapter(device: torch.device) -> Loop:
    """Train a low-rank addition to a frozen layer."""
    model = make_net(device).requires_grad_(False)
    model.down = nn.Parameter(torch.randn(4, 2, device=device) * 0.1)
    model.up = nn.Parameter(torch.zeros(2, 3, device=device))
    optimizer = torch.optim.AdamW([model.down, model.up], 1e-2, fused=True)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) + batch[0] @ model.down @ model.up, batch[1])

    return Loop(model, loss_fn, optimizer=optimizer)


def tied_weights(device: torch.device) -> Loop:
    model = nn.Linear(4, 3, bias=False).to(device)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(torch.tanh(model(batch[0])) @ model.weight @ model.weight.T, batch[1])

    return Loop(model, loss_fn)


def also_written(device: torch.device) -> Loop:
    """Write into the buffers of a network that another step trains."""
    other = nn.BatchNorm1d(4).to(device)
    loop = plain(device, also=[other])
    loop.loss_fn, loop.kept = lambda batch: F.cross_entropy(loop.model(other(batch[0])), batch[1]), other
    return loop


def edited_gradients(device: torch.device) -> Loop:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    loop = plain(device, on_gradients=edit)
    loop.mode = "graph, commit eager"
    return loop


def on_commit(device: torch.device) -> Loop:
    teacher = make_net(device)

    @torch.no_grad()
    def move(model: nn.Module) -> None:
        for own, new in zip(teacher.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.1)

    loop = plain(device, on_commit=move, also=[teacher])
    loop.mode, loop.kept = "graph, commit eager", teacher
    return loop


class Lion(torch.optim.Optimizer):
    """A custom optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own = self.state[p]
                own["count"] = own.get("count", 0) + 1
                moment = own.setdefault("moment", torch.zeros_like(p))
                p.sub_(moment.lerp(p.grad, 0.1).sign_(), alpha=group["lr"] / own["count"])
                moment.lerp_(p.grad, 0.01)


def own_optimizer(device: torch.device) -> Loop:
    loop = plain(device, partial(Lion, lr=1e-3), accumulate=2, ema_decay=0.9)
    loop.mode = "graph, commit eager"
    return loop


def unfused_sgd(device: torch.device) -> Loop:
    fused = True if device.type == "cuda" else None
    optimizer = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=fused)
    return plain(device, optimizer, schedule=lambda step: 1.0 / (1 + step))


def compiled_model(device: torch.device) -> Loop:
    loop = plain(device)
    run: Any = torch.compile(loop.model, backend="aot_eager")
    loop.loss_fn = lambda batch: get_loss(run, batch)
    return loop


def drawn_aside(device: torch.device) -> Loop:
    """Draw from the CPU's generator for no effect, and for a branch that no loss uses; keep an undetached tensor."""
    loop = plain(device, accumulate=2)

    def loss_fn(batch: Any) -> Tensor:
        if torch.rand(1) >= 1:
            raise AssertionError("torch.rand is less than 1")
        F.dropout(batch[0])
        loop.model.last = F.dropout(loop.model(batch[0]), 0.3)
        return F.cross_entropy(loop.model.last, batch[1])

    loop.loss_fn = loss_fn
    return loop


FEATURES: dict[str, Callable[[torch.device], Loop]] = {
    function.__name__: function
    for function in (
        plain, weighted, several_optimizers, unfused, unfused_rmsprop, muon, scheduled_muon, frozen_encoder, adapter,
        tied_weights, also_written, edited_gradients, on_commit, own_optimizer, unfused_sgd, compiled_model,
        drawn_aside,
    )
} | {
    "average": partial(plain, ema_decay=0.9),
    "accumulated": partial(plain, accumulate=3),
    "scheduled": partial(plain, schedule=lambda step: 1.0 / (1 + step)),
    "spikes": partial(plain, skip_spikes=True),
    "watched": partial(plain, watch=3),
}  # fmt: skip


def assert_same(name: str, device: torch.device, precision: str = "fp32") -> None:
    """Train with a NaN in one batch."""
    options = {"bad_at": {BAD_STEP}, "length": NUM_STEPS, "precision": precision, "clip_norm": 1.0}
    found = captured_faults.assert_same(name, device, loops=FEATURES, **options)
    assert [one["committed"] for one in found.history].index(False) == BAD_STEP


def assert_muon_follows_rates(device: torch.device) -> None:
    """Write Muon's learning rate by hand: captured steps read it on the device, a rounding away from eager ones."""
    found = []
    for fast in ("off", "graph"):
        torch.manual_seed(0)
        loop = muon(device)
        step = hs.Step(loop.model, loop.optimizer, "fp32", fast=fast)  # type: ignore[arg-type]
        batch = torch.randn(ROWS, 4, device=device), torch.randint(0, 3, (ROWS,), device=device)
        start = [p.detach().clone() for p in loop.model.parameters()]
        for number in range(NUM_STEPS):
            loop.optimizer[0].param_groups[0]["lr"] = 1e-2 / (1 + number)
            step(loop.loss_fn, [batch])
        found.append([p.detach() - began for p, began in zip(loop.model.parameters(), start, strict=True)])
    assert (step._fast.why_eager, step.mode) == ("", "graph")
    assert step.attempted == step.committed == NUM_STEPS
    for eager, captured in zip(*found, strict=True):
        # Updates are orthogonalised in bf16, where a rounding of the weights may show as 2**-8.
        assert (captured - eager).norm() <= 1e-2 * eager.norm()
