"""A tiny real model and its data, small enough to step a hundred times in a test."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from halfstep.precision.plan import Plan
from halfstep.step.clip import Clip
from halfstep.step.ema import Ema
from halfstep.step.optim.by_name import build_optimizer, make_parameter_groups
from halfstep.step.schedule import ScheduleOptions, build_schedule
from halfstep.step.step import GuardedStep

OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": True},
    "adagrad": {"lr_decay": 0.01},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "asgd": {"t0": 2},
}


class Queue(nn.Module):
    """Keeps the batches it has seen in a buffer that grows; in evaluation the last row only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach()]) if self.training else x[-1]
        return self.norm(self.inner(x)).square().mean()  # type: ignore[no-any-return]


def plan(precision: str = "fp32", device: str = "cpu") -> Plan:
    return Plan(
        asked=precision, granted=precision, reason="test", device=device, device_name="test",
        simulated=device == "cpu" and precision in ("bf16", "fp16", "tf32"),
    )  # fmt: skip


class TinyNet(nn.Module):
    """Convolution, BatchNorm (writes buffers in forward), linear head. The BatchNorm bias starts at -0.0."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        with torch.no_grad():
            self.norm.bias.fill_(-0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


class MatrixNet(nn.Module):
    """Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, affine=False)
        self.head = nn.Linear(2 * 6 * 6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).flatten(1))


def make_model(optimizer: str = "adamw", device: str = "cpu") -> nn.Module:
    torch.manual_seed(7)
    return (MatrixNet() if optimizer == "muon" else TinyNet()).to(device)


def make_step(
    optimizer: str = "adamw", precision: str = "fp32", *, device: str = "cpu", ema: bool = True, **more: Any
) -> GuardedStep:
    model = make_model(optimizer, device)
    groups = make_parameter_groups(model, 0.01, decay_all=optimizer == "rprop")
    if optimizer == "rprop":
        groups = [{"params": groups[0]["params"]}]
    built = build_optimizer(optimizer, groups, lr=1e-2, options=OPTIONS.get(optimizer))
    schedule = build_schedule(ScheduleOptions(name="cosine", total_steps=40, warmup_steps=3))
    more.setdefault("clip", Clip(limit=1.0))
    average = Ema(model, decay=0.9) if ema else None
    return GuardedStep(model, built, plan(precision, device), schedules=[schedule], ema=average, **more)


def batch(seed: int, size: int = 4, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        "image": torch.randn(size, 2, 6, 6, generator=generator),
        "label": torch.randint(0, 3, (size,), generator=generator),
        "index": torch.arange(size) + 100 * seed,
    }
    return {name: value.to(device) for name, value in made.items()}


def poisoned(seed: int = 99, device: str = "cpu") -> dict[str, Tensor]:
    bad = batch(seed, device=device)
    bad["image"][0, 0, 0, 0] = float("nan")
    return bad


def loss_of(model: nn.Module) -> Any:
    def loss_fn(b: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(b["image"]).float(), b["label"])

    return loss_fn


def everything(step: GuardedStep) -> dict[str, Tensor]:
    """Every tensor that a bad step must leave alone, cloned."""
    found = {f"model.{k}": v for k, v in step.model.state_dict().items()}
    for k, optimizer in enumerate(step.optimizers):
        names = {id(p): n for n, p in step.model.named_parameters()}
        for p, own in optimizer.state.items():
            found |= {f"optimizer{k}.{names[id(p)]}.{n}": v for n, v in own.items() if torch.is_tensor(v)}
    if step.ema is not None:
        found |= {f"ema.{k}": v for k, v in step.ema.state_dict().items()}
    found |= {"committed": step.committed, **step.spikes.state_dict()}
    return {name: value.detach().clone() for name, value in found.items()}


def copy_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copy weights, gradients and optimizer state."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found |= {name: parameter, f"{name}.grad": parameter.grad}
        found |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def bits(tensor: Tensor) -> Tensor:
    views = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return tensor.contiguous().view(-1).view(views[tensor.element_size()]).cpu()


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys(), sorted(left.keys() ^ right.keys())
    differing = [name for name in left if not torch.equal(bits(left[name]), bits(right[name]))]
    assert not differing, f"changed: {differing}"


def graph_is_held(parameter: nn.Parameter, forward: Callable[[], object]) -> bool:
    """Whether the autograd graph of a forward without a backward outlives it."""
    kept = forward()
    get_gradient_edge(parameter).node.metadata["seen"] = True
    del kept
    gc.collect()
    return "seen" in get_gradient_edge(parameter).node.metadata
