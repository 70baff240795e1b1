"""A watch on a GPU: captured and compiled steps keep their bits, nothing waits, and the numbers are the tensors'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from no_waiting import no_host_wait
from tiny_training import assert_same_bits
from whole_runs import newest, run

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _start_afresh() -> None:
    torch._dynamo.reset()


def train(watch: int, fast: Any, precision: str, num_steps: int = 400) -> tuple[nn.Module, hs.Step]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)
    ).to(CUDA)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    step = hs.Step(model, optimizer, precision, fast=fast, clip_norm=1.0, watch=watch)
    draws = torch.Generator().manual_seed(1)

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    for _ in range(num_steps):
        batch = torch.randn(64, 16, generator=draws).to(CUDA), torch.randint(0, 4, (64,), generator=draws).to(CUDA)
        step(loss_fn, [batch])
    step.finish()
    return model, step


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("fast", ["off", "graph", "compile"])
def test_400_steps_have_the_same_bits_with_and_without(fast: str, precision: str) -> None:
    plain, _ = train(0, fast, precision)
    torch._dynamo.reset()
    watched, step = train(20, fast, precision)
    assert_same_bits(dict(plain.state_dict()), dict(watched.state_dict()))
    assert step.watched.why_no_activations == ""
    kinds = {row.kind for row in step.watched.rows}
    assert kinds >= {"activation", "activation gradient", "weight", "weight gradient", "update", "variance"}
    assert {row.format for row in step.watched.rows if row.kind == "activation"} >= {precision}
    assert not step.watched.warnings


def test_captured_gradients_are_those_of_the_step() -> None:
    (_, captured), (_, eager) = (train(20, fast, "fp32", 41) for fast in ("graph", "off"))
    assert captured.mode == "graph"
    for key, row in eager.watched.history[-1].rows.items():
        if row.kind == "weight gradient":
            assert captured.watched.history[-1].rows[key].high == pytest.approx(row.high, abs=0.05)


@pytest.mark.parametrize("fast", ["graph", "compile", "off"])
def test_runs_have_the_same_bits_with_and_without(tmp_path: Path, fast: str) -> None:
    settings = {
        "device": "cuda", "data.dir": None, "data.image_size": 64, "model.base_channels": 32, "model.depth": 2,
        "precision.default": "bf16", "train.max_steps": 24, "train.fast": fast, "train.deterministic": True,
    }  # fmt: skip
    plain = run(tmp_path / "plain", settings, "unet")
    seen = run(tmp_path / "seen", {**settings, "log.watch": 5}, "unet")
    assert_same_bits(dict(newest(plain).model), dict(newest(seen).model))


def test_nothing_waits() -> None:
    model, step = train(10, "graph", "bf16", 15)
    batch = torch.randn(64, 16, device=CUDA), torch.randint(0, 4, (64,), device=CUDA)
    watch = step.watched

    def loss_fn(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    with no_host_wait():
        watch.every = 1
        watch.begin()
        facts = step._step(loss_fn, [batch])
        watch.finish(facts)
