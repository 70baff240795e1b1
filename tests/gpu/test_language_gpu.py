"""GPT-2 on a real GPU: the loss's kernel, captured steps that equal eager ones, and bf16-true as one graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from halfstep_train.kernels import cross_entropy
from halfstep_train.run.train import train
from halfstep_train.workloads import load

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
CLASSES, PADDED = 50257, 50304


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_losses_kernel_against_torch_in_fp64(dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    rows = torch.randn(700, 64, device=CUDA, generator=generator).to(dtype).float().requires_grad_()
    weight = (torch.randn(PADDED, 64, device=CUDA, generator=generator) * 0.3).to(dtype).float().requires_grad_()
    targets = torch.randint(CLASSES, (700,), device=CUDA, generator=generator)
    targets[::9] = -1
    found = cross_entropy.linear_cross_entropy(rows, weight, targets, num_classes=CLASSES, dtype=dtype, chunk_rows=256)
    found.backward()
    exact = [t.detach().double().requires_grad_() for t in (rows, weight)]
    wanted = F.cross_entropy(exact[0] @ exact[1][:CLASSES].t(), targets, ignore_index=-1, reduction="sum")
    wanted.backward()
    bound = 4 * torch.finfo(dtype).eps
    assert found.item() == pytest.approx(wanted.item(), rel=bound)
    for ours, theirs in zip((rows.grad, weight.grad), (t.grad for t in exact), strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs).norm() / theirs.norm()) < bound
    assert not weight.grad[CLASSES:].any()  # type: ignore[index]


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def trained(out: Path, **values: Any) -> Path:
    settings = {
        "device": "cuda", "log.quiet": True, "train.max_steps": 40, "train.report_every": 1,
        "schedule.name": "constant",
        **{key.replace("__", "."): value for key, value in values.items()},
    }  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return train(load("gpt2", overrides=overrides), out=out)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true"])
def test_captured_steps_learn_as_eager_ones_do(tmp_path: Path, precision: str) -> None:
    found = {}
    for fast in ("off", "graph"):
        run = trained(tmp_path / fast, train__fast=fast, precision__default=precision)
        found[fast] = losses(run)
    assert found["graph"][-1] == pytest.approx(found["off"][-1], rel=0.02)
    assert found["graph"][-1] < 0.8 * found["graph"][0]


@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
@pytest.mark.parametrize("bits", [32, 8])
def test_every_way_to_keep_bf16_weights_is_captured(tmp_path: Path, rounding: str, bits: int) -> None:
    run = trained(
        tmp_path / "run", train__fast="graph", precision__default="bf16-true", precision__rounding=rounding,
        optimizer__moment_bits=bits, train__accumulate=2,
    )  # fmt: skip
    assert losses(run)[-1] < 0.9 * losses(run)[0]


def test_dropout_differs_from_replay_to_replay(tmp_path: Path) -> None:
    """Captured draws that repeated themselves would give the same loss on the same batch at a rate of 0."""
    run = trained(
        tmp_path / "run", train__fast="graph", precision__default="bf16", model__dropout=0.5, optimizer__lr=1e-12,
        train__max_steps=12,
    )  # fmt: skip
    assert len(set(losses(run))) == 12
