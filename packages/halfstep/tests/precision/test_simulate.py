"""Simulated kernels against native CPU autocast, op by op, and the behaviour that makes simulation useful."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import halfstep as hs
from halfstep.errors import FormatError, PrecisionError
from halfstep.formats import FORMATS, find_format, round_value
from halfstep.precision.contexts import simulate
from halfstep.precision.simulate import compute_flash_attention, round_to, simulate_kernels
from native_kernels import HALF, share_off, ulps_apart, without_onednn

Op = Callable[..., Tensor]
OPS: dict[str, tuple[Op, list[tuple[int, ...]]]] = {
    "matmul": (lambda x, w: x @ w, [(33, 64), (64, 48)]),
    "linear": (F.linear, [(33, 64), (48, 64), (48,)]),
    "bmm": (torch.bmm, [(3, 17, 64), (3, 64, 19)]),
    "baddbmm": (torch.baddbmm, [(3, 17, 19), (3, 17, 64), (3, 64, 19)]),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), [(2, 8, 33), (12, 8, 3), (12,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 8, 13, 13), (12, 8, 3, 3), (12,)]),
    "conv2d strided": (lambda x, w: F.conv2d(x, w, stride=2, dilation=2), [(2, 8, 13, 13), (12, 8, 3, 3)]),
    "conv2d depthwise": (lambda x, w: F.conv2d(x, w, groups=8), [(2, 8, 13, 13), (8, 1, 3, 3)]),
    "conv3d": (lambda x, w, b: F.conv3d(x, w, b, padding=1), [(1, 4, 6, 6, 6), (6, 4, 3, 3, 3), (6,)]),
    "conv_transpose1d": (lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), [(2, 8, 9), (8, 6, 2), (6,)]),
    "conv_transpose2d": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), [(2, 8, 9, 9), (8, 6, 2, 2), (6,)]),
    "attention": (F.scaled_dot_product_attention, [(2, 4, 33, 32), (2, 4, 40, 32), (2, 4, 40, 32)]),
    "attention causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 33, 32)] * 3,
    ),
}
ATTENTION = ("attention", "attention causal")
"""Their forward pass is tested below."""
BACKWARD_BOUND = 1.0
"""Relative Frobenius distance of gradients, in spacings of the format.

Native CPU convolutions round partial sums of their gradients (col2im, the batch) to half; ours are rounded once, as
matrix units do.
"""


def run(name: str, forward: AbstractContextManager[None], backward: AbstractContextManager[None]) -> list[Tensor]:
    op, shapes = OPS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    with forward:
        output = op(*inputs)
    with backward:
        output.backward(torch.randn(output.shape, generator=generator).to(output.dtype))
    return [output.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize("name", OPS)
def test_simulated_op_equals_native_autocast(name: str, format: str) -> None:
    with without_onednn():
        native, *native_grads = run(name, torch.autocast("cpu", HALF[format]), contextlib.nullcontext())
    ours, *our_grads = run(name, simulate(format), simulate_kernels())
    spacing = find_format(format).spacing_at_1
    assert ours.dtype == native.dtype == HALF[format]
    if name not in ATTENTION:
        assert share_off(ours, native) <= 0.01
        assert ulps_apart(ours, native, spacing, terms=native.float().square().mean().sqrt().item()) <= 1
    for our_grad, native_grad in zip(our_grads, native_grads, strict=True):
        assert (our_grad - native_grad).norm() / native_grad.norm() <= BACKWARD_BOUND * spacing


OVERLAPPING = [(3, 2, 0), (4, 2, 1), (3, 1, 1)]
"""Kernel, stride and padding of transposed convolutions whose patches overlap."""


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize(("kernel", "stride", "padding"), OVERLAPPING)
def test_overlapping_transposed_convolution_is_the_fp64_sum_rounded_once(
    format: str, kernel: int, stride: int, padding: int
) -> None:
    """The native kernel adds patches that it has rounded to half: over a fifth of its elements differ from that sum."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in ((2, 8, 9, 9), (8, 6, kernel, kernel)))
    x, w = x.to(HALF[format]), w.to(HALF[format])
    exact = F.conv_transpose2d(x.double(), w.double(), stride=stride, padding=padding).to(HALF[format])
    with simulate_kernels():
        ours = F.conv_transpose2d(x, w, stride=stride, padding=padding)
    assert share_off(ours, exact) <= 0.01
    terms = exact.float().square().mean().sqrt().item()
    assert ulps_apart(ours, exact, find_format(format).spacing_at_1, terms=terms) <= 1


def test_the_backward_kernels_are_replaced_too() -> None:
    """Without the mode in backward the native kernels would run: the gradient is then not the fp32 one, rounded."""
    x, w = torch.randn(2, 8, 9, 9).bfloat16(), torch.randn(4, 8, 3, 3).bfloat16().requires_grad_()
    with simulate_kernels():
        output = F.conv2d(x, w)
        output.sum().backward()
    exact = torch.autograd.grad(F.conv2d(x.float(), full := w.detach().float().requires_grad_()).sum(), full)[0]
    assert w.grad is not None
    assert torch.equal(w.grad, exact.bfloat16())


@pytest.mark.parametrize("format", HALF)
def test_inference_mode_gives_the_same_numbers(format: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    attention = torch.randn(1, 2, 7, 16)
    x = torch.randn(2, 3, 8, 8)
    with simulate(format):
        trained = model(x), F.scaled_dot_product_attention(attention, attention, attention)
    with simulate(format), torch.inference_mode():
        inferred = model(x), F.scaled_dot_product_attention(attention, attention, attention)
    assert all(torch.equal(a, b) for a, b in zip(trained, inferred, strict=True))


def test_fp16_overflows_to_infinity() -> None:
    x = torch.full((1, 64), 100.0)
    with simulate("fp16"):
        assert math.isinf(F.linear(x, x).item())
    with simulate("bf16"):
        assert F.linear(x, x).item() == 640_000 // 4096 * 4096  # bf16 spacing at 6.4e5: 4096


def test_fp16_gradients_underflow_to_zero_and_loss_scaling_saves_them() -> None:
    def gradient(scale: float) -> Tensor:
        w = torch.full((4, 4), 0.5, requires_grad=True)
        with simulate("fp16"):
            (F.linear(torch.full((1, 4), 1e-3), w).float().sum() * 1e-6 * scale).backward()
        return w.grad / scale

    assert (gradient(1.0) == 0).all()
    torch.testing.assert_close(gradient(65536.0), torch.full((4, 4), 1e-9), rtol=2e-2, atol=0)


def test_tf32_rounds_operands_of_fp32_products() -> None:
    x, w = torch.randn(5, 64), torch.randn(3, 64)
    with simulate("tf32"):
        ours = F.linear(x, w)
    assert torch.equal(ours, F.linear(round_to(x, "tf32"), round_to(w, "tf32")))
    assert not torch.equal(ours, F.linear(x, w))


def test_a_format_without_simulation_is_named() -> None:
    with pytest.raises(PrecisionError, match="fp4"), simulate("fp4"):
        pass


# --- simulated attention: the kernel it follows, and the error of the CPU's exp ---

MEAN_MAGNITUDE = math.sqrt(2 / math.pi)
"""Of the normal values that attention averages: an average near zero carries the error of its terms."""

formats = pytest.mark.parametrize("format", HALF)
maybe_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def draw(dtype: torch.dtype, num_keys: int = 64) -> list[Tensor]:
    """Query, key and value. A multiple of 4 keys: the CPU kernel takes an exact exp for what is left over."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, num_keys, 32, generator=generator).to(dtype) for _ in range(3)]


@formats
@maybe_causal
def test_simulated_attention_is_the_flash_kernel_with_an_exact_exp(format: str, is_causal: bool) -> None:
    """The coarse exp of the CPU moves 4 to 7 % of elements in bf16, 23 to 30 % in fp16, by no more than 2 ulp."""
    q, k, v = draw(HALF[format])
    with simulate_kernels():
        ours = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    with without_onednn():
        native = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert torch.equal(ours, compute_flash_attention(q, k, v, is_causal=is_causal)[0])
    assert share_off(ours, native) <= 0.35
    assert ulps_apart(ours, native, find_format(format).spacing_at_1, terms=MEAN_MAGNITUDE) <= 2


@formats
@maybe_causal
def test_math_attention_equals_the_native_math_kernel(format: str, is_causal: bool) -> None:
    """It computes in fp32 throughout and rounds once; torch takes it under dropout, or when asked to."""

    def attention(context: AbstractContextManager[None]) -> Tensor:
        q, k, v = draw(HALF[format])
        with context, sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    ours, native = attention(simulate(format)), attention(without_onednn())
    assert ours.dtype == native.dtype == HALF[format]
    assert share_off(ours, native) <= 0.01
    assert ulps_apart(ours, native, find_format(format).spacing_at_1, terms=MEAN_MAGNITUDE) <= 1


def test_masked_attention_matches_native_and_blind_rows_give_zeros() -> None:
    q = torch.randn(1, 2, 5, 16).bfloat16()
    mask = torch.rand(5, 5) > 0.4
    mask[:, 0] = True
    with without_onednn():
        native = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with simulate_kernels():
        ours = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        blind = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(5, 5, dtype=torch.bool))
    torch.testing.assert_close(ours, native, rtol=2**-7, atol=2**-8)
    assert (blind == 0).all()


# --- simulated recurrent layers ---

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


def run_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
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
    run_layer(layer, x).float().square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters() if p.grad is not None}}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's, in plain fp32
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("format", ["bf16", "fp16", "tf32"])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_the_formats(name: str, format: str, is_training: bool) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name]().train(is_training), inputs()
    exact, exact_gradients = run_layer(layer, x).detach(), gradients(layer, x)
    with hs.simulate(format):
        output, found = run_layer(layer, x).detach(), gradients(layer, x)
    # A few dozen roundings in a row, each of at most an epsilon of the largest number.
    close = 40 * EPSILON[format]
    torch.testing.assert_close(output.float(), exact, rtol=0, atol=close * float(exact.abs().max()))
    assert found.keys() == exact_gradients.keys()
    for key, gradient in found.items():
        assert gradient.dtype == torch.float32
        limit = close * float(exact_gradients[key].abs().max().clamp(min=1.0))
        torch.testing.assert_close(gradient, exact_gradients[key], rtol=0, atol=limit)
    # Bilinear is on CUDA's list of ops that run_layer in the widest format of their inputs: fp32 here.
    assert torch.equal(output.float(), exact) == (name == "bilinear")


@pytest.mark.parametrize("format", HALF)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_run_whole_in_the_format(name: str, format: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), inputs()
    with hs.simulate(format):
        output, state = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x)[0], output)
    # What they compute is what a layer of half weights computes on half inputs.
    half = copy.deepcopy(layer).to(HALF[format])
    with hs.simulate(format), torch.autocast("cpu", enabled=False):
        expected, _ = half(x.to(HALF[format]))
    assert output.dtype == HALF[format]
    assert all(part.dtype == HALF[format] for part in (state if isinstance(state, tuple) else [state]))
    assert torch.equal(output, expected)


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


# --- round_to is bit-equal to torch's casts in range, and follows the format beyond it ---

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp32": torch.float32,
}
NARROW = ["tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]

any_bits = st.binary(min_size=4, max_size=512)
"""Bit patterns, not values: every magnitude is equally likely, subnormals, infinities and NaN included."""


def from_bits(bits: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bits[: len(bits) // 4 * 4], dtype=np.float32).copy())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit by bit, so that -0.0 differs from 0.0; any NaN equals any NaN."""
    both_nan = left.isnan() & right.isnan()
    return bool(((left.view(torch.int32) == right.view(torch.int32)) | both_nan).all())


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=150, deadline=None)
@given(bits=any_bits)
def test_rounding_is_bit_equal_to_torchs_cast_in_range(name: str, bits: bytes) -> None:
    x = from_bits(bits)
    ours = round_to(x, name)
    in_range = (
        ours.isfinite() | x.isnan()
    )  # torch releases differ on fp8 overflow, so beyond the range ours is tested apart
    assert same_bits(ours[in_range], x.to(DTYPES[name]).float()[in_range])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(bits=any_bits)
def test_rounding_agrees_with_the_exact_scalar_definition(name: str, bits: bytes) -> None:
    x = from_bits(bits)
    expected = torch.tensor([round_value(value, find_format(name)) for value in x.tolist()])
    assert same_bits(round_to(x, name), expected)


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fp8_e5m2"])
def test_every_halfway_point_goes_to_the_even_neighbour(name: str) -> None:
    fmt = find_format(name)
    steps = torch.arange(0, 2 ** (fmt.mantissa_bits + 1), dtype=torch.float32)
    halfway = (steps + 0.5) * fmt.smallest_subnormal  # subnormals and the first binade, where spacing is constant
    even = torch.where(steps % 2 == 0, steps, steps + 1) * fmt.smallest_subnormal
    assert same_bits(round_to(halfway, name), even)
    assert same_bits(round_to(-halfway, name), -even)


@pytest.mark.parametrize("name", NARROW)
def test_overflow_is_what_the_format_defines(name: str) -> None:
    fmt = find_format(name)
    largest = torch.tensor([fmt.largest, -fmt.largest])
    beyond = torch.tensor([math.inf, -math.inf])
    assert same_bits(round_to(largest, name), largest)
    rounded = round_to(beyond, name)
    assert same_bits(rounded, beyond) if fmt.has_infinity else rounded.isnan().all()


def test_values_just_past_the_largest_round_back_into_range() -> None:
    # The limit is half a spacing beyond the largest number: 65519.996 is 65504 in fp16, 65520 is infinite.
    x = torch.tensor([65519.996, 65520.0, 464.0, 464.1])
    assert round_to(x, "fp16")[:2].tolist() == [65504.0, math.inf]
    assert round_to(x, "fp8_e4m3")[2].item() == 448.0
    assert round_to(x, "fp8_e4m3")[3].isnan()


def test_wrong_arguments_are_explained() -> None:
    x = torch.ones(1)
    with pytest.raises(PrecisionError, match="takes fp32"):
        round_to(x.double(), "bf16")
    with pytest.raises(FormatError, match="fp17"):
        round_to(x, "fp17")
