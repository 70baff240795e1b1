"""Recurrent layers and attention under simulation: whole in the format, as CUDA's autocast runs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import halfstep as hs

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
EPSILON = {"bf16": 2**-8, "fp16": 2**-11, "tf32": 2**-11}
"""Half the spacing of numbers around 1."""
STEPS, BATCH, WIDTH = 5, 3, 8


def inputs() -> torch.Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


LAYERS: dict[str, Any] = {
    "lstm": lambda: nn.LSTM(WIDTH, 6),
    "lstm of two layers, both ways": lambda: nn.LSTM(WIDTH, 6, num_layers=2, bidirectional=True),
    "lstm with a projection": lambda: nn.LSTM(WIDTH, 6, proj_size=4),
    "gru": lambda: nn.GRU(WIDTH, 6, num_layers=2, batch_first=True),
    "tanh": lambda: nn.RNN(WIDTH, 6),
    "relu": lambda: nn.RNN(WIDTH, 6, nonlinearity="relu", bias=False),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
    "decoder": lambda: nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0),
    "bilinear": lambda: nn.Bilinear(WIDTH, WIDTH, 4),
    "lstm cell": lambda: nn.LSTMCell(WIDTH, 6),
    "gru cell": lambda: nn.GRUCell(WIDTH, 6),
    "tanh cell": lambda: nn.RNNCell(WIDTH, 6),
}
RECURRENT = [name for name in LAYERS if isinstance(LAYERS[name](), nn.RNNBase)]


def run(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x)[0]
    if isinstance(layer, (nn.Bilinear, nn.TransformerDecoderLayer)):
        return layer(x, x)
    if isinstance(layer, nn.RNNCellBase):
        output = layer(x[0])
        return output[0] if isinstance(output, tuple) else output
    output = layer(x)
    return output[0] if isinstance(output, tuple) else output


def gradients(layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    run(layer, x).float().square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's, in plain fp32
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("format", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_the_formats(name: str, format: str, is_training: bool) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().train(is_training), inputs()
    exact, exact_gradients = run(layer, x).detach(), gradients(layer, x)
    with hs.simulate(format):
        output, found = run(layer, x).detach(), gradients(layer, x)
    # A few dozen roundings in a row, each of at most an epsilon of the largest number.
    close = 40 * EPSILON[format]
    torch.testing.assert_close(output.float(), exact, rtol=0, atol=close * float(exact.abs().max()))
    assert found.keys() == exact_gradients.keys()
    for key, gradient in found.items():
        assert gradient.dtype == torch.float32
        limit = close * float(exact_gradients[key].abs().max().clamp(min=1.0))
        torch.testing.assert_close(gradient, exact_gradients[key], rtol=0, atol=limit)
    # Bilinear is on CUDA's list of ops that run in the widest format of their inputs: fp32 here.
    assert torch.equal(output.float(), exact) == (name == "bilinear")


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_run_whole_in_the_format(name: str, format: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), inputs()
    with hs.simulate(format):
        output, state = layer(x)
    # What they compute is what a layer of half weights computes on half inputs.
    half = copy.deepcopy(layer).to(HALF[format])
    with hs.simulate(format), torch.autocast("cpu", enabled=False):
        expected, _ = half(x.to(HALF[format]))
    assert output.dtype == HALF[format]
    assert all(part.dtype == HALF[format] for part in (state if isinstance(state, tuple) else [state]))
    assert torch.equal(output, expected)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("format", [*HALF, "tf32"])
def test_inference_mode_gives_the_same_numbers(name: str, format: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), inputs()
    with hs.simulate(format):
        expected = layer(x)[0].detach()
        with torch.inference_mode():
            assert torch.equal(layer(x)[0], expected)


def test_packed_sequences_run_in_the_format() -> None:
    torch.manual_seed(0)
    layer, x = nn.GRU(WIDTH, 6), inputs()
    with hs.simulate("bf16"):
        packed = layer(pack_padded_sequence(x, torch.tensor([5, 3, 1])))[0]
        whole = layer(x[:, :1])[0]
        padded, _ = pad_packed_sequence(packed)
    assert padded.dtype == torch.bfloat16
    torch.testing.assert_close(padded[:, :1], whole, rtol=0, atol=0)


def test_a_recurrent_layer_on_an_island_stays_fp32_and_nothing_is_left_behind() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(WIDTH, 6), inputs()
    before, flag = layer(x)[0], torch._C._get_mkldnn_enabled()
    with hs.simulate("fp16"), hs.fp32_island():
        torch.testing.assert_close(layer(x)[0], before)
    assert torch._C._get_mkldnn_enabled() == flag
    assert torch.equal(layer(x)[0], before)


def test_a_language_model_trains_in_simulated_fp16() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(11, WIDTH), "lstm": nn.LSTM(WIDTH, 16), "head": nn.Linear(16, 11)})
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 2e-2, fused=True), hs.Precision("fp16", simulate=True))
    text = torch.arange(24).remainder(11).view(6, 4).T.contiguous()

    def loss_fn(tokens: torch.Tensor) -> torch.Tensor:
        logits = model["head"](model["lstm"](model["words"](tokens[:-1]))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())

    outcomes = [step(loss_fn, [text]) for _ in range(30)]
    assert sum(outcome.committed for outcome in outcomes) > 25
    assert outcomes[-1].loss < 0.5 * outcomes[0].loss
