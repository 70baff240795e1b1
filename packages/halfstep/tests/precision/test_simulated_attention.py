"""Simulated attention: which kernel it follows, and how far the CPU's coarse exp is from it.

Followed are the fused kernels (CUDA's default, and the CPU's): scores and sums in fp32, exp(score - row maximum)
rounded to half for the product with V, fp32 accumulation, one rounding at the end.
"""

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
from halfstep.precision.simulate import compute_flash_attention, simulate_kernels
from native_kernels import HALF, share_off, ulps_apart, without_onednn

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
def test_the_simulation_is_that_kernel_with_an_exact_exp(format: str, is_causal: bool) -> None:
    q, k, v = draw(HALF[format])
    expected, _ = compute_flash_attention(q, k, v, is_causal=is_causal)
    with simulate_kernels():
        ours = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert torch.equal(ours, expected)


@formats
@maybe_causal
def test_the_coarse_exp_of_the_cpu_moves_a_third_of_the_elements_by_an_ulp_or_two(format: str, is_causal: bool) -> None:
    """Measured: 4 to 7 % of elements in bf16, 23 to 30 % in fp16, no further than 2 ulp."""
    q, k, v = draw(HALF[format])
    with simulate_kernels():
        ours = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    with without_onednn():
        native = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
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
