"""Long runs on a GPU: kernels are chosen by measurement, and Inductor's code is tuned within its time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.fast import compiled_trial, tuned_trial
from halfstep.fast import fast_path as fast
from halfstep.fast.fast_path import State
from halfstep.fast.kernel_choice import DepthwiseConvolution, attend_packed, multiply_padded, time_call

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


class Block(nn.Module):
    """A depthwise convolution, self-attention with dropout, and outputs that are not aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(128, 128, 7, padding=3, groups=128)
        self.attention = nn.MultiheadAttention(128, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(128, 131)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.mix(x)).flatten(2).transpose(1, 2)
        output: Tensor = self.last(self.attention(x, x, x, need_weights=False)[0])
        return output


def test_a_long_run_is_tuned_and_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fast, "LOOK_EVERY", 1)
    monkeypatch.setattr(tuned_trial, "LIKELY_SAVING", 1e9)
    monkeypatch.setattr(tuned_trial, "MOST_S", 10.0)  # for Inductor's kernels
    monkeypatch.setattr(tuned_trial, "MOST_COMPILING", 1e9)
    seconds = itertools.cycle([2.0, 1.0])  # the tests of other processes disturb the clock
    monkeypatch.setattr(compiled_trial, "time_replays", lambda replay, device: next(seconds))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 128, 1), Block()).to(DEVICE)
    step = hs.Step(
        model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True), "bf16", fast=hs.Fast("auto", num_steps=10**7)
    )
    losses = []
    for _ in range(40):
        x = torch.randn(4, 3, 16, 16, device=DEVICE)
        losses.append(step(lambda x: (model(x) - x.flatten(2).mean(1)[..., None]).square().mean(), [x]).loss)
    said = capsys.readouterr().err
    assert "halfstep: tunes the compiled step for at most about 10 s" in said
    assert step._fast.state is State.COMPILED
    assert "halfstep: tuned: 1e+03 ms per step, 2e+03 ms without" in said, said
    assert len(step._fast.tuned.graphs) == 1
    assert float(losses[-1]) < float(losses[0])
    assert [path.stat().st_size > 1000 for path in (tmp_path / "halfstep").glob("step-*.bin")] == [True]


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_depthwise_convolution_has_cudnns_gradients(memory: Any) -> None:
    x = torch.randn(8, 64, 28, 28, device=DEVICE, dtype=torch.bfloat16).to(memory_format=memory).requires_grad_()
    weight = torch.randn(64, 1, 7, 7, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    outputs = [
        DepthwiseConvolution.apply(x, weight, bias, (3, 3), (1, 1)),
        torch.conv2d(x, weight, bias, 1, (3, 3), (1, 1), 64),
    ]
    factors = torch.randn_like(outputs[0])
    own, expected = (torch.autograd.grad(one, (x, weight, bias), factors) for one in outputs)
    assert torch.equal(*outputs)
    for one, other in zip(own, expected, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 0.01


def test_self_attention_and_products_equal_torchs() -> None:
    torch.manual_seed(0)
    layer, linear = nn.MultiheadAttention(128, 2, device=DEVICE), nn.Linear(128, 131, device=DEVICE)
    x = torch.randn(197, 8, 128, device=DEVICE, requires_grad=True)
    weights = (layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight, None)
    found = []
    for attend, multiply in ((F.multi_head_attention_forward, F.linear), (attend_packed, multiply_padded)):
        with torch.autocast("cuda", torch.bfloat16):
            output = multiply(attend(x, x, x, 128, 2, *weights, need_weights=False)[0], linear.weight, linear.bias)
        inputs = [x, layer.in_proj_weight, layer.out_proj.weight, linear.weight, linear.bias]
        found.append([output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)])
    for own, expected in zip(*found, strict=True):
        assert float((own - expected).float().norm() / expected.float().norm()) < 0.02  # a few roundings of bf16


def test_a_call_is_timed() -> None:
    q = torch.empty(8, 12, 1024, 64, device="meta", dtype=torch.bfloat16)
    assert (
        1e-5
        < time_call(F.scaled_dot_product_attention, ((q, q, q), {"is_causal": True}), torch.bfloat16, DEVICE)
        < 1e-2
    )
