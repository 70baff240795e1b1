"""Loss functions that read Python values of every kind: a captured step must follow each, or stay eager and say why.

Each function makes a `Case` on a device. Tests train it with and without the fast path, and compare every bit."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NUM_STEPS, BATCH = 16, 6


@dataclass
class Case:
    model: nn.Module
    loss_fn: Callable[[Any], Any]
    why_eager: str = ""
    """A part of the reason why it is not captured; empty if it is."""
    before: Callable[[int], None] = lambda step: None
    """Called before each step, with its number."""
    wrap: Callable[[Tensor, Tensor, int], Any] = lambda x, y, step: (x, y)
    """Make the batch of inputs and labels."""
    noted: list[Any] = field(default_factory=list)
    """Python side effects, which must be the same with and without the fast path."""
    optimizer: torch.optim.Optimizer | None = None
    num_rows: Callable[[int], int] = lambda step: BATCH
    make_loss: Callable[[int], Callable[[Any], Any]] | None = None
    """Make the loss function anew for each step."""


def make_model(device: torch.device, *middle: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.ReLU(), *(middle or (nn.Identity(),)), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(device)


def get_loss(model: nn.Module, batch: Any, factor: Any = 1.0) -> Tensor:
    return F.cross_entropy(model(batch[0]) * factor, batch[1])


# --- Python numbers ---


def float_in_dict(device: torch.device) -> Case:
    model, weights = make_model(device), {"beta": 1.0}

    def anneal(step: int) -> None:
        weights["beta"] = 1.0 + 0.1 * step

    return Case(model, lambda batch: get_loss(model, batch, weights["beta"]), before=anneal)


def temperature_attribute(device: torch.device) -> Case:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.temperature = make_model(device), 1.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x) / self.temperature
            return out

    model = Scaled()

    def anneal(step: int) -> None:
        model.temperature = 1.0 + 0.05 * step

    return Case(model, lambda batch: get_loss(model, batch), before=anneal)


def branch_on_epoch(device: torch.device) -> Case:
    model, state = make_model(device), {"epoch": 0}

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        return loss * 2 if state["epoch"] > 3 else loss

    def advance(step: int) -> None:
        state["epoch"] = step // 3

    return Case(model, loss_fn, before=advance)


class Counter:
    calls = 0


def counter(device: torch.device) -> Case:
    model, count = make_model(device), Counter()
    noted: list[Any] = []

    def loss_fn(batch: Any) -> Tensor:
        count.calls += 1
        return get_loss(model, batch) * (1 + 0.01 * count.calls)

    return Case(model, loss_fn, "such as a counter", noted=noted, before=lambda step: noted.append(count.calls))


def growing_list(device: torch.device) -> Case:
    model = make_model(device)
    losses: list[Tensor] = []

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        losses.append(loss.detach())
        return loss

    return Case(model, loss_fn, "changes", noted=losses)


def python_random(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch, 1 + random.random()), "Dynamo does not know")


def numpy_random(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch, 1 + float(np.random.rand())), "data-dependent")


def clock(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch) + 0 * (time.time() > 0), "time")


def file_read(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch) + len(Path(__file__).read_text()) * 0, "builtin")


def item(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch) * (1 + batch[0].sum().item() * 0.1))


def printing(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        print(end="")
        return get_loss(model, batch)

    return Case(model, loss_fn, "print")


def logged(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        logging.getLogger("mine").info("a step")
        return get_loss(model, batch)

    return Case(model, loss_fn, "logg")


FACTOR = 1.0


def global_number(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        return get_loss(model, batch, FACTOR)

    def change(step: int) -> None:
        global FACTOR
        FACTOR = 1.0 + step // 5

    return Case(model, loss_fn, before=change)


# --- random numbers of torch ---


def torch_rand(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, (batch[0] + torch.rand(batch[0].shape, device=device), batch[1])))


def dropout(device: torch.device) -> Case:
    model = make_model(device, nn.Dropout(0.3))
    return Case(model, lambda batch: get_loss(model, batch))


def dropout_changed(device: torch.device) -> Case:
    layer = nn.Dropout(0.3)
    model = make_model(device, layer)

    def change(step: int) -> None:
        layer.p = 0.3 if step < 8 else 0.1

    return Case(model, lambda batch: get_loss(model, batch), before=change)


def checkpointed_dropout(device: torch.device) -> Case:
    model = make_model(device, nn.Dropout(0.3))

    def loss_fn(batch: Any) -> Tensor:
        out = checkpoint(model, batch[0], use_reentrant=False)
        return F.cross_entropy(out, batch[1])

    return Case(model, loss_fn)


# --- kinds of callables ---


def partial(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, functools.partial(get_loss, model))


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.factor = model, 1.0

    def get_loss(self, batch: Any) -> Tensor:
        return get_loss(self.model, batch, self.factor)

    __call__ = get_loss


def bound_method(device: torch.device) -> Case:
    trainer = Trainer(make_model(device))

    def change(step: int) -> None:
        trainer.factor = 1.0 + 0.01 * step

    return Case(trainer.model, trainer.get_loss, before=change)


def callable_object(device: torch.device) -> Case:
    trainer = Trainer(make_model(device))
    return Case(trainer.model, trainer)


def lambda_in_the_loop(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch), make_loss=lambda step: lambda b: get_loss(model, b, 2.0))


# --- modules that change ---


def norm_in_eval(device: torch.device) -> Case:
    norm = nn.BatchNorm1d(8)
    model = make_model(device, norm)

    def switch(step: int) -> None:
        norm.train(step % 8 < 4)

    return Case(model, lambda batch: get_loss(model, batch), before=switch)


def freezing(device: torch.device) -> Case:
    model = make_model(device)

    def switch(step: int) -> None:
        model[0].weight.requires_grad_(step < 9)

    return Case(model, lambda batch: get_loss(model, batch), before=switch)


def hook_added(device: torch.device) -> Case:
    model = make_model(device)

    def add(step: int) -> None:
        if step == 9:
            model[0].register_forward_hook(lambda module, args, out: out * 0.5)

    return Case(model, lambda batch: get_loss(model, batch), before=add)


def global_hook_added(device: torch.device) -> Case:
    model = make_model(device)
    handles: list[Any] = []

    def add(step: int) -> None:
        if step == 9:
            handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: None))
        if step == NUM_STEPS - 1:
            handles.pop().remove()

    return Case(model, lambda batch: get_loss(model, batch), "global module hook", before=add)


def submodule_replaced(device: torch.device) -> Case:
    model = make_model(device)

    def replace(step: int) -> None:
        if step == 9:
            model[1] = nn.Tanh()

    return Case(model, lambda batch: get_loss(model, batch), before=replace)


def buffer_replaced(device: torch.device) -> Case:
    model = make_model(device)
    model.register_buffer("scale", torch.ones((), device=device))

    def replace(step: int) -> None:
        if step == 9:
            model.scale = torch.full((), 2.0, device=device)

    return Case(model, lambda batch: get_loss(model, batch, model.scale), before=replace)


def eps_changed(device: torch.device) -> Case:
    norm = nn.LayerNorm(8, device=device)
    model = make_model(device, norm)

    def change(step: int) -> None:
        norm.eps = 1e-5 if step < 8 else 1e-2

    return Case(model, lambda batch: get_loss(model, batch), before=change)


def state_loaded(device: torch.device) -> Case:
    model = make_model(device)
    first = {name: value.clone() for name, value in model.state_dict().items()}

    def load(step: int) -> None:
        if step == 9:
            model.load_state_dict(first)

    return Case(model, lambda batch: get_loss(model, batch), before=load)


def two_models(device: torch.device) -> Case:
    both = nn.ModuleList([make_model(device), make_model(device)])
    state = {"which": 0}

    def switch(step: int) -> None:
        state["which"] = step % 2

    return Case(both, lambda batch: get_loss(both[state["which"]], batch), before=switch)


def output_stored(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        out = model(batch[0])
        model.last = out.detach()
        return F.cross_entropy(out, batch[1])

    return Case(model, loss_fn)


def graph_stored(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        model.last = model(batch[0])
        return F.cross_entropy(model.last, batch[1])

    return Case(model, loss_fn, "autograd graph")


# --- optimizers ---


def rate_by_hand(device: torch.device) -> Case:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def change(step: int) -> None:
        # Numbers that fp32 holds exactly: a captured step reads them from an fp32 tensor.
        optimizer.param_groups[0]["lr"] = 2.0 ** -(6 + step // 3)

    return Case(model, lambda batch: get_loss(model, batch), before=change, optimizer=optimizer)


def decay_by_hand(device: torch.device) -> Case:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def change(step: int) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.01 if step < 8 else 0.1

    return Case(model, lambda batch: get_loss(model, batch), before=change, optimizer=optimizer)


def group_added(device: torch.device) -> Case:
    model = make_model(device)
    optimizer = torch.optim.AdamW(model[0].parameters(), 1e-2, fused=True)

    def add(step: int) -> None:
        if step == 9:
            optimizer.add_param_group({"params": list(model[3].parameters())})

    return Case(model, lambda batch: get_loss(model, batch), before=add, optimizer=optimizer)


# --- batches ---


def batch_in_place(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return get_loss(model, batch)

    return Case(model, loss_fn, "writes into")


def nested_dict(device: torch.device) -> Case:
    model = make_model(device)
    return Case(
        model,
        lambda batch: get_loss(model, (batch["in"]["x"][0], batch["y"])),
        wrap=lambda x, y, step: {"in": {"x": [x]}, "y": y},
    )


@dataclass
class Sample:
    x: Tensor
    y: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def dataclass_batch(device: torch.device) -> Case:
    model = make_model(device)
    return Case(
        model,
        lambda batch: (get_loss(model, (batch.x, batch.y)), BATCH),
        wrap=lambda x, y, step: Sample(x, y),
    )


def named_tuple_batch(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, (batch.x, batch.y)), wrap=lambda x, y, step: Pair(x, y))


def string_in_batch(device: torch.device) -> Case:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        return get_loss(model, (batch["x"], batch["y"]), 2.0 if batch["kind"] == "hard" else 1.0)

    return Case(
        model,
        loss_fn,
        wrap=lambda x, y, step: {"x": x, "y": y, "kind": "hard" if step % 3 == 0 else "easy"},
    )


def ragged_last_batch(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch), num_rows=lambda step: 3 if step % 4 == 3 else BATCH)


def twelve_shapes(device: torch.device) -> Case:
    model = make_model(device)
    return Case(model, lambda batch: get_loss(model, batch), num_rows=lambda step: 2 + step % 12)


def numpy_in_closure(device: torch.device) -> Case:
    model = make_model(device)
    factors = np.linspace(1, 2, 3).astype(np.float32)

    def loss_fn(batch: Any) -> Tensor:
        return get_loss(model, batch, torch.from_numpy(factors).to(device))

    return Case(model, loss_fn)


def tensor_made_outside(device: torch.device) -> Case:
    model, state = make_model(device), {"noise": torch.ones((), device=device)}

    def make(step: int) -> None:
        state["noise"] = torch.full((), 1.0 + 0.1 * step, device=device)

    return Case(model, lambda batch: get_loss(model, batch, state["noise"]), before=make)


def batch_in_closure(device: torch.device) -> Case:
    """Read the loop's own variables instead of the argument."""
    model, kept = make_model(device), torch.zeros(0)
    labels = kept

    def keep(x: Tensor, y: Tensor, step: int) -> Any:
        nonlocal kept, labels
        kept, labels = x, y
        return x, y

    return Case(model, lambda _: get_loss(model, (kept, labels)), wrap=keep)


def batch_on_the_host(device: torch.device) -> Case:
    model = make_model(device)
    return Case(
        model,
        lambda batch: get_loss(model, (batch[0].to(device), batch[1].to(device))),
        wrap=lambda x, y, step: (x.cpu(), y.cpu()),
    )


@torch.library.custom_op("halfstep_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * FACTOR


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: gradient * FACTOR)


def custom_op(device: torch.device) -> Case:
    model = make_model(device)
    return Case(
        model, lambda batch: F.cross_entropy(scaled(model(batch[0])), batch[1]), "may read more than its inputs"
    )


def lstm(device: torch.device) -> Case:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.lstm(x[:, None])[0][:, -1])
            return out

    model = Recurrent().to(device)
    return Case(model, lambda batch: get_loss(model, batch), "RNN, GRU and LSTM layers ('lstm')")


CASES: dict[str, Callable[[torch.device], Case]] = {
    function.__name__: function
    for function in (
        float_in_dict, temperature_attribute, branch_on_epoch, counter, growing_list, python_random, numpy_random,
        clock, file_read, item, printing, logged, global_number, torch_rand, dropout, dropout_changed,
        checkpointed_dropout, partial, bound_method, callable_object, lambda_in_the_loop, norm_in_eval, freezing,
        hook_added, global_hook_added, submodule_replaced, buffer_replaced, eps_changed, state_loaded, two_models,
        output_stored, graph_stored, rate_by_hand, decay_by_hand, group_added, batch_in_place, nested_dict,
        dataclass_batch, named_tuple_batch, string_in_batch, ragged_last_batch, twelve_shapes, numpy_in_closure,
        tensor_made_outside, batch_in_closure, batch_on_the_host, custom_op, lstm,
    )
}  # fmt: skip


@dataclass
class Trained:
    losses: list[float]
    weights: list[Tensor]
    noted: list[Any]
    modes: list[str]
    why_eager: str


def train(name: str, device: torch.device, fast: Any) -> Trained:
    import halfstep as hs

    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    case = CASES[name](device)
    optimizer = case.optimizer or torch.optim.AdamW(case.model.parameters(), 1e-2, fused=True)
    step = hs.Step(case.model, optimizer, "fp32", fast=fast, clip_norm=1.0)
    draws = torch.Generator().manual_seed(1)
    outcomes, modes = [], []
    for number in range(NUM_STEPS):
        case.before(number)
        rows = case.num_rows(number)
        x, y = torch.randn(rows, 4, generator=draws), torch.randint(0, 3, (rows,), generator=draws)
        batch = case.wrap(x.to(device), y.to(device), number)
        loss_fn = case.make_loss(number) if case.make_loss else case.loss_fn
        outcomes.append(step(loss_fn, [batch]))
        modes.append(step.mode)
    noted = [float(one) for one in case.noted]
    weights = [parameter.detach().clone() for parameter in case.model.parameters()]
    return Trained([one.loss for one in outcomes], weights, noted, modes, step._fast.why_eager)


def assert_same(name: str, device: torch.device) -> None:
    eager, fast = train(name, device, "off"), train(name, device, "graph")
    assert fast.losses == eager.losses
    assert all(torch.equal(one, other) for one, other in zip(fast.weights, eager.weights, strict=True))
    assert fast.noted == eager.noted
    expected = CASES[name](device).why_eager
    if expected:
        assert expected in fast.why_eager
    else:
        assert fast.why_eager == ""
        assert "graph" in fast.modes
