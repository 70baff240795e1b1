"""Recurrent layers as cuDNN runs them under autocast, against the simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs

pytestmark = pytest.mark.gpu

LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(32, 48, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(32, 48, num_layers=2),
    "tanh": lambda: nn.RNN(32, 48),
}
EPSILON = 2**-11


@pytest.mark.parametrize("name", LAYERS)
def test_simulated_layers_are_as_far_from_fp32_as_cudnns(name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(20, 4, 32)
    exact = layer(x)[0].detach()
    with hs.simulate("fp16"):
        simulated = layer(x)[0].detach()
    with torch.autocast("cuda", torch.float16):
        output, state = layer.cuda()(x.cuda())
    assert output.dtype == simulated.dtype == torch.float16
    assert all(part.dtype == torch.float16 for part in (state if isinstance(state, tuple) else [state]))
    cudnns = output.detach().cpu()
    errors = [float((one.float() - exact).abs().mean()) for one in (simulated, cudnns)]
    print(f"{name}: mean distance from fp32: simulated {errors[0]:.2e}, cuDNN {errors[1]:.2e}")
    assert errors[0] < 3 * errors[1]
    assert errors[1] < 3 * errors[0]
    torch.testing.assert_close(simulated.float(), cudnns.float(), rtol=0, atol=20 * EPSILON)


@pytest.mark.parametrize("name", LAYERS)
def test_under_bf16_autocast_they_run_in_fp16_and_the_plan_says_so(name: str) -> None:
    layer = LAYERS[name]().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.randn(20, 4, 32, device="cuda"))[0].dtype == torch.float16
    (warning,) = hs.decide("bf16", hs.probe("cuda"), nn.ModuleDict({"rnn": layer})).warnings
    assert "rnn" in warning
    assert "fp16" in warning
