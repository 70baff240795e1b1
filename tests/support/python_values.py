"""Loss functions that read Python values of every kind: a captured step must follow each, or stay eager and say why.

captured_faults.py has floats that change, loss functions made anew, and hooks and groups that are added later."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import captured_faults
from captured_faults import CHANGED_AT, ROWS, Loop, change_once, make_batch
from planted_faults import scaled

NUM_STEPS = 16


def make_model(device: torch.device, *middle: nn.Module) -> nn.Sequential:
    layers = [nn.Linear(4, 8), nn.ReLU(), *(middle or (nn.Identity(),)), nn.Linear(8, 3)]
    return nn.Sequential(*layers).to(device)


def get_loss(model: nn.Module, batch: Any, factor: Any = 1.0) -> Tensor:
    return F.cross_entropy(model(batch[0]) * factor, batch[1])


def plain(device: torch.device, *middle: nn.Module, **fields: Any) -> Loop:
    model = make_model(device, *middle)
    return Loop(model, lambda batch: get_loss(model, batch), **fields)


# --- Python numbers ---


def temperature_attribute(device: torch.device) -> Loop:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.temperature = make_model(device), 1.0

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x) / self.temperature
            return out

    model = Scaled()
    anneal = lambda _, number: setattr(model, "temperature", 1.0 + 0.05 * number)  # noqa: E731
    return Loop(model, lambda batch: get_loss(model, batch), before=anneal)


def branch_on_epoch(device: torch.device) -> Loop:
    model, state = make_model(device), {"epoch": 0}

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        return loss * 2 if state["epoch"] > 3 else loss

    return Loop(model, loss_fn, before=lambda _, number: state.update(epoch=number // 3))


class Counter:
    calls = 0


def counter(device: torch.device) -> Loop:
    model, count = make_model(device), Counter()

    def loss_fn(batch: Any) -> Tensor:
        count.calls += 1
        return get_loss(model, batch) * (1 + 0.01 * count.calls)

    return Loop(model, loss_fn, "such as a counter", kept=vars(count))


def growing_list(device: torch.device) -> Loop:
    model = make_model(device)
    losses: list[Tensor] = []

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        losses.append(loss.detach())
        return loss

    return Loop(model, loss_fn, "changes", kept=losses)


def python_random(device: torch.device) -> Loop:
    random.seed(0)
    model = make_model(device)
    return Loop(model, lambda batch: get_loss(model, batch, 1 + random.random()), "Dynamo does not know")


def numpy_random(device: torch.device) -> Loop:
    np.random.seed(0)
    model = make_model(device)
    return Loop(model, lambda batch: get_loss(model, batch, 1 + float(np.random.rand())), "data-dependent")


def file_read(device: torch.device) -> Loop:
    model = make_model(device)
    return Loop(model, lambda batch: get_loss(model, batch) + len(Path(__file__).read_text()) * 0, "builtin")


def item(device: torch.device) -> Loop:
    model = make_model(device)
    return Loop(model, lambda batch: get_loss(model, batch) * (1 + batch[0].sum().item() * 0.1))


def printing(device: torch.device) -> Loop:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        print(end="")
        return get_loss(model, batch)

    return Loop(model, loss_fn, "print")


FACTOR = 1.0


def global_number(device: torch.device) -> Loop:
    model = make_model(device)

    def change(_: Any, number: int) -> None:
        global FACTOR
        FACTOR = 1.0 + number // 5

    return Loop(model, lambda batch: get_loss(model, batch, FACTOR), before=change)


# --- random numbers of torch ---


def dropout_changed(device: torch.device) -> Loop:
    layer = nn.Dropout(0.3)
    return plain(device, layer, before=change_once(lambda: setattr(layer, "p", 0.1)))


def checkpointed_dropout(device: torch.device) -> Loop:
    model = make_model(device, nn.Dropout(0.3))
    run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    return Loop(model, lambda batch: F.cross_entropy(run(batch[0]), batch[1]))


# --- kinds of callables ---


def partial(device: torch.device) -> Loop:
    model = make_model(device)
    return Loop(model, functools.partial(get_loss, model))


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model, self.factor = model, 1.0

    def get_loss(self, batch: Any) -> Tensor:
        return get_loss(self.model, batch, self.factor)

    __call__ = get_loss


def bound_method(device: torch.device) -> Loop:
    trainer = Trainer(make_model(device))
    anneal = lambda _, number: setattr(trainer, "factor", 1.0 + 0.01 * number)  # noqa: E731
    return Loop(trainer.model, trainer.get_loss, before=anneal)


def callable_object(device: torch.device) -> Loop:
    trainer = Trainer(make_model(device))
    return Loop(trainer.model, trainer)


# --- modules that change ---


def norm_in_eval(device: torch.device) -> Loop:
    norm = nn.BatchNorm1d(8)
    return plain(device, norm, before=lambda _, number: norm.train(number % 8 < 4))


def freezing(device: torch.device) -> Loop:
    loop = plain(device)
    loop.before = change_once(lambda: loop.model[0].requires_grad_(False))  # type: ignore[index]
    return loop


def global_hook_added(device: torch.device) -> Loop:
    handles: list[Any] = []

    def add(_: Any, number: int) -> None:
        if number == CHANGED_AT:
            handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, out: None))
        if number == NUM_STEPS - 1:
            handles.pop().remove()

    return plain(device, why_eager="global module hook", before=add)


def submodule_replaced(device: torch.device) -> Loop:
    loop = plain(device)
    loop.before = change_once(lambda: setattr(loop.model, "1", nn.Tanh()))
    return loop


def buffer_replaced(device: torch.device) -> Loop:
    model = make_model(device)
    model.register_buffer("scale", torch.ones((), device=device))
    replace = change_once(lambda: setattr(model, "scale", torch.full((), 2.0, device=device)))
    return Loop(model, lambda batch: get_loss(model, batch, model.scale), before=replace)


def eps_changed(device: torch.device) -> Loop:
    norm = nn.LayerNorm(8, device=device)
    return plain(device, norm, before=change_once(lambda: setattr(norm, "eps", 1e-2)))


def state_loaded(device: torch.device) -> Loop:
    loop = plain(device)
    first = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.before = change_once(lambda: loop.model.load_state_dict(first))
    return loop


def two_models(device: torch.device) -> Loop:
    both, state = nn.ModuleList([make_model(device), make_model(device)]), {"which": 0}
    switch = lambda _, number: state.update(which=number % 2)  # noqa: E731
    return Loop(both, lambda batch: get_loss(both[state["which"]], batch), before=switch)


def output_stored(device: torch.device) -> Loop:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        out = model(batch[0])
        model.last = out.detach()
        return F.cross_entropy(out, batch[1])

    return Loop(model, loss_fn)


def graph_stored(device: torch.device) -> Loop:
    """Keep tensors for logging without detaching them."""
    model = make_model(device)

    def loss_fn(batch: Any) -> tuple[Tensor, int]:
        model.last = model(batch[0])
        model.logged = {"loss": F.cross_entropy(model.last, batch[1])}
        return model.logged["loss"] + 0.1 * model.last.square().mean(), ROWS

    def check(_: Any, number: int) -> None:
        if number:
            assert not model.last.is_leaf
            with pytest.raises(RuntimeError, match="a second time"):
                model.last.sum().backward()

    return Loop(model, loss_fn, before=check, kept=model.__dict__)


def graph_beyond_the_loss(device: torch.device) -> Loop:
    """Keep an output that could still be used for a gradient after the step."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        model.other = model(batch[0] + 1)
        return get_loss(model, batch)

    return Loop(model, loss_fn, "autograd graph")


# --- code that takes another path while it is traced, or that Dynamo refuses ---


def layer_drop(device: torch.device, probability: float = 0.0) -> Loop:
    """Draw from the CPU's generator whether a layer is left out, as transformers' models do."""
    model = make_model(device, nn.Dropout(0.3))
    model.probability = probability  # type: ignore[assignment]

    def loss_fn(batch: Any) -> Tensor:
        x = batch[0]
        for layer in model:
            drawn = torch.rand([])
            is_left_out = model.training and drawn < model.probability and isinstance(layer, nn.ReLU)
            x = x if is_left_out else layer(x)
        return F.cross_entropy(x, batch[1])

    return Loop(model, loss_fn, "Data-dependent" if 0 < probability < 1 else "")


def layer_dropped_later(device: torch.device) -> Loop:
    loop = layer_drop(device)
    loop.before = change_once(lambda: setattr(loop.model, "probability", 0.9))
    loop.why_eager = "Data-dependent"
    return loop


def eager_path(device: torch.device) -> Loop:
    """Ask torch whether the code is compiled, and draw other random numbers if it is."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        x = batch[0] if torch.compiler.is_compiling() else F.dropout(batch[0], 0.3)
        return get_loss(model, (x, batch[1]))

    return Loop(model, loss_fn)


def refused_path(device: torch.device) -> Loop:
    """Take a path that cannot be traced where the code is compiled."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        if torch.compiler.is_compiling() and batch[1].max().item() > 2:
            raise ValueError("no such class")
        return get_loss(model, batch)

    return Loop(model, loss_fn)


def is_compiled() -> bool:
    return torch.compiler.is_compiling()


def is_captured() -> bool:
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # torch without CUDA
        return False


class Setting:
    """A variable of a library that can be traced only where it is told that it is compiled."""

    def __init__(self) -> None:
        self.in_context, self.value = ContextVar("setting", default=0), 0

    def set(self, value: int) -> None:
        if is_compiled():
            self.value = value
        else:
            self.in_context.set(value)


def context_variable(device: torch.device) -> Loop:
    """Set a variable on its compiled path, and leave out a mask that masks nothing on the eager path."""
    model, setting = make_model(device), Setting()

    def loss_fn(batch: Any) -> Tensor:
        setting.set(1)
        mask = torch.ones_like(batch[1], dtype=torch.bool)[:, None]
        if not is_compiled() and not is_captured() and mask.all():
            return get_loss(model, batch)
        return get_loss(model, (F.dropout(batch[0]) * mask, batch[1]))

    return Loop(model, loss_fn)


def loop_over_time(device: torch.device) -> Loop:
    """Call one operation on the compiled path, and loop for long on the eager path."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        x = batch[0] * 1
        if not is_compiled():
            for _ in range(100):
                x = x * 1
        return get_loss(model, (x, batch[1]))

    return Loop(model, loss_fn)


def no_path(device: torch.device) -> Loop:
    """Take a path that cannot be traced where the code is compiled, and have no other that equals the eager step."""
    model, setting = make_model(device), Setting()

    def loss_fn(batch: Any) -> Tensor:
        if is_compiled() and batch[1].max() > 2:
            raise ValueError("no such class")
        setting.set(1)
        return get_loss(model, (F.dropout(batch[0]) if setting.value else batch[0], batch[1]))

    return Loop(model, loss_fn, "Data-dependent")


def mask_of_constants(device: torch.device) -> Loop:
    """Leave out a mask that masks nothing."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        mask = torch.ones_like(batch[1], dtype=torch.bool)[:, None] & (torch.arange(4, device=device) < 4)
        return get_loss(model, batch if mask.all() else (F.dropout(batch[0]) * mask, batch[1]))

    return Loop(model, loss_fn)


def mask_written(device: torch.device) -> Loop:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        mask = torch.ones_like(batch[1])
        mask.view(-1)[:2] = batch[1][:2]
        return get_loss(model, batch, 1.0 if mask.all() else 2.0)

    return Loop(model, loss_fn, "Data-dependent")


def inputs_require_grad(device: torch.device) -> Loop:
    """Let the input of the first layer require a gradient, as for reentrant checkpointing."""
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        x, y = batch[0].clone(), batch[0] * 2
        x.requires_grad = True
        y.requires_grad_()
        return get_loss(model, (x + y if x.requires_grad else x, batch[1]))

    return Loop(model, loss_fn)


def spectral_norm(device: torch.device) -> Loop:
    """Write into a buffer by `out=`, and assign the result to it."""
    loop = plain(device)
    torch.nn.utils.parametrizations.spectral_norm(loop.model[0])  # type: ignore[index]
    return loop


# --- optimizers ---


def setting_by_hand(device: torch.device, name: str, choose: Callable[[int], float]) -> Loop:
    loop = plain(device)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-2, fused=True)
    loop.before = lambda _, number: loop.optimizer.param_groups[0].update({name: choose(number)})
    return loop


def rate_by_hand(device: torch.device) -> Loop:
    # Numbers that fp32 holds exactly: a captured step reads them from an fp32 tensor.
    return setting_by_hand(device, "lr", lambda number: 2.0 ** -(6 + number // 3))


def decay_by_hand(device: torch.device) -> Loop:
    return setting_by_hand(device, "weight_decay", lambda number: 0.01 if number < 8 else 0.1)


# --- batches ---


def batch_in_place(device: torch.device) -> Loop:
    model = make_model(device)

    def loss_fn(batch: Any) -> Tensor:
        batch[0].mul_(0.5)
        return get_loss(model, batch)

    return Loop(model, loss_fn, "writes into")


@dataclass
class Sample:
    x: Tensor
    y: Tensor


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def wrapped(device: torch.device, wrap: Callable[[Tensor, Tensor], Any], read: Callable[[Any], Any]) -> Loop:
    """Put inputs and labels into another kind of batch; `read` returns them and, optionally, a factor."""
    model = make_model(device)
    make = lambda draws: wrap(*(one.to(device) for one in make_batch(draws)))  # noqa: E731
    return Loop(model, lambda batch: get_loss(model, *read(batch)), make_batch=make)


def nested_dict(device: torch.device) -> Loop:
    return wrapped(device, lambda x, y: {"in": {"x": [x]}, "y": y}, lambda b: ((b["in"]["x"][0], b["y"]),))


def dataclass_batch(device: torch.device) -> Loop:
    loop = wrapped(device, Sample, lambda batch: ((batch.x, batch.y),))
    get_mean = loop.loss_fn
    loop.loss_fn = lambda batch: (get_mean(batch), ROWS)
    return loop


def named_tuple_batch(device: torch.device) -> Loop:
    return wrapped(device, Pair, lambda batch: ((batch.x, batch.y),))


def string_in_batch(device: torch.device) -> Loop:
    kinds = ["hard", "easy", "easy"] * NUM_STEPS
    return wrapped(
        device,
        lambda x, y: {"x": x, "y": y, "kind": kinds.pop(0)},
        lambda batch: ((batch["x"], batch["y"]), 2.0 if batch["kind"] == "hard" else 1.0),
    )


def ragged_last_batch(device: torch.device) -> Loop:
    rows = [ROWS, ROWS, ROWS, 3] * NUM_STEPS
    return plain(device, make_batch=lambda draws: make_batch(draws, rows.pop(0)))


def numpy_in_closure(device: torch.device) -> Loop:
    model, factors = make_model(device), np.linspace(1, 2, 3).astype(np.float32)
    return Loop(model, lambda batch: get_loss(model, batch, torch.from_numpy(factors).to(device)))


def tensor_made_outside(device: torch.device) -> Loop:
    model, state = make_model(device), {"noise": torch.ones((), device=device)}
    make = lambda _, number: state.update(noise=torch.full((), 1.0 + 0.1 * number, device=device))  # noqa: E731
    return Loop(model, lambda batch: get_loss(model, batch, state["noise"]), before=make)


def batch_in_closure(device: torch.device) -> Loop:
    """Read the loop's own variables instead of the argument."""
    model, kept = make_model(device), torch.zeros(0)
    labels = kept

    def make(draws: torch.Generator) -> Any:
        nonlocal kept, labels
        kept, labels = (one.to(device) for one in make_batch(draws))
        return kept, labels

    return Loop(model, lambda _: get_loss(model, (kept, labels)), make_batch=make)


def batch_on_the_host(device: torch.device) -> Loop:
    model = make_model(device)
    move = lambda batch: tuple(one.to(device) for one in batch.values())  # noqa: E731
    make = lambda draws: dict(zip("xy", make_batch(draws), strict=True))  # noqa: E731
    return Loop(model, lambda batch: get_loss(model, move(batch)), make_batch=make)


def custom_op(device: torch.device) -> Loop:
    model = make_model(device)
    loss_fn = lambda batch: F.cross_entropy(scaled(model(batch[0])), batch[1])  # noqa: E731
    return Loop(model, loss_fn, "may read more than its inputs")


def lstm(device: torch.device) -> Loop:
    model = nn.ModuleDict({"lstm": nn.LSTM(4, 8, 2, batch_first=True, dropout=0.1), "head": nn.Linear(8, 3)}).to(device)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model["head"](model["lstm"](batch[0][:, None])[0][:, -1]), batch[1])

    return Loop(model, loss_fn, "without dropout between layers ('lstm')")


CASES: dict[str, Callable[[torch.device], Loop]] = {
    function.__name__: function
    for function in (
        temperature_attribute, branch_on_epoch, counter, growing_list, python_random, numpy_random, file_read,
        item, printing, global_number, dropout_changed, checkpointed_dropout, partial, bound_method,
        callable_object, norm_in_eval, freezing, global_hook_added, submodule_replaced, buffer_replaced, eps_changed,
        state_loaded, two_models, output_stored, graph_stored, graph_beyond_the_loss, rate_by_hand, decay_by_hand,
        batch_in_place,
        nested_dict, dataclass_batch, named_tuple_batch, string_in_batch, ragged_last_batch,
        numpy_in_closure, tensor_made_outside, batch_in_closure, batch_on_the_host, custom_op, lstm,
        layer_drop, layer_dropped_later, eager_path, refused_path, context_variable, loop_over_time, no_path,
        mask_of_constants, mask_written, inputs_require_grad, spectral_norm,
    )
} | {"layer_drop_by_chance": functools.partial(layer_drop, probability=0.5)}  # fmt: skip


def assert_same(name: str, device: torch.device) -> None:
    captured_faults.assert_same(name, device, loops=CASES, length=NUM_STEPS, clip_norm=1.0)
