"""`round_to`: what a format makes of fp32 numbers. Pure tensor operations, so it runs wherever torch does.

Defined by the format, not by a cast: torch's own fp8 casts changed their overflow between releases, and tf32 has no
dtype. Nearest even; the bit pattern of an fp32 number is rounded as an integer, whose carry into the exponent is what
rounding up to the next power of two means.
"""

from __future__ import annotations

import math

import torch

from halfstep.errors import PrecisionError
from halfstep.formats import FP32, Format, find_format

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
        return rounded  # fp32's own exponent: the carry has made infinities already
    limit = torch.full_like(rounded, math.inf if fmt.has_infinity else math.nan)
    return torch.where(rounded.abs() > fmt.largest, torch.copysign(limit, tensor), rounded)


def _round_bits(tensor: torch.Tensor, dropped_bits: int) -> torch.Tensor:
    bits = tensor.view(torch.int32)
    magnitude = bits & MAGNITUDE
    is_odd = (magnitude >> dropped_bits) & 1
    nearest_even = (magnitude + ((1 << (dropped_bits - 1)) - 1) + is_odd) & -(1 << dropped_bits)
    rounded = (nearest_even | (bits & SIGN)).view(torch.float32)
    return torch.where(tensor.isnan(), tensor, rounded)


def _round_subnormal(tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Below the smallest normal number the spacing is constant, and torch.round rounds halves to even."""
    # Both factors are powers of two. An fp32 subnormal that a GPU flushes to zero would round to zero anyway.
    steps = torch.round(tensor * (1.0 / fmt.smallest_subnormal)) * fmt.smallest_subnormal
    return torch.copysign(steps, tensor)
