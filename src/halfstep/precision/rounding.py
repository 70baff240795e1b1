"""`round_to`: what a format makes of fp32 numbers. Pure tensor operations, so it runs wherever torch does.

Defined by the format, not by a cast: torch's own fp8 casts changed their overflow between releases, and tf32 has no
dtype. Nearest even; the bit pattern of an fp32 number is rounded as an integer, whose carry into the exponent is what
rounding up to the next power of two means.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from halfstep.errors import FormatError, PrecisionError
from halfstep.formats import FP32, Format, format_named

Overflow = Literal["saturate", "inf", "nan"]

SIGN, MAGNITUDE = -0x8000_0000, 0x7FFF_FFFF


def round_to(tensor: torch.Tensor, format: str | Format, overflow: Overflow | None = None) -> torch.Tensor:
    """Round fp32 values to `format`; too large ones become ±inf, NaN or ±largest, by default what the format defines.

    `saturate` takes infinities too, as the saturating casts of the hardware do.
    """
    fmt = format if isinstance(format, Format) else format_named(format)
    overflow = overflow or ("inf" if fmt.has_infinity else "nan")
    _check(tensor, fmt, overflow)
    if fmt.mantissa_bits >= FP32.mantissa_bits:
        rounded = tensor
    else:
        rounded = _round_bits(tensor, FP32.mantissa_bits - fmt.mantissa_bits)
        if fmt.exponent_bits < FP32.exponent_bits:
            rounded = torch.where(tensor.abs() < fmt.smallest_normal, _round_subnormal(tensor, fmt), rounded)
    if overflow == "inf" and fmt.exponent_bits >= FP32.exponent_bits:
        return rounded  # fp32's own exponent: the carry has made infinities already
    too_large = rounded.abs() > min(fmt.largest, FP32.largest)
    limit = {"inf": math.inf, "nan": math.nan, "saturate": fmt.largest}[overflow]
    return torch.where(too_large, torch.copysign(torch.full_like(rounded, limit), tensor), rounded)


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


def _check(tensor: torch.Tensor, fmt: Format, overflow: Overflow) -> None:
    if tensor.dtype != torch.float32:
        raise PrecisionError(f"round_to takes fp32, got {tensor.dtype}", fix="tensor.float()")
    if overflow not in ("saturate", "inf", "nan"):
        raise FormatError(f"unknown overflow {overflow!r}", fix="one of saturate, inf, nan")
    if overflow == "inf" and not fmt.has_infinity:
        raise FormatError(f"{fmt.name} has no infinity to overflow to", fix="overflow='nan' or 'saturate'")
