"""Pieces of random training programs: layers, terms of a loss, options of hs.Step, and what users do between steps.

fuzzed_loops.py puts them together. Each table maps a name, as a `Program` holds it, to a function."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from captured_features import Lion

NUM_STEPS, ROWS, INPUTS, WIDTH, CLASSES, TOKENS = 15, 5, 4, 6, 3, 7

Action = tuple[int, str, int]
"""Before which step, what, and a number that chooses among its variants."""


@dataclass(frozen=True)
class Program:
    """One training run. All names are keys of the tables below."""

    layers: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    actions: tuple[Action, ...] = ()
    optimizer: str = "adamw"
    callable: str = "function"
    batch: str = "dict"
    mode: str = "graph"

    @property
    def names(self) -> set[str]:
        actions = {name for _, name, _ in self.actions}
        return {*self.layers, *self.terms, *self.options, *actions, self.optimizer, self.callable, self.batch}


# --- layers: each takes and returns (rows, WIDTH) ---


class Layer(nn.Module):
    """One layer of the model. `run` is called with it, the activations and the tokens of the batch."""

    def __init__(self, run: Callable[[Any, Tensor, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.run(self, x, tokens)


def wrap(make: Callable[[], nn.Module]) -> Callable[[], Layer]:
    return lambda: Layer(lambda own, x, tokens: own.inner(x), inner=make())


def make_weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)


def clamp_weight(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        own.weight.clamp_(-0.3, 0.3)
    return x @ own.weight


def replace_buffer(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    own.mean = 0.9 * own.mean + 0.1 * x.detach().mean(0)
    return x - own.mean


def write_buffer(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    own.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - own.mean


def remember_rows(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    before = own.hidden if own.hidden.shape == x.shape else torch.zeros_like(x)
    out = torch.tanh(own.inner(x) + before)
    own.hidden = out.detach()
    return out


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return 2 * gradient * (x.abs() < 3)


def use_cache(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    before, own.cache = own.cache, x.detach().mean(0)
    return x if before is None else x - before


def register_late(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    if not hasattr(own, "late"):
        own.register_buffer("late", x.detach().mean(0))
    return x - own.late


def checkpoint_block(own: Any, x: Tensor, tokens: Tensor) -> Tensor:
    return checkpoint(own.inner, x, use_reentrant=False)


def make_masked_by_hook() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    mask = (torch.rand(WIDTH, WIDTH) > 0.3).float()

    def apply(module: Any, arguments: Any) -> None:
        module.weight.data.mul_(mask)

    layer.register_forward_pre_hook(apply)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": wrap(lambda: nn.Linear(WIDTH, WIDTH)),
    "relu_in_place": wrap(lambda: nn.ReLU(inplace=True)),
    "layer_norm": wrap(lambda: nn.LayerNorm(WIDTH)),
    "batch_norm": wrap(lambda: nn.BatchNorm1d(WIDTH)),
    "dropout": wrap(lambda: nn.Dropout(0.3)),
    "noise": lambda: Layer(lambda own, x, tokens: x + 0.1 * torch.randn_like(x) if own.training else x),
    "weight_norm": wrap(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "spectral_norm": wrap(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "frozen": wrap(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "masked_by_hook": wrap(make_masked_by_hook),
    "checkpointed": lambda: Layer(checkpoint_block, inner=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())),
    "checkpointed_dropout": lambda: Layer(checkpoint_block, inner=nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())),
    "embedding": lambda: Layer(lambda own, x, tokens: x + own.inner(tokens), inner=nn.Embedding(TOKENS, WIDTH)),
    "max_norm": lambda: Layer(
        lambda own, x, tokens: x + own.inner(tokens), inner=nn.Embedding(TOKENS, WIDTH, max_norm=1.0)
    ),
    "clamped_weight": lambda: Layer(clamp_weight, weight=nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)),
    "replaced_buffer": lambda: Layer(replace_buffer, mean=torch.zeros(WIDTH)),
    "written_buffer": lambda: Layer(write_buffer, mean=torch.zeros(WIDTH)),
    "remembered_rows": lambda: Layer(remember_rows, inner=nn.Linear(WIDTH, WIDTH), hidden=torch.zeros(ROWS, WIDTH)),
    "autograd_function": lambda: Layer(lambda own, x, tokens: Doubled.apply(x)),
    "scaled": lambda: Layer(lambda own, x, tokens: x * own.scale, scale=1.0),
    "switched": lambda: Layer(
        lambda own, x, tokens: own.inner(x) if own.is_on else x, inner=nn.Linear(WIDTH, WIDTH), is_on=True
    ),
    "cached": lambda: Layer(use_cache, cache=None),
}  # fmt: skip
EAGER_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lazy_buffer": lambda: Layer(register_late),
    "cumulative_norm": wrap(lambda: nn.BatchNorm1d(WIDTH, momentum=None)),
    "data_branch": lambda: Layer(
        lambda own, x, tokens: own.inner(x) if x.sum() > 0 else x, inner=nn.Linear(WIDTH, WIDTH)
    ),
    "selected_rows": lambda: Layer(lambda own, x, tokens: x + x[x[:, 0] > 0].sum(0)),
}
"""Layers that torch cannot trace. python_values.py and captured_faults.py have more of them."""


class Model(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.layers = nn.ModuleList(ALL_LAYERS[name]() for name in names)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.inlet(x))
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(x)


ALL_LAYERS = LAYERS | EAGER_LAYERS


# --- the user's loop: everything that loss_fn, hooks and actions read and write ---


@dataclass(eq=False)
class World:
    program: Program
    model: Model
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=lambda: {"beta": 1.0, "smoothing": 0.0, "limit": 4.0, "power": 1.5})
    kept: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=lambda: {"raises": False, "interrupts": False, "is_late": False})
    recent: list[Any] = field(default_factory=lambda: [0.0])
    alpha: Any = 1.0
    tensor: Tensor = field(default_factory=lambda: torch.ones(()))
    step: Any = None
    set_in_closure: Callable[[float], None] = lambda value: None
    terms: list[Callable[..., Tensor | None]] = field(default_factory=list)
    rows: int = ROWS
    dtype: torch.dtype = torch.float32
    spoiled: str = ""
    """What is wrong with the next window only."""
    handles: list[Any] = field(default_factory=list)
    extra: nn.Module = field(default_factory=lambda: nn.Linear(WIDTH, CLASSES).requires_grad_(False))
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))
    second: Any = None
    """Another hs.Step, of the head alone."""
    saved: dict[str, Any] = field(default_factory=dict)
    static: Any = None
    """The batch's tensors, where the loop writes each batch into the same ones."""
    commits: list[Any] = field(default_factory=list)
    """What hooks around the commit have seen."""

    def find(self, kind: type) -> list[Any]:
        return [module for module in self.model.modules() if isinstance(module, kind)]


FACTOR = 1.0


# --- terms: what loss_fn does with batch, output and loss; a term that returns nothing leaves the loss as it is ---


def average_in_place(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.recent[0] = world.recent[0] * 0.9 + loss.detach() * 0.1


def divide_by_average(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    mean = world.kept["mean"] = 0.5 * world.kept.get("mean", torch.ones(())) + 0.5 * loss.detach()
    return loss / mean


def carry(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    before = world.kept.get("hidden")
    hidden = torch.tanh(out.mean(0) if before is None else out.mean(0) + before)
    world.kept["hidden"] = hidden.detach()
    return loss + hidden.square().mean()


def keep(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["out"] = out.detach()


def keep_input(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["x"] = x


def keep_view(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["row"] = out.detach()[0]
    world.kept["all"] = out.detach()


def keep_alias(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["first"] = world.kept["second"] = out.detach()


def keep_weight(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    world.kept["head"] = world.model.head.weight.detach()
    return loss + 0.1 * (world.kept["head"] - world.model.head.weight * 0.5).square().mean()


def keep_row_of_input(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["input row"] = x[0]


def average_where_it_is(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    if "running" not in world.kept:
        world.kept["running"] = out.detach().mean(0)
    world.kept["running"].mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
    return loss + (out - world.kept["running"]).square().mean()


def move_teacher_in_loss(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    with torch.no_grad():
        for slow, quick in zip(world.extra.parameters(), world.model.head.parameters(), strict=True):
            slow.lerp_(quick, 0.1)
    return loss + F.mse_loss(out, world.extra(torch.ones(len(x), WIDTH)).detach())


def count_into_tensor(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    world.saved["calls"].add_(1)
    return loss * (1 + 0.01 * world.saved["calls"])


def run_again(world: World, x: Tensor) -> Tensor:
    """Call the model once more: layers draw, count and write twice."""
    return world.model(x, torch.zeros(len(x), dtype=torch.long))  # type: ignore[no-any-return]


def penalize_slope(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    slope = world.step.grad(run_again(world, x).sum(), x)
    return loss + 0.1 * slope.square().mean()


def penalize_curve(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    head, inlet = world.model.head, world.model.inlet
    (slope,) = torch.autograd.grad(torch.tanh(inlet(x)).square().sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return loss + 0.1 * curve.mean() + head.weight.square().mean()


def attack(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(run_again(world, x).sum(), x)
    return loss + run_again(world, x + 0.1 * slope.sign()).square().mean()


def balance(world: World, x: Tensor, out: Tensor, loss: Tensor) -> Tensor:
    weight, other = world.model.head.weight, out.square().mean()
    if not weight.requires_grad:
        return loss
    norms = [torch.autograd.grad(one, weight, retain_graph=True)[0].norm() for one in (loss, other)]
    return loss + (norms[0] / (norms[1] + 1e-4)).clamp(0, 10).detach() * other


def fail_if_asked(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    if world.flags["raises"]:
        raise ValueError(f"asked to fail on {len(x)} rows")
    if world.flags["interrupts"]:
        raise KeyboardInterrupt


def keep_then_fail(world: World, x: Tensor, out: Tensor, loss: Tensor) -> None:
    world.kept["before"] = out.detach()
    world.kept["num"] = len(x)
    fail_if_asked(world, x, out, loss)


Term = Callable[[World, Tensor, Tensor, Tensor], Tensor | None]
TERMS: dict[str, Term] = {
    "dict": lambda world, x, out, loss: loss * world.numbers["beta"],
    "attribute": lambda world, x, out, loss: loss * world.alpha,
    "global": lambda world, x, out, loss: loss * FACTOR,
    "tensor": lambda world, x, out, loss: loss * world.tensor,
    "divide": lambda world, x, out, loss: loss + out.square().mean() / world.numbers["beta"],
    "clamp": lambda world, x, out, loss: loss + out.clamp(max=world.numbers["limit"]).mean(),
    "power": lambda world, x, out, loss: loss + 0.01 * out.abs().pow(world.numbers["power"]).mean(),
    "branch": lambda world, x, out, loss: loss * 2 if world.flags["is_late"] else loss,
    "rand": lambda world, x, out, loss: loss * (0.5 + torch.rand(())),
    "penalty": lambda world, x, out, loss: loss + 1e-3 * sum(p.square().sum() for p in world.model.parameters()),
    "average_in_list": average_in_place, "divide_by_average": divide_by_average, "carry": carry,
    "keep": keep, "keep_input": keep_input, "keep_alias": keep_alias, "running": average_where_it_is,
    "moved_in_loss": move_teacher_in_loss, "written_count": count_into_tensor, "fail": fail_if_asked,
    "keep_then_fail": keep_then_fail, "slope": penalize_slope, "curve": penalize_curve, "attack": attack,
    "balance": balance,
    "differentiated_input": lambda world, x, out, loss: loss + world.model.inlet(x.clone().requires_grad_()).mean(),
}  # fmt: skip
EAGER_TERMS: dict[str, Term] = {
    "own_generator": lambda world, x, out, loss: loss * (1 + torch.rand((), generator=world.generator)),
    "keep_view": keep_view, "keep_weight": keep_weight, "keep_row_of_input": keep_row_of_input,
}  # fmt: skip
ALL_TERMS = TERMS | EAGER_TERMS
BY_FORM = ("smoothing",)
"""Terms that `get_loss` handles itself."""


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    tokens: Tensor


BATCHES: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor, Tensor]]]] = {
    "dict": (lambda x, y, t: {"x": x, "y": y, "t": t}, lambda b: (b["x"], b["y"], b["t"])),
    "tuple": (lambda x, y, t: (x, y, t), lambda b: (b[0], b[1], b[2])),
    "nested": (lambda x, y, t: {"in": [x, t], "kind": "plain", "y": y}, lambda b: (b["in"][0], b["y"], b["in"][1])),
    "dataclass": (Sample, lambda b: (b.x, b.y, b.tokens)),
}


def get_loss(world: World, scale: Any, batch: Any) -> Any:
    x, y, tokens = BATCHES[world.program.batch][1](batch)
    out = world.model(x, tokens)
    smoothing = world.numbers["smoothing"] if "smoothing" in world.program.terms else 0.0
    loss = F.cross_entropy(out, y, label_smoothing=smoothing) * scale
    for term in world.terms:
        changed = term(world, x, out, loss)
        loss = loss if changed is None else changed
    return loss


class Trainer:
    def __init__(self, world: World) -> None:
        self.world, self.scale = world, 1.0

    def get_loss(self, batch: Any) -> Any:
        return get_loss(self.world, self.scale, batch)

    __call__ = get_loss


def make_loss_fn(world: World) -> Any:
    """Return what gives the loss function of each step; its attribute `other` is another loss function."""
    kind, trainer, factor = world.program.callable, Trainer(world), 1.0

    def set_factor(value: float) -> None:
        nonlocal factor
        factor = trainer.scale = value

    def loss_fn(batch: Any) -> Any:
        return get_loss(world, factor, batch)

    def other(batch: Any) -> Any:
        x, y, tokens = BATCHES[world.program.batch][1](batch)
        return world.model(x, tokens).square().mean()

    world.set_in_closure = set_factor
    made: dict[str, Callable[[int], Callable[[Any], Any]]] = {
        "function": lambda step: loss_fn,
        "lambda": lambda step: lambda batch: get_loss(world, factor, batch),
        "partial": lambda step: functools.partial(get_loss, world, factor),
        "method": lambda step: trainer.get_loss,
        "object": lambda step: trainer,
        "two": lambda step: other if step % 3 == 2 else loss_fn,
    }
    chosen: Any = made[kind]
    chosen.other = other
    return chosen


CALLABLES = ("function", "lambda", "partial", "method", "object", "two")


# --- options of hs.Step, and optimizers ---


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda own: hs.per_step(torch.optim.lr_scheduler.CosineAnnealingLR(own, T_max=8)),
    "per_epoch": lambda own: hs.per_epoch(torch.optim.lr_scheduler.StepLR(own, 1, gamma=0.5)),
    "plateau": lambda own: torch.optim.lr_scheduler.ReduceLROnPlateau(own, factor=0.5, patience=0),
    "function_schedule": lambda own: lambda step: 1 / (1 + step),
}


OPTIONS: dict[str, Callable[[World], dict[str, Any]]] = {
    "clip": lambda world: {"clip_norm": 0.5},
    "clip_value": lambda world: {"clip_norm": 0.1, "clip_type": "value"},
    "accumulate": lambda world: {"accumulate": 3},
    "ema": lambda world: {"ema_decay": 0.9},
    "skip_spikes": lambda world: {"skip_spikes": True},
    "rollback": lambda world: {
        "guard": {"on_fault": "rollback", "snapshot_every": 3, "max_consecutive": 2, "margin": 1}
    },
    "one_graph": lambda world: {},
    "watch": lambda world: {"watch": 4},
    "on_commit": lambda world: {"on_commit": lambda model: read_kept(world)},
    "on_gradients": lambda world: {"on_gradients": lambda model: halve_head(model, world)},
    "capsules": lambda world: {"capsules": tempfile.mkdtemp()},
    "second_step": lambda world: {},
    **{kind: (lambda world, kind=kind: {"schedule": SCHEDULES[kind](world.optimizers[0])}) for kind in SCHEDULES},
}


def read_kept(world: World) -> None:
    """Note the tensors that loss_fn has kept in this step."""
    if world.flags.get("commit raises"):
        raise OSError("a hook fails")
    tensors = {name: value for name, value in world.kept.items() if isinstance(value, Tensor)}
    world.commits.append({name: float(value.detach().double().sum()) for name, value in tensors.items()})


def halve_head(model: Any, world: World) -> None:
    read_kept(world)
    if model.head.weight.grad is not None:
        model.head.weight.grad.mul_(0.5)


OPTIMIZERS: dict[str, Callable[[Model], list[torch.optim.Optimizer]]] = {
    "adamw": lambda model: [torch.optim.AdamW(model.parameters(), 2**-6, fused=True)],
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), 2**-4, momentum=0.9, weight_decay=0.01, fused=True)],
    "head_later": lambda model: [torch.optim.AdamW(model.head.parameters(), 2**-6, fused=True)],
    "rmsprop": lambda model: [torch.optim.RMSprop(model.parameters(), 2**-7)],
    "own": lambda model: [Lion(model.parameters(), 2**-6)],
}


# --- actions: what users do between two steps ---


def choose(world: World, number: int) -> nn.Parameter:
    parameters = list(world.model.parameters())
    return parameters[number % len(parameters)]


@torch.no_grad()
def write_weights(world: World, number: int) -> None:
    weight = choose(world, number)
    ways: list[Callable[[], object]] = [
        lambda: weight.mul_(1.1), lambda: weight.data.add_(0.1), lambda: weight.copy_(weight * 0.9),
        lambda: setattr(weight, "data", weight.data.clone() * 1.2), lambda: weight.fill_(0.1),
        lambda: setattr(weight, "data", weight.data.t().contiguous().t()),
    ]  # fmt: skip
    ways[number % len(ways)]()


def add_group(world: World, number: int) -> None:
    known = {id(p) for o in world.optimizers for group in o.param_groups for p in group["params"]}
    new = [p for p in world.model.parameters() if id(p) not in known]
    if new:
        world.optimizers[0].add_param_group({"params": new})


def add_hook(world: World, number: int) -> None:
    head, inlet = world.model.head, world.model.inlet
    ways: list[Callable[[], Any]] = [
        lambda: head.register_forward_hook(lambda module, args, out: out * 0.5),
        lambda: inlet.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,)),
        lambda: head.weight.register_hook(lambda gradient: gradient * 0.5),
        lambda: head.register_full_backward_hook(lambda module, ins, outs: None),
        lambda: head.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)),
        lambda: head.register_forward_hook(lambda module, args, out: world.kept.update(hooked=out.detach())),
        lambda: nn.modules.module.register_module_forward_hook(lambda module, args, out: None),
        lambda: world.optimizers[0].register_step_post_hook(lambda *_: read_kept(world)),
        lambda: world.optimizers[0].register_step_pre_hook(lambda *_: halve_head(world.model, world)),
    ]
    world.handles.append(ways[number % len(ways)]())


def remove_hook(world: World, number: int) -> None:
    if world.handles:
        world.handles.pop(number % len(world.handles)).remove()


def set_float(world: World, number: int) -> None:
    global FACTOR
    value = 1.0 + 0.3 * (number % 5)
    value = [value, np.float32(value), np.float64(value), int(value) + 1, bool(number % 2)][number % 5]
    world.numbers["beta"] = value
    world.alpha = FACTOR = value
    world.set_in_closure(value)
    world.tensor = torch.full((), float(value)) if number % 2 else world.tensor.mul_(1.5)
    for layer in world.find(Layer):
        if hasattr(layer, "scale"):
            layer.scale = value


def set_clamp(world: World, number: int) -> None:
    world.numbers["limit"], world.numbers["power"] = 0.5 + number % 3, 1.0 + (number % 4) / 2


def set_flags(world: World, number: int) -> None:
    world.flags["is_late"] = bool(number % 2)
    for layer in world.find(Layer):
        if hasattr(layer, "is_on"):
            layer.is_on = bool(number % 3)


def set_backend(world: World, number: int) -> None:
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    if number % 4 == 0:
        cudnn.benchmark = not cudnn.benchmark
    elif number % 4 == 1:
        torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    elif number % 4 == 2:
        mkldnn.enabled = not mkldnn.enabled
    else:
        cudnn.deterministic = not cudnn.deterministic


def freeze(world: World, number: int) -> None:
    weight = choose(world, number)
    weight.requires_grad_(not weight.requires_grad)


def load_model(world: World, number: int) -> None:
    if "model" in world.saved and number % 3 and set(world.saved["model"]) == set(world.model.state_dict()):
        world.model.load_state_dict(world.saved["model"], assign=number % 3 == 2 and number > 9)
    else:
        world.saved["model"] = copy.deepcopy(world.model.state_dict())


def load_optimizer(world: World, number: int) -> None:
    optimizer = world.optimizers[0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_step(world: World, number: int) -> None:
    if "step" in world.saved and number % 3:
        world.step.load_state_dict(world.saved["step"])
    else:
        world.saved["step"] = copy.deepcopy(world.step.state_dict())


def set_rate(world: World, number: int) -> None:
    """Write learning rates that fp32 holds exactly: a captured step reads them from an fp32 tensor."""
    if any(kind in world.program.options for kind in SCHEDULES):
        return
    for optimizer in world.optimizers:
        optimizer.param_groups[-1]["lr"] = 2.0 ** -(4 + number % 4)


def set_training(world: World, number: int) -> None:
    if number % 3 == 0:
        world.model.train(not world.model.training)
    else:
        modules = list(world.model.modules())
        one = modules[number % len(modules)]
        one.train(not one.training)


def set_dropout(world: World, number: int) -> None:
    for layer in world.find(nn.Dropout):
        layer.p = 0.1 * (number % 5)
    for layer in world.find(nn.BatchNorm1d):
        layer.momentum = 0.1 * (1 + number % 3)
    for layer in world.find(nn.LayerNorm):
        layer.eps = 10.0 ** -(3 + number % 3)


def set_smoothing(world: World, number: int) -> None:
    value = 0.1 * (number % 4)
    world.numbers["smoothing"] = np.float32(value) if number % 2 else value


def spoil_weight(world: World, number: int) -> None:
    """Let one step begin with an infinite weight, which the user repairs afterwards."""
    weight = choose(world, number)
    with torch.no_grad():
        world.saved["repaired"] = weight, weight.clone()
        weight[(0,) * weight.ndim] = float("inf")


def replace_state(world: World, number: int) -> None:
    """Replace tensors in the state of an optimizer."""
    for own in world.optimizers[0].state.values():
        own.update({name: value * 0.5 for name, value in own.items() if name.startswith(("exp", "mom", "square"))})


def write_state(world: World, number: int) -> None:
    for own in world.optimizers[0].state.values():
        for name, value in own.items():
            if isinstance(value, Tensor) and name != "step":
                value.zero_()


def set_tensor_rate(world: World, number: int) -> None:
    if not any(kind in world.program.options for kind in SCHEDULES):
        world.optimizers[0].param_groups[0]["lr"] = torch.tensor(2.0**-7)


def fail_in_a_layer(world: World, number: int) -> None:
    def fail(module: nn.Module, arguments: Any) -> None:
        raise RuntimeError("a hook fails")

    world.saved["once"] = world.model.head.register_forward_pre_hook(fail)


def reset_state(world: World, number: int) -> None:
    with torch.no_grad():
        if number % 3 == 0:
            world.kept.pop("hidden", None)
        elif number % 3 == 1 and isinstance(world.kept.get("hidden"), Tensor):
            world.kept["hidden"].zero_()
        for value in world.model.buffers() if number % 3 == 2 else ():
            value.zero_()


def write_kept(world: World, number: int) -> None:
    """Write into tensors that loss_fn has kept."""
    for value in world.kept.values():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad:
            value.mul_(0.5)


def validate(world: World, number: int) -> None:
    was_training = world.model.training
    world.model.eval()
    averaged = world.step.averaged() if "ema" in world.program.options and number % 2 else contextlib.nullcontext()
    with torch.inference_mode() if number % 3 == 0 else torch.no_grad(), averaged:
        value = world.model(torch.ones(3, INPUTS), torch.zeros(3, dtype=torch.long)).mean()
    world.recent[0] = world.recent[0] * 0.5 + float(value)
    world.model.train(was_training)
    if "plateau" in world.program.options:
        world.step.validated(float(value))


def seed(world: World, number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def clear_gradients(world: World, number: int) -> None:
    if number % 2:
        world.optimizers[0].zero_grad(set_to_none=number % 4 == 1)
    else:
        for weight in world.model.parameters():
            weight.grad = torch.full_like(weight, 3.0)


def train_elsewhere(world: World, number: int) -> None:
    """Let the user's own code run backward through the model."""
    world.model(torch.ones(3, INPUTS), torch.zeros(3, dtype=torch.long)).sum().backward()


def copy_model(world: World, number: int) -> None:
    """Deep-copy, as users do who keep the best model."""
    world.saved["best"] = copy.deepcopy(world.model.state_dict())
    if number % 2:
        copy.deepcopy(world.model)


DTYPES = (torch.float32, torch.float64, torch.float16)
SPOILS = ("nan", "inf", "nan_row", "label", "token", "huge", "ignored")
ACTIONS: dict[str, Callable[[World, int], None]] = {
    function.__name__: function
    for function in (
        write_weights, add_group, add_hook, remove_hook, set_float, set_clamp,
        set_flags, set_backend, freeze, load_model, load_optimizer, load_step, set_rate, set_training,
        set_dropout, set_smoothing, spoil_weight, fail_in_a_layer, replace_state, write_state, set_tensor_rate,
        reset_state, write_kept, validate, seed, clear_gradients, train_elsewhere, copy_model,
    )
} | {
    # Floats change at every step from now on.
    "anneal": lambda world, number: world.saved.update(annealed=number),
    "set_rows": lambda world, number: setattr(world, "rows", ROWS + number % 4 - 1),
    "shorten": lambda world, number: setattr(world, "spoiled", ["one_row", "short_window", "no_rows"][number % 3]),
    "set_dtype": lambda world, number: setattr(world, "dtype", DTYPES[number % 3]),
    "spoil": lambda world, number: setattr(world, "spoiled", SPOILS[number % 7]),
    "fail_once": lambda world, number: world.flags.update({"interrupts" if number % 3 == 0 else "raises": True}),
    "fail_in_commit": lambda world, number: world.flags.update({"commit raises": True}),
    "use_uneven_batches": lambda world, number: world.saved.update(uneven=True),
    # Changes what torch makes of Python numbers, as users of fp64 do.
    "set_default_dtype": lambda world, number: torch.set_default_dtype(torch.float64 if number % 2 else torch.float32),
    "use_static_batch": lambda world, number: setattr(world, "static", () if world.static is None else None),
    # The next step is made by compute() and commit().
    "split_call": lambda world, number: world.saved.update(split=True),
    "finish": lambda world, number: world.step.finish(),
    "end_epoch": lambda world, number: world.step.epoch_ended(),
}  # fmt: skip
