"""Compute with a format's numerics on hardware that lacks it. For numerics, never for speed; eager only.

`hs.simulate` and simulated plans use this file through contexts.py. Autocast really runs, so every tensor has its real
dtype. Only matmul, convolution and attention, which a CPU without half-precision units runs 30 to 200 times slower, are
replaced below autograd, in forward and backward, by the fp32 kernel plus a cast: half operands are exact in fp32 and
both kernels sum in fp32, so only the last rounding is ours, and it is the same rounding. fp16 overflows to inf and
underflows to zero in that cast as it does on a GPU.

Rejected: rounding hooks on modules (they miss functional calls and gradients), and replacing CPU kernels process-wide
(other threads would compute through us).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from halfstep.errors import PrecisionError
from halfstep.formats import FP32, Format, find_format
from halfstep.islands import LOW_PRECISION
from halfstep.precision.op_lists import disable_onednn, is_recurrent

aten = torch.ops.aten

OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.dot.default: (0, 1),
    aten.addmm.default: (1, 2),
    aten.addmv.default: (1, 2),
    aten.addbmm.default: (1, 2),
    aten.baddbmm.default: (1, 2),
    aten.convolution.default: (0, 1),
    aten.convolution_backward.default: (0, 1, 2),
}
"""Kernels that multiply, and the positions of the arguments that are multiplied with each other."""

FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def simulate_kernels(*, tf32: bool = False) -> TorchDispatchMode:
    """Run matmul, convolution and attention on half tensors by the fp32 kernel plus a cast; `tf32` rounds fp32 ones."""
    return _SimulatedKernels(tf32=tf32)


class _SimulatedKernels(TorchDispatchMode):
    def __init__(self, *, tf32: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tf32 = tf32

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REPLACEMENTS:
            dtype = args[OPERANDS.get(func, (0,))[0]].dtype
            if dtype in LOW_PRECISION:
                return REPLACEMENTS[func](func, dtype, args, kwargs)
            if self.tf32 and dtype == torch.float32:
                rounded = OPERANDS.get(func, (0, 1, 2))
                args = tuple(round_to(arg, "tf32") if k in rounded else arg for k, arg in enumerate(args))
        elif _is_composite(func):
            # Under inference_mode linear, conv2d and attention arrive undecomposed: their primitive ops come back here.
            with self, disable_onednn() if is_recurrent(func) else contextlib.nullcontext():
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(func._can_decompose())


def _run_in_fp32(func: Callable[..., Any], dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map(_to_full, (args, kwargs))
    return _to_half(func(*args, **kwargs), dtype)


def _run_convolution(
    func: Callable[..., Any], dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    input, weight, bias, *geometry = args
    is_transposed = args[6]
    if bias is None or not is_transposed:
        return _run_in_fp32(func, dtype, args, kwargs)
    # Half-precision transposed convolutions round the sum, then add the bias and round again.
    output = _run_in_fp32(func, dtype, (input, weight, None, *geometry), kwargs)
    return output + bias.reshape(-1, *[1] * (output.dim() - 2))


def compute_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with the rounding points of the fused kernels, CUDA's default: P and the output are rounded to
    half.

    Scores and sums are fp32. P = exp(score - row maximum) is rounded before it is divided by its sum, as in a fused
    kernel that sees all keys in one block. Also returns the log-sum-exp of each row, which backward needs.
    """
    assert dropout_p == 0.0, "torch takes the decomposed path under dropout"
    scores = to_full(query) @ to_full(key).transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
    if is_causal:
        is_future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(is_future, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0.0)  # fully masked rows return zeros, not NaN
    unnormalised = torch.exp(scores - top)
    total = unnormalised.sum(-1, keepdim=True)
    probabilities = to_full(to_half(unnormalised, query.dtype))
    output = probabilities @ to_full(value) / total.masked_fill(total == 0, 1.0)
    # The kernel stores heads next to each other, and its backward expects that.
    output = to_half(output, query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    return output, (top + total.log()).squeeze(-1)


REPLACEMENTS: dict[Any, Callable[[Any, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys([*OPERANDS, FLASH_BACKWARD], _run_in_fp32),
    aten.convolution.default: _run_convolution,
    FLASH: lambda func, dtype, args, kwargs: compute_flash_attention(*args, **kwargs),
}
"""The replacement of each kernel on half-precision tensors."""


def _to_full(value: Any) -> Any:
    return to_full(value) if isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION else value


def _to_half(result: Any, dtype: torch.dtype) -> Any:
    """Cast one tensor, or each of those that a backward kernel returns; gradients that are not needed are None."""
    if isinstance(result, torch.Tensor):
        return to_half(result, dtype)
    return type(result)(item if item is None else to_half(item, dtype) for item in result)


# --- casts between fp16 and fp32 on the CPU, through numpy ---
# torch builds for ARM convert fp16 one number at a time (8 ms for 600 k numbers); numpy uses the vector unit (under 1
# ms) and rounds identically. Simulation casts around every kernel. Only below autograd: numpy records no gradients.


def to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast fp32 to bf16 or fp16: round half to even, overflow to infinity."""
    if dtype == torch.float16 and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        with np.errstate(over="ignore", under="ignore"):
            return torch.from_numpy(np.asarray(tensor.detach().numpy().astype(np.float16)))
    return tensor.to(dtype)


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    """Cast bf16 or fp16 to fp32, exactly."""
    if tensor.dtype == torch.float16 and tensor.device.type == "cpu" and tensor.layout is torch.strided:
        return torch.from_numpy(np.asarray(tensor.detach().numpy().astype(np.float32)))
    return tensor.float()


# --- rounding fp32 values to a format ---
# Defined by the format, not by a cast: torch's own fp8 casts changed their overflow between releases, and tf32 has no
# dtype. Round half to even: the bit pattern of an fp32 number is rounded as an integer, and a carry into the exponent
# is exactly rounding up to the next power of two.

SIGN, MAGNITUDE = -0x8000_0000, 0x7FFF_FFFF


def round_to(tensor: torch.Tensor, format: str | Format) -> torch.Tensor:
    """Round fp32 values to `format`; too large ones become ±inf, or NaN where the format has no infinity."""
    fmt = format if isinstance(format, Format) else find_format(format)
    if tensor.dtype != torch.float32:
        raise PrecisionError(f"round_to takes fp32, got {tensor.dtype}", fix="tensor.float()")
    if fmt.mantissa_bits >= FP32.mantissa_bits:
        rounded = tensor
    else:
        rounded = _round_bits(tensor, FP32.mantissa_bits - fmt.mantissa_bits)
        if fmt.exponent_bits < FP32.exponent_bits:
            rounded = torch.where(tensor.abs() < fmt.smallest_normal, _round_subnormal(tensor, fmt), rounded)
    if fmt.exponent_bits >= FP32.exponent_bits:
        return rounded  # same exponent range as fp32: the carry has already produced infinities
    limit = torch.full_like(rounded, math.inf if fmt.has_infinity else math.nan)
    return torch.where(rounded.abs() > fmt.largest, torch.copysign(limit, tensor), rounded)


def _round_bits(tensor: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    """Round the fp32 mantissa half to even, dropping its lowest bits; NaN stays NaN."""
    # Add half of the last kept bit minus one, plus one if that bit is odd, then truncate: exactly half rounds up only
    # to an even result. A carry out of the mantissa increments the exponent.
    bits = tensor.view(torch.int32)
    magnitude = bits & MAGNITUDE
    is_odd = (magnitude >> dropped_bits) & 1
    nearest_even = (magnitude + ((1 << (dropped_bits - 1)) - 1) + is_odd) & -(1 << dropped_bits)
    rounded = (nearest_even | (bits & SIGN)).view(torch.float32)
    return torch.where(tensor.isnan(), tensor, rounded)


def _round_subnormal(tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round values below the smallest normal number, where the spacing is constant; torch.round is half to even."""
    # Both factors are powers of two. An fp32 subnormal that a GPU flushes to zero would round to zero anyway.
    steps = torch.round(tensor * (1.0 / fmt.smallest_subnormal)) * fmt.smallest_subnormal
    return torch.copysign(steps, tensor)
