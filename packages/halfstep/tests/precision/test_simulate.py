"""Simulated kernels against native CPU autocast, op by op, and the behaviour that makes simulation useful."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import PrecisionError
from halfstep.formats import find_format
from halfstep.precision.contexts import simulate
from halfstep.precision.simulate import round_to, simulate_kernels
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
"""Their forward pass is pinned in test_simulated_attention.py."""
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


def test_fp16_gradients_overflow_to_infinity() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    with simulate("fp16"):
        (F.linear(torch.full((1, 2), 300.0), w).float().sum() * 1e3).backward()
    assert w.grad.isinf().all()


def test_tf32_rounds_operands_of_fp32_products() -> None:
    x, w = torch.randn(5, 64), torch.randn(3, 64)
    with simulate("tf32"):
        ours = F.linear(x, w)
    assert torch.equal(ours, F.linear(round_to(x, "tf32"), round_to(w, "tf32")))
    assert not torch.equal(ours, F.linear(x, w))


def test_a_format_without_simulation_is_named() -> None:
    with pytest.raises(PrecisionError, match="fp4"), simulate("fp4"):
        pass
