"""Attention without the shapes at which cuDNN's backward gives NaN for finite numbers.

On Hopper GPUs cuDNN, torch's first choice since 2.11, reads keys in tiles of 128. Where the last tile is half full, and
all scores of a query lie below -88, exp overflows in its empty half and the query's gradient is NaN: in bf16 and fp16,
with a mask and without (pytorch/pytorch#196678; a survey on an H200 found no other lengths). Causal attention without a
mask is right. At those lengths another of torch's kernels runs; at all others cuDNN stays, which is faster.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TILE = 128
MENDED = 92600  # cuDNN 9.26, by its makers' word; tried with 9.19
OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

by_torch = F.scaled_dot_product_attention


@functools.cache
def is_at_fault(device: str) -> bool:
    """Whether cuDNN on this device has the fault."""
    if not torch.cuda.is_available() or torch.version.hip or not device.startswith("cuda"):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9 and (torch.backends.cudnn.version() or 0) < MENDED


def has_bad_length(keys: Tensor, *, is_causal: bool) -> bool:
    return not is_causal and not keys.is_nested and keys.shape[-2] % TILE == TILE // 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allowed() -> list[SDPBackend]:
    """Kernels that may run instead: those that the user's own `sdpa_kernel` leaves."""
    flags = torch.backends.cuda
    enabled = (flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled())
    return [kernel for kernel, is_on in zip(OTHERS, enabled, strict=True) if is_on]


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """torch's, by another kernel than cuDNN's where that one fails; not where nothing else is allowed."""
    run = functools.partial(by_torch, query, key, value, attn_mask, dropout_p, is_causal, **options)
    if not has_bad_length(key, is_causal=is_causal):
        return run()
    kernels = allowed()
    if not kernels:
        return run()
    with sdpa_kernel(kernels):
        return run()


@contextlib.contextmanager
def sound_attention(device: str) -> Iterator[None]:
    """`F.scaled_dot_product_attention` is the one above inside, where the device needs it. A name imported from torch
    before keeps torch's own; its NaN is a bad step then, which the guard drops."""
    if not is_at_fault(device) or F.scaled_dot_product_attention is not by_torch:
        yield
        return
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        if F.scaled_dot_product_attention is attention:  # and not what the user has set since
            F.scaled_dot_product_attention = by_torch
