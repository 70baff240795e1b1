"""Loops that captured steps once trained differently from eager ones, for the CPU's stand-in and for a GPU.

Each function makes a `Loop` on a device; captured_features.py, python_values.py and shared_casts.py have more of them.
`assert_same` trains one with fast="off" and with another mode, and compares every bit: losses, weights, buffers,
optimizer state, the average, spikes, torch's generators and the user's own objects."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep as hs

NUM_STEPS, ROWS = 12, 6
CHANGED_AT = 7  # the first replay is step 5


@dataclass
class Loop:
    model: nn.Module
    loss_fn: Callable[[Any], Any]
    why_eager: str = ""
    """A part of the reason why it is not captured; empty if it is."""
    settings: dict[str, Any] = field(default_factory=dict)
    kept: Any = None
    """Objects that the loop changes: they must be the same at every step."""
    before: Callable[[hs.Step, int], object] = lambda step, number: None
    """Called before each step, with its number."""
    choose_loss: Callable[[int], Callable[[Any], Any]] | None = None
    optimizer: Any = None
    """One, or a list; AdamW if there is none."""
    make_batch: Callable[[torch.Generator], Any] = lambda draws: make_batch(draws)
    mode: str = "graph"
    """What `step.mode` is at the end with fast="graph", if it is captured."""


@dataclass
class Trained:
    history: list[dict[str, Any]]
    step: hs.Step
    modes: list[str]

    @property
    def why_eager(self) -> str:
        return self.step._fast.why_eager


def make_batch(draws: torch.Generator, num_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(num_rows, 4, generator=draws), torch.randint(0, 3, (num_rows,), generator=draws)


def make_net(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def get_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def change_once(change: Callable[[], object], at: int = CHANGED_AT) -> Callable[[hs.Step, int], object]:
    """Return a `Loop.before` that calls `change` before one step."""
    return lambda step, number: change() if number == at else None


# --- a trained weight that forward writes ---


def max_norm(device: torch.device, *, is_late: bool = False) -> Loop:
    embed, out = nn.Embedding(5, 6), nn.Linear(6, 3)
    model = nn.Sequential(embed, out).to(device)
    set_norm = change_once(lambda: setattr(embed, "max_norm", 0.5), CHANGED_AT if is_late else 0)
    return Loop(model, lambda batch: F.cross_entropy(model(batch[1]), batch[1]), before=set_norm)


def clamped(device: torch.device) -> Loop:
    model = make_net(device)
    weight: Tensor = model[0].weight  # type: ignore[assignment]

    def loss_fn(batch: Any) -> Tensor:
        with torch.no_grad():
            weight.clamp_(-0.3, 0.3)
        return get_loss(model, batch)

    return Loop(model, loss_fn)


def masked(device: torch.device, *, is_late: bool = False, is_data: bool = False) -> Loop:
    """Prune a layer by a forward pre-hook."""
    model = make_net(device)
    mask = (torch.arange(32, device=device).reshape(8, 4) % 3 > 0).float()

    def prune(module: Any, inputs: Any) -> None:
        if is_data:
            module.weight.data.mul_(mask)
        else:
            with torch.no_grad():
                module.weight.mul_(mask)

    add_hook = change_once(lambda: model[0].register_forward_pre_hook(prune), CHANGED_AT if is_late else 0)
    return Loop(model, lambda batch: get_loss(model, batch), before=add_hook)


# --- a buffer that forward replaces, state that loss_fn carries on ---


class Centred(nn.Module):
    """Subtract a running mean that each forward pass replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        return out - self.mean


def replaced_buffer(device: torch.device, **settings: Any) -> Loop:
    model = Centred().to(device)
    return Loop(model, lambda batch: get_loss(model, batch), settings=settings)


def hidden_state(device: torch.device, **settings: Any) -> Loop:
    """Keep a hidden state in a buffer, as docs/loop_kinds.md says. A cell, because torch cannot trace a whole RNN."""
    model, memory = nn.RNNCell(4, 4).to(device), nn.Module()
    memory.register_buffer("hidden", torch.zeros(ROWS, 4, device=device))
    kept = {"memory": memory}

    def loss_fn(batch: Any) -> Tensor:
        hidden: Tensor = model(batch[0], memory.hidden)
        memory.hidden = hidden.detach()
        return hidden.square().mean()

    return Loop(model, loss_fn, settings={"also": [memory], "clip_norm": 0.25} | settings, kept=kept)


def averaged_buffer(device: torch.device) -> Loop:
    loop = replaced_buffer(device, ema_decay=0.9)
    loop.why_eager = "the model replaces a buffer in its forward pass, which an average or a hook may read"
    return loop


def carried_in_dict(device: torch.device, **settings: Any) -> Loop:
    """Carry a state from one micro-batch to the next."""
    model, kept = make_net(device), {"h": torch.zeros(3, device=device), "n": torch.zeros((), device=device)}

    def loss_fn(batch: Any) -> Tensor:
        out = model(batch[0]) + kept["h"]
        kept["h"], kept["n"] = torch.tanh(out.detach().mean(0)), kept["n"] + 1
        return F.cross_entropy(out, batch[1])

    return Loop(model, loss_fn, settings={"accumulate": 2} | settings, kept=kept)


# --- Python code that must run once per micro-batch ---


def running_average(device: torch.device) -> Loop:
    """Change a dict, an attribute and a list: each call of loss_fn shows in all of them."""
    model = make_net(device)
    meter = nn.Module()
    meter.average, meter.recent = torch.zeros((), device=device), [torch.zeros((), device=device)] * 3  # type: ignore
    kept: dict[str, Any] = {"num": torch.zeros((), device=device), "meter": meter.__dict__}

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        kept["num"] = kept["num"] + 1
        meter.average = 0.9 * meter.average + 0.1 * loss.detach()  # type: ignore[operator]
        meter.recent.append(loss.detach())  # type: ignore[operator]
        meter.recent.pop(0)  # type: ignore[operator]
        return loss

    return Loop(model, loss_fn, kept=kept)


def hooks_that_read(device: torch.device) -> Loop:
    """Read in on_gradients= and on_commit= what loss_fn kept, such as a DINO centre."""
    model, centre, kept = make_net(device), torch.zeros(3, device=device), dict[str, Any]()
    kept["centre"] = centre

    def loss_fn(batch: Any) -> Tensor:
        out: Tensor = model(batch[0])
        kept["out"] = out.detach()
        return F.cross_entropy(out - centre, batch[1])

    def scale(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / (1 + kept["out"].abs().mean()))

    def move(model: nn.Module) -> None:
        centre.mul_(0.9).add_(kept["out"].mean(0), alpha=0.1)

    settings = {"on_gradients": scale, "on_commit": move, "also": [centre]}
    return Loop(model, loss_fn, settings=settings, kept=kept, mode="graph, commit eager")


def full_deque(device: torch.device) -> Loop:
    model = make_net(device)
    recent = collections.deque([torch.zeros((), device=device)] * 3, maxlen=3)

    def loss_fn(batch: Any) -> Tensor:
        loss = get_loss(model, batch)
        recent.append(loss.detach())
        return loss / (1 + torch.stack(list(recent)).mean())

    return Loop(model, loss_fn, "loss_fn changes a deque", kept=recent)


def two_losses(device: torch.device) -> Loop:
    """Train with two loss functions in turn, of which one changes a dict."""
    model, kept = make_net(device), {"turned": False}

    def turn(batch: Any) -> Tensor:
        kept["turned"] = not kept["turned"]
        return get_loss(model, batch) * (2 if kept["turned"] else 1)

    def plain(batch: Any) -> Tensor:
        return model(batch[0]).abs().mean()

    return Loop(model, turn, kept=kept, choose_loss=lambda number: plain if number % 3 == 2 else turn)


# --- parameters without optimizer state ---


def unfrozen_later(device: torch.device) -> Loop:
    model = make_net(device)
    model[0].requires_grad_(False)
    unfreeze = change_once(lambda: model[0].requires_grad_(True))
    return Loop(model, lambda batch: get_loss(model, batch), before=unfreeze)


def group_added_later(device: torch.device) -> Loop:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model[2].parameters(), 1e-2, fused=True)
    add_group = change_once(lambda: optimizer.add_param_group({"params": list(model[0].parameters())}))
    return Loop(model, lambda batch: get_loss(model, batch), before=add_group, optimizer=optimizer)


def parameter_replaced(device: torch.device) -> Loop:
    model = make_net(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def replace() -> None:
        optimizer.state.pop(model[2].bias)  # type: ignore[arg-type]
        optimizer.param_groups[0]["params"][3] = model[2].bias = nn.Parameter(torch.zeros(3, device=device))

    return Loop(model, lambda batch: get_loss(model, batch), before=change_once(replace), optimizer=optimizer)


def weight_moved(device: torch.device) -> Loop:
    """Give a weight other memory, which a graph must not write into any more."""
    model = make_net(device)
    weight: Tensor = model[0].weight  # type: ignore[assignment]
    move_weight = change_once(lambda: setattr(weight, "data", weight.data.clone()))
    return Loop(model, lambda batch: get_loss(model, batch), before=move_weight)


# --- code that torch's compiler changes ---


def checkpointed_norm(device: torch.device) -> Loop:
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))
    model = nn.Sequential(body, nn.Linear(8, 3)).to(device)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model[1](checkpoint(body, batch[0], use_reentrant=False)), batch[1])

    return Loop(
        model, loss_fn, "torch.utils.checkpoint runs a block that writes into a buffer, such as BatchNorm, twice"
    )


class QuantizedAutoencoder(nn.Module):
    """A VQ-VAE whose traced backward raises: cdist's gradient has other strides than torch's compiler expects."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.codes = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        flat = z.permute(0, 2, 3, 1).reshape(-1, 8).float()
        nearest = self.codes(torch.cdist(flat, self.codes.weight).argmin(1))
        q = nearest.view(*z.shape[:1], *z.shape[2:], 8).permute(0, 3, 1, 2)
        out = self.decode(z + (q - z).detach())
        return F.mse_loss(out, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


def unexpected_strides(device: torch.device) -> Loop:
    """A kernel of backward returns other strides than the trace expects."""
    model = QuantizedAutoencoder().to(device)
    draw = lambda draws: torch.rand(2, 3, 16, 16, generator=draws)  # noqa: E731
    return Loop(model, lambda x: model(x), make_batch=draw)


def unused_dropout(device: torch.device) -> Loop:
    model = make_net(device)

    def loss_fn(batch: Any) -> Tensor:
        F.dropout(batch[0], 0.5)  # a branch that the loss does not use
        return F.cross_entropy(F.dropout(model(batch[0]), 0.3), batch[1])

    return Loop(model, loss_fn)


def asks_whether_it_compiles(device: torch.device) -> Loop:
    model = make_net(device)

    def loss_fn(batch: Any) -> Tensor:
        return get_loss(model, batch) * (1.5 if torch.compiler.is_compiling() else 1.0)

    return Loop(model, loss_fn)


class Settings:
    def __init__(self) -> None:
        self.scale, self.names = 1.0, ["first", "second"]
        self.weight: Any = None


def copied_settings(device: torch.device) -> Loop:
    """Copy settings and write to the copy, as T5 and Whisper of transformers do; the settings change once."""
    model, settings = make_net(device), Settings()
    torch.compile(lambda: copy.deepcopy(settings), backend="eager")()  # what Dynamo has looked up is not used again

    def loss_fn(batch: Any) -> Tensor:
        copied = copy.deepcopy(settings)
        copied.scale = copied.scale + 1
        copied = copy.deepcopy(copied)
        return get_loss(model, batch) * copied.scale * len(copied.names) * settings.scale

    def change() -> None:
        settings.scale = 0.5
        settings.names.append("third")

    return Loop(model, loss_fn, before=change_once(change))


def copied_tensor(device: torch.device) -> Loop:
    """Copy settings that hold a tensor, and write it: not captured, because a copy would keep it."""
    model, settings = make_net(device), Settings()
    settings.weight = torch.ones(3, device=device)

    def loss_fn(batch: Any) -> Tensor:
        copied = copy.deepcopy(settings)
        return get_loss(model, batch) * copied.weight.add_(1).mean()

    return Loop(model, loss_fn, why_eager="deepcopy")


LOOPS: dict[str, Callable[[torch.device], Loop]] = {
    function.__name__: function
    for function in (
        max_norm, clamped, masked, replaced_buffer, hidden_state, averaged_buffer, carried_in_dict, running_average,
        hooks_that_read, full_deque, two_losses, unfrozen_later, group_added_later, parameter_replaced, weight_moved,
        checkpointed_norm, unexpected_strides, unused_dropout, asks_whether_it_compiles,
        copied_settings, copied_tensor,
    )
} | {
    "max_norm_set_later": partial(max_norm, is_late=True),
    "masked_later": partial(masked, is_late=True),
    "masked_data": partial(masked, is_data=True),
    "masked_data_later": partial(masked, is_late=True, is_data=True),
    "accumulated_hidden_state": partial(hidden_state, accumulate=2),
    "carried_through_the_loop": partial(carried_in_dict, accumulate=1),
}  # fmt: skip


# --- floats that change at every step ---


def anneal(device: torch.device, use: Callable[[Tensor, Tensor, Any], Tensor], kind: Any = float) -> Loop:
    """Compute a loss of outputs, labels and a float that changes at every step, in a list in a dict."""
    model, annealed = make_net(device), {"values": [kind(1.0)]}
    loss_fn = lambda batch: use(model(batch[0]), batch[1], annealed["values"][0])  # noqa: E731
    return Loop(model, loss_fn, before=lambda _, number: annealed.update(values=[kind(1.0 + 0.1 * number)]))


def annealed_weight(device: torch.device) -> Loop:
    return anneal(device, lambda out, y, value: value * F.cross_entropy(out, y))


def annealed_divisor(device: torch.device) -> Loop:
    return anneal(device, lambda out, y, value: F.cross_entropy(out / value, y) / value)


def annealed_number_of_numpy(device: torch.device) -> Loop:
    loop = anneal(device, lambda out, y, value: value * F.cross_entropy(out, y), np.float64)
    loop.why_eager = "computes with a NumPy number in float64"
    return loop


def annealed_smoothing(device: torch.device) -> Loop:
    loop = anneal(device, lambda out, y, value: F.cross_entropy(out, y, label_smoothing=0.1 * value))
    loop.why_eager = "it would be traced again at every step"
    return loop


def annealed_lambda(device: torch.device) -> Loop:
    """Read the float in a lambda that is made anew for each step."""
    loop = annealed_weight(device)
    model = loop.model

    def make_loss(number: int) -> Callable[[Any], Tensor]:
        value = 1.0 + 0.1 * number
        return lambda batch: F.cross_entropy(model(batch[0]) * value, batch[1])

    loop.choose_loss = make_loss
    return loop


ANNEALED: dict[str, Callable[[torch.device], Loop]] = {
    function.__name__: function
    for function in (
        annealed_weight, annealed_divisor, annealed_number_of_numpy, annealed_smoothing, annealed_lambda,
    )
}  # fmt: skip
LOOPS |= ANNEALED


# --- training and comparing ---


def train(
    make: Callable[[torch.device], Loop],
    device: torch.device,
    fast: Any,
    *,
    bad_at: Container[int] = (),
    length: int = NUM_STEPS,
    precision: str = "fp32",
    **settings: Any,
) -> Trained:
    """Train a loop, with a NaN in the batches of some steps, and note everything after each step."""
    torch.manual_seed(0)
    loop = make(device)
    optimizer = loop.optimizer or torch.optim.AdamW(loop.model.parameters(), 1e-2, fused=True)
    step = hs.Step(loop.model, optimizer, precision, fast=fast, **loop.settings, **settings)
    draws, trained = torch.Generator().manual_seed(1), Trained([], step, [])
    for number in range(length):
        loop.before(step, number)
        window = [loop.make_batch(draws) for _ in range(loop.settings.get("accumulate", 1))]
        if number in bad_at:
            window[0][0][0] = float("nan")
        loss_fn = loop.choose_loss(number) if loop.choose_loss else loop.loss_fn
        outcome = step(loss_fn, [move(batch, device) for batch in window])
        trained.history.append(
            {
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
                "committed": outcome.committed,
                "rate and scale": (outcome.lr, outcome.scale),
                "model": freeze(loop.model),
                "kept": freeze(loop.kept),
                "average": freeze(step.ema and step.ema.shadows),
                "optimizers": freeze([one.state_dict()["state"] for one in step.optimizers]),
                "spikes": freeze(step._step.spikes.state_dict()),
                "generators": freeze(read_generators(device)),
            }  # fmt: skip
        )
        trained.modes.append(step.mode)
    return trained


def assert_same_history(found: Trained, expected: Trained) -> None:
    for number, (now, then) in enumerate(zip(found.history, expected.history, strict=True)):
        differing = [name for name in now if str(now[name]) != str(then[name])]  # as text: NaN differs from itself
        assert not differing, f"step {number}: {', '.join(differing)} ({found.why_eager or found.modes[number]})"


def assert_same(
    name: str,
    device: torch.device,
    fast: Any = "graph",
    loops: Mapping[str, Callable[[torch.device], Loop]] = LOOPS,
    **settings: Any,
) -> Trained:
    """Train a loop in two ways; it is captured, or stays eager for the reason that it names."""
    expected, found = train(loops[name], device, "off", **settings), train(loops[name], device, fast, **settings)
    assert_same_history(found, expected)
    loop = loops[name](device)
    assert loop.why_eager in found.why_eager
    if not loop.why_eager:
        assert (found.why_eager, found.step.mode == "eager") == ("", False)
        assert fast != "graph" or found.step.mode == loop.mode
    return found


def move(batch: Any, device: torch.device) -> Any:
    """Copy a pair or a tensor to the device; loops with other batches do so themselves."""
    if type(batch) is tuple:
        return tuple(one.to(device) for one in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def read_generators(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device.type == "cuda" else [])]


def freeze(value: Any) -> Any:
    """Return a picture of nested objects, tensors by their bits."""
    if isinstance(value, Tensor):
        bits = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return value.dtype, tuple(value.shape), bytes(bits.tolist())
    if isinstance(value, nn.Module):
        return freeze({**dict(value.named_parameters()), **dict(value.named_buffers())})
    if isinstance(value, dict):
        return {name: freeze(one) for name, one in value.items()}
    if isinstance(value, list | tuple | collections.deque):
        return [freeze(one) for one in value]
    return value
