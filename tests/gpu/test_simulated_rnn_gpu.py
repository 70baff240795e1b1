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
FORMATS = {"bf16": (torch.bfloat16, 2**-8), "fp16": (torch.float16, 2**-11)}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_simulated_layers_are_as_far_from_fp32_as_cudnns(name: str, format: str) -> None:
    dtype, epsilon = FORMATS[format]
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(20, 4, 32)
    exact = layer(x)[0].detach()
    with hs.simulate(format):
        simulated = layer(x)[0].detach()
    with torch.autocast("cuda", dtype):
        output, state = layer.cuda()(x.cuda())
    assert output.dtype == simulated.dtype == dtype
    assert all(part.dtype == dtype for part in (state if isinstance(state, tuple) else [state]))
    cudnns = output.detach().cpu()
    errors = [float((one.float() - exact).abs().mean()) for one in (simulated, cudnns)]
    print(f"{name} {format}: mean distance from fp32: simulated {errors[0]:.2e}, cuDNN {errors[1]:.2e}")
    assert errors[0] < 3 * errors[1]
    assert errors[1] < 3 * errors[0]
    torch.testing.assert_close(simulated.float(), cudnns.float(), rtol=0, atol=20 * epsilon)
