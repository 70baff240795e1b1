"""Features of hs.Step in captured steps: each trains with and without the fast path, to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs

NUM_STEPS, BAD_STEP, ROWS = 14, 9, 6


@dataclass
class Feature:
    model: nn.Module
    loss_fn: Callable[[Any], Any]
    optimizers: Any
    settings: dict[str, Any] = field(default_factory=dict)
    mode: str = "graph"


def make_net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).to(device)


def plain(device: torch.device, **settings: Any) -> Feature:
    model = make_net(device)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Feature(model, loss_fn, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), settings)


def weighted(device: torch.device) -> Feature:
    feature = plain(device, accumulate=2)
    loss_fn = feature.loss_fn
    feature.loss_fn = lambda batch: (loss_fn(batch), (batch[1] > 0).sum())
    return feature


def several_optimizers(device: torch.device) -> Feature:
    feature = plain(device)
    first, last = feature.model[0], feature.model[3]  # type: ignore[index]
    feature.optimizers = [
        torch.optim.SGD(first.parameters(), 1e-2, momentum=0.9, fused=True),
        torch.optim.Adam(last.parameters(), 1e-2, fused=True),
    ]
    return feature


def unfused(device: torch.device) -> Feature:
    feature = plain(device)
    is_gpu = device.type == "cuda"
    feature.optimizers = torch.optim.Adam(feature.model.parameters(), 1e-2, weight_decay=0.1, capturable=is_gpu)
    return feature


def unfused_rmsprop(device: torch.device) -> Feature:
    feature = plain(device)
    is_gpu = device.type == "cuda"
    feature.optimizers = torch.optim.RMSprop(feature.model.parameters(), 1e-3, momentum=0.9, capturable=is_gpu)
    return feature


def muon(device: torch.device, **settings: Any) -> Feature:
    """Matrices by Muon, the rest by AdamW."""
    feature = plain(device, **settings)
    parameters = list(feature.model.parameters())
    feature.optimizers = [
        torch.optim.Muon([p for p in parameters if p.ndim == 2], 1e-2),
        torch.optim.AdamW([p for p in parameters if p.ndim != 2], 1e-2, fused=True),
    ]
    return feature


def frozen_encoder(device: torch.device) -> Feature:
    feature = plain(device)
    feature.model[0].requires_grad_(False)  # type: ignore[index]
    return feature


def adapter(device: torch.device) -> Feature:
    """Train a low-rank addition to a frozen layer."""
    feature = plain(device)
    model = feature.model.requires_grad_(False)
    down, up = (
        nn.Parameter(torch.randn(4, 2, device=device) * 0.1),
        nn.Parameter(torch.zeros(2, 3, device=device)),
    )
    model.register_parameter("down", down)
    model.register_parameter("up", up)
    feature.loss_fn = lambda batch: F.cross_entropy(model(batch[0]) + batch[0] @ down @ up, batch[1])
    feature.optimizers = torch.optim.AdamW([down, up], 1e-2, fused=True)
    return feature


def tied_weights(device: torch.device) -> Feature:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.embed(x))
            return hidden @ self.embed.weight @ self.embed.weight.T

    model = Tied().to(device)
    return Feature(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        torch.optim.AdamW(model.parameters(), 1e-2, fused=True),
    )


def also_written(device: torch.device) -> Feature:
    """Write into the buffers of a network that another step trains."""
    other = nn.BatchNorm1d(4).to(device)
    feature = plain(device, also=[other])
    model = feature.model
    feature.loss_fn = lambda batch: F.cross_entropy(model(other(batch[0])), batch[1])
    return feature


def edited_gradients(device: torch.device) -> Feature:
    def edit(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    feature = plain(device, on_gradients=edit)
    feature.mode = "graph, commit eager"
    return feature


def on_commit(device: torch.device) -> Feature:
    teacher = make_net(device)

    @torch.no_grad()
    def move(model: nn.Module) -> None:
        for own, new in zip(teacher.parameters(), model.parameters(), strict=True):
            own.lerp_(new, 0.1)

    feature = plain(device, on_commit=move, also=[teacher])
    feature.mode = "graph, commit eager"
    return feature


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


def own_optimizer(device: torch.device) -> Feature:
    feature = plain(device, accumulate=2, ema_decay=0.9)
    feature.optimizers = Lion(feature.model.parameters(), 1e-3)
    feature.mode = "graph, commit eager"
    return feature


def unfused_sgd(device: torch.device) -> Feature:
    feature = plain(device, schedule=lambda step: 1.0 / (1 + step))
    feature.optimizers = torch.optim.SGD(
        feature.model.parameters(), 1e-2, momentum=0.9, fused=True if device.type == "cuda" else None
    )
    return feature


def compiled_model(device: torch.device) -> Feature:
    feature = plain(device)
    run: Any = torch.compile(feature.model, backend="aot_eager")
    feature.loss_fn = lambda batch: F.cross_entropy(run(batch[0]), batch[1])
    return feature


FEATURES: dict[str, Callable[[torch.device], Feature]] = {
    function.__name__: function
    for function in (
        plain, weighted, several_optimizers, unfused, unfused_rmsprop, muon, frozen_encoder, adapter, tied_weights,
        also_written, edited_gradients, on_commit, own_optimizer, unfused_sgd, compiled_model,
    )
} | {
    "average": partial(plain, ema_decay=0.9),
    "accumulated": partial(plain, accumulate=3),
    "scheduled": partial(plain, schedule=lambda step: 1.0 / (1 + step)),
    "spikes": partial(plain, skip_spikes=True),
    "watched": partial(plain, watch=3),
    "scheduled_muon": partial(muon, schedule=lambda step: 1.0 / (1 + step), accumulate=2),
}  # fmt: skip


def train(name: str, device: torch.device, fast: Any, precision: str = "fp32") -> tuple[Any, list[Tensor], hs.Step]:
    """Train with a NaN in one batch, and return the outcomes, all tensors, and the step."""
    torch.manual_seed(0)
    feature = FEATURES[name](device)
    step = hs.Step(feature.model, feature.optimizers, precision, fast=fast, clip_norm=1.0, **feature.settings)
    draws = torch.Generator().manual_seed(1)
    outcomes = []
    for number in range(NUM_STEPS):
        window = []
        for _ in range(feature.settings.get("accumulate", 1)):
            x, y = torch.randn(ROWS, 4, generator=draws), torch.randint(0, 3, (ROWS,), generator=draws)
            if number == BAD_STEP and not window:
                x[0, 0] = float("nan")
            window.append((x.to(device), y.to(device)))
        outcome = step(feature.loss_fn, window)
        outcomes.append((outcome.loss, outcome.grad_norm, outcome.lr, outcome.scale, outcome.committed))
    tensors = [*feature.model.parameters(), *feature.model.buffers(), *list_state(step)]
    return outcomes, [tensor.detach().clone() for tensor in tensors], step


def list_state(step: hs.Step) -> list[Tensor]:
    found = [value for o in step.optimizers for own in o.state.values() for value in own.values()]
    averages = step.ema.shadows if step.ema else ()
    return [*(one for one in found if isinstance(one, Tensor)), *averages, *step._step.spikes.state_dict().values()]


def assert_same(name: str, device: torch.device, precision: str = "fp32") -> None:
    expected, then, _ = train(name, device, "off", precision)
    found, now, step = train(name, device, "graph", precision)
    assert str(found) == str(expected)  # as text: NaN differs from itself
    assert not expected[BAD_STEP][4]
    assert all(torch.equal(one, other) for one, other in zip(now, then, strict=True))
    if name == "scheduled_muon" and device.type == "cpu":  # where Muon takes its learning rate as a number
        assert "optimizer settings or numbers in the batch change at every step" in step._fast.why_eager
    else:
        assert (step._fast.why_eager, step.mode) == ("", FEATURES[name](device).mode)


def assert_muon_follows_rates(device: torch.device) -> None:
    """Write Muon's learning rate by hand: captured steps read it on the device, a rounding away from eager ones."""
    found = []
    for fast in ("off", "graph"):
        torch.manual_seed(0)
        feature = muon(device)
        step = hs.Step(feature.model, feature.optimizers, "fp32", fast=fast)  # type: ignore[arg-type]
        batch = torch.randn(ROWS, 4, device=device), torch.randint(0, 3, (ROWS,), device=device)
        start = [p.detach().clone() for p in feature.model.parameters()]
        for number in range(NUM_STEPS):
            feature.optimizers[0].param_groups[0]["lr"] = 1e-2 / (1 + number)
            step(feature.loss_fn, [batch])
        found.append([p.detach() - began for p, began in zip(feature.model.parameters(), start, strict=True)])
    assert (step._fast.why_eager, step.mode) == ("", "graph")
    assert step.attempted == step.committed == NUM_STEPS
    for eager, captured in zip(*found, strict=True):
        # Updates are orthogonalised in bf16, where a rounding of the weights may show as 2**-8.
        assert (captured - eager).norm() <= 1e-2 * eager.norm()
