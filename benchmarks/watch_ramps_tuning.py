"""Ten ramps to develop watch with (watch_ramps.py): small trainings that fail gradually from a plausible mistake.

The docstring of each states the mistake. The label, which is measured, is in results/watch_labels.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs

Batch = dict[str, Tensor]


@dataclasses.dataclass
class Ramp:
    """One training: precisions other than fp32 are simulated, so that a CPU has their numerics at its own speed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer]
    loss_fn: Callable[[Batch], Tensor]
    batch: Callable[[int], Batch]
    """The batch of a step, counted from 0."""
    precision: str = "fp32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of hs.Step."""
    steps: int = 1500
    """Something fails, or a healthy run ends, by then."""


class Attention(nn.Module):
    """Self-attention that keeps its queries and keys, for losses and for the label's largest logit."""

    def __init__(self, dim: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1))
        self.qk = q, k
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads, causal)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, tokens: int, length: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Layers(nn.Module):
    """Linear layers fc1, fc2, ... with a function between them."""

    def __init__(self, *sizes: int, between: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        self.between, self.count = between, len(sizes) - 1
        for number, (size, following) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
            setattr(self, f"fc{number}", nn.Linear(size, following))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(1, self.count):
            x = self.between(getattr(self, f"fc{number}")(x))
        return getattr(self, f"fc{self.count}")(x)


def draw(size: int, shape: tuple[int, ...], classes: int = 4, seed: int = 1) -> Callable[[int], Batch]:
    """Normal inputs and the class that a fixed random linear map gives them."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(torch.Size(shape).numel(), classes, generator=generator)

    def batch(number: int) -> Batch:
        x = torch.randn(size, *shape, generator=generator)
        return {"x": x, "y": (x.flatten(1) @ rule).argmax(1)}

    return batch


def draw_tokens(size: int, length: int, tokens: int) -> Callable[[int], Batch]:
    """Sequences of a random Markov chain."""
    generator = torch.Generator().manual_seed(1)
    chain = torch.softmax(2 * torch.randn(tokens, tokens, generator=generator), 1)

    drawn = [torch.randint(tokens, (64 * size,), generator=generator)]
    for _ in range(length):
        drawn.append(torch.multinomial(chain[drawn[-1]], 1, generator=generator)[:, 0])
    batches = torch.stack(drawn, 1).split(size)
    return lambda number: {"tokens": batches[number % 64]}


# --- the ramps ---


def z_loss_sign() -> Ramp:
    """The z-loss that should keep attention logits small has the wrong sign."""
    model = Decoder(tokens=16, length=12, dim=32, heads=2, depth=1)

    def loss_fn(batch: Batch) -> Tensor:
        logits = model(batch["tokens"][:, :-1]).float()
        q, k = model.blocks[0].attention.qk
        with hs.fp32_island():
            z = (q.float() @ k.float().mT / q.shape[-1] ** 0.5).logsumexp(-1)
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten()) - 1e-3 * z.square().mean().sqrt()

    optimizer = torch.optim.Adam(model.parameters(), 4.2e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, draw_tokens(16, 12, 16), "fp16")


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Conv2d(1, 8, 3, padding=1)
        self.main = nn.Linear(8 * 64, 4)
        self.side, self.side_norm, self.side_head = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.trunk(x))
        side = F.relu(self.side_norm(self.side(h))).mean((2, 3))
        return self.main(h.flatten(1)), self.side_head(side)


def idle_branch() -> Ramp:
    """A second task has weight 0: nothing but AdamW's weight decay reaches the convolution before its BatchNorm."""
    model = TwoTasks()

    def loss_fn(batch: Batch) -> Tensor:
        main, side = model(batch["x"])
        return F.cross_entropy(main, batch["y"]) + 0.0 * F.cross_entropy(side, batch["y"])

    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.9, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(32, (1, 8, 8)))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(8, 24, nonlinearity="relu", batch_first=True), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = self.rnn(x)[0]
        last = states[:, -1].float()
        return self.head(last / last.norm(dim=1, keepdim=True).clamp(min=1e-3)), last


def unbounded_memory() -> Ramp:
    """A term against vanishing states of a ReLU RNN rewards their size without limit."""
    model = Reader()

    def loss_fn(batch: Batch) -> Tensor:
        scores, last = model(batch["x"])
        return F.cross_entropy(scores.float(), batch["y"]) - 0.05 * (last.norm(dim=1) + 1e-3).log().mean()

    optimizer = torch.optim.Adam(model.parameters(), 2e-4, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(16, (12, 8)), "fp16")


def drifting_target() -> Ramp:
    """A regression target doubles every 34 steps and is not normalised: its gradients need ever smaller loss scales."""
    model, given = Layers(8, 32, 1, between=torch.tanh), draw(32, (8,))

    def loss_fn(batch: Batch) -> Tensor:
        return F.mse_loss(model(batch["x"])[:, 0].float(), batch["y"])

    def batch(number: int) -> Batch:
        x = given(number)["x"]
        return {"x": x, "y": (1 + x[:, 0]) * 2 ** (number / 34)}

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16", {"clip_norm": 1.0})


def decayed_rate() -> Ramp:
    """Weights in bf16 without a master copy, and a learning rate that decays below their spacing."""
    model = Layers(16, 64, 64, 4)
    nn.init.kaiming_normal_(model.fc1.weight)
    model.bfloat16()

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"].bfloat16()).float(), batch["y"], label_smoothing=0.2)

    optimizer = torch.optim.AdamW(model.parameters(), 1.5e-2, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(32, (16,)), "bf16-true", {"schedule": lambda step: 0.9977**step})


class Encoder(nn.Module):
    """Standardise measurements and append the raw counter."""

    def forward(self, x: Tensor, counter: Tensor) -> Tensor:
        return torch.cat([F.layer_norm(x, x.shape[1:]), counter], 1)


class Traffic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.fc1, self.norm, self.fc2 = Encoder(), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, x: Tensor, counter: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.norm(self.fc1(self.encoder(x, counter)))))


def raw_counter() -> Ramp:
    """A counter that grows by 2 % per step is an input next to standardised ones: it takes the whole range of fp8."""
    model, given = Traffic(), draw(32, (15,))

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["counter"]).float()[:, :4], batch["y"])

    def batch(number: int) -> Batch:
        one = given(number)
        return one | {"counter": (1 + 0.2 * one["x"][:, :1].tanh()) * 1.02**number}

    return Ramp(model, torch.optim.Adam(model.parameters(), 1e-3, fused=True), loss_fn, batch, "fp8")


def growing_amounts() -> Ramp:
    """Amounts that grow with time are predicted as they are, in fp16: the output leaves its range."""
    model, given = Layers(8, 48, 48, 1, between=torch.relu), draw(32, (8,))

    def loss_fn(batch: Batch) -> Tensor:
        return F.l1_loss(model(batch["x"])[:, 0].float(), batch["y"])

    def batch(number: int) -> Batch:
        x = given(number)["x"]
        return {"x": x, "y": (1 + 0.3 * x[:, 0].clamp(-2, 2)) * 60 * number}

    optimizer = torch.optim.Adam(model.parameters(), 0.03, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16")


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu1, self.fc2, self.relu2 = nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.relu2(self.fc2(self.relu1(self.fc1(x))))
        return self.head(h), h


def strong_sparsity() -> Ramp:
    """An L1 penalty on activations is so strong that ReLU units die one after the other."""
    model = Sparse()

    def loss_fn(batch: Batch) -> Tensor:
        scores, h = model(batch["x"])
        return F.cross_entropy(scores, batch["y"]) + 10.0 * h.abs().mean()

    optimizer = torch.optim.SGD(model.parameters(), 8e-3, fused=True)
    return Ramp(model, optimizer, loss_fn, draw(64, (16,)))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm, self.head = nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.project(x))))


def decay_sign() -> Ramp:
    """An L2 penalty written by hand has the wrong sign: the weights before a LayerNorm grow by 2.4 % per step."""
    model, given = Bag(), draw(32, (64,))

    def loss_fn(batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch["x"]).float(), batch["y"]) - 0.12 * model.project.weight.square().sum()

    def batch(number: int) -> Batch:
        one = given(number)
        return {"x": 0.02 * one["x"] / one["x"].norm(dim=1, keepdim=True), "y": one["y"]}

    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    return Ramp(model, optimizer, loss_fn, batch, "fp16")


def forgotten_factor() -> Ramp:
    """Distillation without the factor T**2 and without a loss scale; as T rises, gradients become zero in fp16."""
    model, teacher, given = Layers(16, 32, 4), Layers(16, 32, 4, between=torch.tanh), draw(32, (16,))

    def batch(number: int) -> Batch:
        return given(number) | {"T": torch.tensor(1.012**number)}

    def loss_fn(batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = (4 * teacher(batch["x"]).float() / batch["T"]).softmax(1)
        return F.cross_entropy(model(batch["x"]).float() / batch["T"], wanted)

    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    options = {"scaler": {"init_scale": 1.0, "growth_interval": 10**9}}
    return Ramp(model, optimizer, loss_fn, batch, "fp16", options)


TUNING = {build.__name__: build for build in (
    z_loss_sign, idle_branch, unbounded_memory, drifting_target, decayed_rate, raw_counter, growing_amounts,
    strong_sparsity, decay_sign, forgotten_factor,
)}  # fmt: skip
