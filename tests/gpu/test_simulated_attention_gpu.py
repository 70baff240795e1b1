"""Simulated attention, on the CPU, against CUDA's attention kernels: shares printed (pytest -s), bounds held."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfstep.formats import find_format
from halfstep.precision.contexts import simulate
from halfstep.precision.simulate import simulate_kernels
from native_kernels import HALF, share_off, ulps_apart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
        reason="flash attention and native bf16 need sm_80: NOT tested here",
    ),
]
MEAN_MAGNITUDE = math.sqrt(2 / math.pi)
"""Of the normal values that attention averages: an average near zero carries the error of its terms."""
ONE_BLOCK = 64
"""Keys that every kernel takes at once, so that all round against the same maximum."""

formats = pytest.mark.parametrize("format", HALF)
maybe_causal = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])


def attention(inputs: list[Tensor], context: AbstractContextManager[None], *, is_causal: bool) -> list[Tensor]:
    """Output and the gradients of query, key and value, on the CPU."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in inputs)
    with context:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        output.backward(torch.ones_like(output))
    return [tensor.detach().cpu() for tensor in (output, q.grad, k.grad, v.grad) if tensor is not None]


def draw(format: str, num_keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, num_keys, 64, generator=generator).to(HALF[format]) for _ in range(3)]


def on_cuda(inputs: list[Tensor], backend: SDPBackend, *, is_causal: bool) -> list[Tensor]:
    try:
        return attention([tensor.cuda() for tensor in inputs], sdpa_kernel(backend), is_causal=is_causal)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            pytest.skip(f"{backend.name} has no kernel for this here: NOT tested")
        raise


def compare(label: str, format: str, ours: Tensor, native: Tensor) -> tuple[float, float]:
    share = share_off(ours, native)
    ulps = ulps_apart(ours, native, find_format(format).spacing_at_1, terms=MEAN_MAGNITUDE)
    print(f"\n{label} {format}: {share:.2%} of elements off, at most {ulps:.2f} ulp")
    return share, ulps


@formats
@maybe_causal
def test_simulation_equals_cuda_flash_attention_within_one_block_of_keys(format: str, is_causal: bool) -> None:
    """Emulated, the difference of the two exps leaves 0.01 % (bf16) to 0.2 % (fp16) of the elements off."""
    inputs = draw(format, ONE_BLOCK)
    native, *native_grads = on_cuda(inputs, SDPBackend.FLASH_ATTENTION, is_causal=is_causal)
    ours, *our_grads = attention(inputs, simulate_kernels(), is_causal=is_causal)
    share, ulps = compare("flash", format, ours, native)
    assert share <= 0.01
    assert ulps <= 1
    for name, our_grad, native_grad in zip("qkv", our_grads, native_grads, strict=True):
        distance = ((our_grad.float() - native_grad.float()).norm() / native_grad.float().norm()).item()
        print(f"  gradient of {name}: {distance / find_format(format).spacing_at_1:.2f} spacings")
        # The GPU kernel rounds P and dS to half for its products, ours rounds its results only.
        assert distance <= find_format(format).spacing_at_1


@formats
@maybe_causal
def test_simulated_math_attention_equals_cuda_math_attention(format: str, is_causal: bool) -> None:
    inputs = draw(format, ONE_BLOCK)
    native = on_cuda(inputs, SDPBackend.MATH, is_causal=is_causal)[0]
    with simulate(format), sdpa_kernel(SDPBackend.MATH):
        ours = F.scaled_dot_product_attention(*inputs, is_causal=is_causal)
    share, ulps = compare("math", format, ours, native)
    assert share <= 0.01
    assert ulps <= 1


@formats
@maybe_causal
@pytest.mark.parametrize("num_keys", [ONE_BLOCK, 256])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
def test_every_cuda_kernel_is_within_two_ulps_of_the_simulation(
    backend: str, num_keys: int, format: str, is_causal: bool
) -> None:
    """The other rounding points: blocks of keys round against the maximum so far, math rounds no probabilities."""
    inputs = draw(format, num_keys)
    native = on_cuda(inputs, getattr(SDPBackend, backend), is_causal=is_causal)[0]
    ours = attention(inputs, simulate_kernels(), is_causal=is_causal)[0]
    share, ulps = compare(f"{backend} {num_keys} keys {'causal' if is_causal else 'full'}", format, ours, native)
    assert share <= 0.45
    assert ulps <= 2
