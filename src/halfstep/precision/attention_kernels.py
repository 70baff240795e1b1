"""Attention without the shapes at which cuDNN's backward gives NaN for finite numbers.

On Hopper GPUs cuDNN, torch's first choice since 2.11, reads keys in tiles of 128. Where the last tile is half full, and
all scores of a query lie below -88, exp overflows in its empty half and the query's gradient is NaN: in bf16 and fp16,
with a mask and without (pytorch/pytorch#196678; a survey on an H200 found no other lengths). Causal attention without a
mask is right. A single query of a single head fails in the same way with 128 keys and more
(NVIDIA/cudnn-frontend#1072). For those shapes another of torch's kernels runs; for all others cuDNN stays, which is
faster. benchmarks/cudnn_attention.py is the survey; batches of up to 256 samples fail at no other length.

No version is excused: its makers fixed 9.26 and saw a 9.30 fail (NVIDIA/cudnn-frontend#628).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TILE = 128
OTHERS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)

by_torch = torch._C._nn.scaled_dot_product_attention  # in F somebody else's may stand by now

_switching = threading.RLock()
"""Kernels are switched for the whole process: of two threads the second would take the first one's choice for what
the user has set, and leave it behind."""
_num_inside = 0


@functools.cache
def is_at_fault(device: str) -> bool:
    """Whether cuDNN on this device has the fault."""
    if not torch.cuda.is_available() or torch.version.hip or not device.startswith("cuda"):
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


# Called while the compiler traces, not folded by it: torch 2.11's compiler takes is_exporting() for True everywhere,
# which would leave compiled code unprotected.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_traced_for_any_length() -> bool:
    """True while torch.export or torch.jit.trace records a program."""
    return bool(torch.compiler.is_exporting() or torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def has_bad_shape(query: Any, key: Any, *, is_causal: bool) -> bool:
    """True for shapes at which cuDNN fails; False for a program of any length and for what torch refuses."""
    if is_traced_for_any_length() or not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        return False
    if query.is_nested or key.is_nested or query.dim() < 2 or key.dim() < 2:
        return False
    return query.shape[-2] == 1 or not is_causal and key.shape[-2] % TILE == TILE // 2


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def allowed() -> list[SDPBackend]:
    """Kernels that may run instead: those that the user's own `sdpa_kernel` leaves."""
    flags = torch.backends.cuda
    enabled = (flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled())
    return [kernel for kernel, is_on in zip(OTHERS, enabled, strict=True) if is_on]


def attention(*arguments: Any, **options: Any) -> Tensor:
    """torch's, by another kernel than cuDNN's where that one fails; not where nothing else is allowed."""
    query = arguments[0] if arguments else options.get("query")
    key = arguments[1] if len(arguments) > 1 else options.get("key")
    is_causal = arguments[5] if len(arguments) > 5 else options.get("is_causal", False)
    kernels = allowed() if has_bad_shape(query, key, is_causal=is_causal) else []
    if not kernels:
        return by_torch(*arguments, **options)
    # Compiled code is switched while it is traced, and has its kernel from then on.
    alone = contextlib.nullcontext() if torch.compiler.is_compiling() else _switching
    with alone, sdpa_kernel(kernels):
        return by_torch(*arguments, **options)


@contextlib.contextmanager
def sound_attention(device: str) -> Iterator[None]:
    """`F.scaled_dot_product_attention` is the one above inside, where the device needs it. A name imported from torch
    before keeps torch's own; its NaN is a bad step then, which the guard drops."""
    if not is_at_fault(device):
        yield
        return
    _enter(1)
    try:
        yield
    finally:
        _enter(-1)


def _enter(num: int) -> None:
    """Threads come and go in any order; what the user has set there stays."""
    global _num_inside
    with _switching:
        _num_inside += num
        now, wanted = (by_torch, attention) if _num_inside else (attention, by_torch)
        if F.scaled_dot_product_attention is now:
            F.scaled_dot_product_attention = wanted
