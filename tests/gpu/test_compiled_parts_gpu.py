"""Loss functions that are not captured, compiled with graph breaks on a GPU: their losses are those of eager steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.fast.parts_trial import NUM_TIMED, Stage

pytestmark = pytest.mark.gpu
TRIAL_STEPS = 12 + 2 * NUM_TIMED


@pytest.fixture(autouse=True)
def _start_afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch._dynamo.reset()


class RoutedLayer(nn.Module):
    """A mixture of experts as transformers' Mixtral computes it: each expert gets the tokens routed to it."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            if rows.numel():
                own = expert(tokens[rows]) * weights[rows, slots, None]
                out.index_add_(0, rows, own.to(out.dtype))
        return x + out.view_as(x)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 256), nn.Linear(256, 256)
        self.layers = nn.Sequential(*(RoutedLayer(256, 4) for _ in range(2)))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(self.embed(x)))


class Tall(nn.Module):
    """Many pointwise operations, which compiling fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 512), nn.Linear(512, 256)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + self.drop(F.gelu(layer(F.layer_norm(hidden, (512,)).tanh() * 0.9 + 0.1).sigmoid()))
        return self.head(hidden)


def train(
    make: Callable[[], nn.Module], get_loss: Any, mode: Any, num_steps: int, lengths: list[int], *, counts: bool = True
) -> Any:
    """Train, and return the losses, the step, how often the loss function ran, and the state of the generator."""
    torch.manual_seed(0)
    model = make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    step = hs.Step(model, optimizer, "bf16", fast=hs.Fast(mode, max_graphs=4), clip_norm=1.0)
    calls: list[int] = []

    def loss_fn(batch: Tensor) -> Tensor:
        if counts:  # a list that grows is traced again at every step, and so not captured
            calls.append(len(batch))
        loss: Tensor = get_loss(model, batch)
        return loss

    losses = []
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randint(0, 256, (8, lengths[number % len(lengths)]), generator=generator).cuda()
        losses.append(step(loss_fn, [batch]))
    return torch.tensor([one.loss for one in losses]), step, len(calls), torch.cuda.get_rng_state()


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Predict each token from itself: the loss falls quickly."""
    return F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())


def read_on_host(model: nn.Module, x: Tensor) -> Tensor:
    loss = predict(model, x)
    return loss * 0.5 if loss.item() > 100 else loss


def align(model: nn.Module, x: Tensor) -> Tensor:
    log_p = model(x).float().log_softmax(-1).transpose(0, 1)
    ends = torch.full((len(x),), x.shape[1])
    return F.ctc_loss(log_p, x[:, : x.shape[1] // 4] % 255 + 1, ends, ends // 4)


@pytest.mark.parametrize(
    ("make", "get_loss"), [(Routed, predict), (Tall, read_on_host), (Tall, align)], ids=["moe", "item", "ctc"]
)
def test_code_that_cannot_be_captured(make: Any, get_loss: Any, capsys: pytest.CaptureFixture[str]) -> None:
    num_steps = TRIAL_STEPS + 12
    found, step, num_calls, rng = train(make, get_loss, "compile", num_steps, [128])
    said = capsys.readouterr().err
    assert step._fast.parts.stage in (Stage.USED, Stage.REFUSED), said
    assert step.mode == "compile" or "ms without" in said, f"refused for another reason than its time: {said}"
    assert num_calls == num_steps
    expected, _, _, expected_rng = train(make, get_loss, "off", num_steps, [128])
    assert torch.equal(rng, expected_rng), "the same random numbers were drawn"
    if "halfstep: compiled in parts: " not in said:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, msg=said)
    torch.testing.assert_close(found[-8:].mean(), expected[-8:].mean(), rtol=0.05, atol=0.02)


def test_twelve_lengths_with_four_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = [64 + 8 * k for k in range(12)]
    num_steps = 60 + 2 * TRIAL_STEPS
    found, step, _, _ = train(Tall, predict, "compile", num_steps, lengths, counts=False)
    said = capsys.readouterr().err
    assert step.mode.startswith("compile+graph"), f"{step._fast.state}, {step._fast.parts.stage}: {said}"
    assert "shapes without a graph" in said, said
    assert step._fast.parts.stage is Stage.USED, said
    assert len(step._fast.parts.parts.parts) <= 3, f"one part takes all lengths: {said}"
    expected, _, _, _ = train(Tall, predict, "off", num_steps, lengths, counts=False)
    torch.testing.assert_close(found[-24:].mean(), expected[-24:].mean(), rtol=0.05, atol=0.02)
