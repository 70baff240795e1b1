"""Number formats: pure facts, computed from the bit layout. No torch.

A binary format with E exponent bits and M stored mantissa bits has

    bias               2^(E-1) - 1
    spacing at 1       2^-M                      (machine epsilon: the gap between 1 and the next number)
    smallest normal    2^(1 - bias)
    smallest subnormal smallest normal * 2^-M
    largest            (2 - 2^-M) * 2^bias       with an infinity; IEEE style

fp8_e4m3 is the "fn" variant (finite): its top exponent still holds numbers and only the all-ones mantissa is NaN,
so there is no infinity and the largest value is 448 instead of 240.
tf32 is fp32's range with fp16's mantissa; it lives in 32-bit words and exists only inside matrix units.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from halfstep.errors import FormatError, suggest_nearest

DryRunTarget = Literal["fp16", "bf16-true", "fp8"]
"""What `halfstep dry-run` judges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One number format. Everything but the bit layout is computed."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    storage_bits: int
    """Bits a value occupies in memory; more than 1 + E + M for tf32 alone."""
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        """Return the bits that carry information: sign, exponent, mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def spacing_at_1(self) -> float:
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def largest(self) -> float:
        # Finite-only formats use the exponent that IEEE reserves for infinity, and lose its topmost mantissa to NaN.
        if self.has_infinity:
            return math.ldexp(2.0 - self.spacing_at_1, self.bias)
        return math.ldexp(2.0 - 2 * self.spacing_at_1, self.bias + 1)

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        return math.ldexp(1.0, 1 - self.bias - self.mantissa_bits)

    @property
    def decimal_digits(self) -> float:
        """Return the significant decimal digits: log10 of 2^(M+1), counting the implicit bit."""
        return (self.mantissa_bits + 1) * math.log10(2)


FP64 = Format(name="fp64", exponent_bits=11, mantissa_bits=52, storage_bits=64)
FP32 = Format(name="fp32", exponent_bits=8, mantissa_bits=23, storage_bits=32)
TF32 = Format(name="tf32", exponent_bits=8, mantissa_bits=10, storage_bits=32)
BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7, storage_bits=16)
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10, storage_bits=16)
FP8_E4M3 = Format(name="fp8_e4m3", exponent_bits=4, mantissa_bits=3, storage_bits=8, has_infinity=False)
FP8_E5M2 = Format(name="fp8_e5m2", exponent_bits=5, mantissa_bits=2, storage_bits=8)

FORMATS: dict[str, Format] = {f.name: f for f in (FP64, FP32, TF32, BF16, FP16, FP8_E4M3, FP8_E5M2)}


def find_format(name: str) -> Format:
    """Return the format of this name; raise an error with the nearest names if there is none."""
    try:
        return FORMATS[name.lower()]
    except KeyError:
        raise FormatError(f"unknown number format {name!r}", fix=suggest_nearest(name, FORMATS)) from None


def round_value(x: float, fmt: Format) -> float:
    """Round one number to `fmt`: to nearest even, with subnormals and overflow to infinity (NaN without one)."""
    if x == 0.0 or math.isnan(x) or math.isinf(x) and fmt.has_infinity:
        return x
    if math.isinf(x):
        return math.nan
    exponent = max(math.frexp(x)[1] - 1, 1 - fmt.bias)  # frexp's mantissa is in [0.5, 1)
    ulp = math.ldexp(1.0, exponent - fmt.mantissa_bits)
    # Python's round is half-to-even, and x / ulp is exact: ulp is a power of two.
    rounded = math.copysign(round(x / ulp) * ulp, x)
    if abs(rounded) > fmt.largest:
        return math.copysign(math.inf, x) if fmt.has_infinity else math.nan
    return rounded


FateKind = Literal["exact", "rounded", "subnormal", "flushed to zero", "overflow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fate:
    """What one format makes of one number."""

    format: str
    result: float
    kind: FateKind
    relative_error: float | None
    """Relative to the number as written; None if either is not finite."""


def find_fate(written: str, fmt: Format) -> Fate:
    """Return what `fmt` makes of a number as a person writes it: `0.1` is rounded even by fp64."""
    try:
        x = float(written)
    except ValueError:
        raise FormatError(f"{written!r} is not a number", fix="write 70000, 1e-8, -3.5, inf or nan") from None
    result = round_value(x, fmt)
    if math.isnan(x) or written.strip().lstrip("+-").lower() in ("inf", "infinity") and math.isinf(result):
        return Fate(format=fmt.name, result=result, kind="exact", relative_error=None)
    if not math.isfinite(result):
        return Fate(format=fmt.name, result=result, kind="overflow", relative_error=None)
    if result == 0.0:
        is_zero = not re.search(r"[1-9]", re.split("[eE]", written)[0])
        kind: FateKind = "exact" if is_zero else "flushed to zero"
        return Fate(format=fmt.name, result=result, kind=kind, relative_error=0.0 if is_zero else 1.0)
    exact = Fraction(written)
    error = float(abs(Fraction(result) - exact) / abs(exact))
    if abs(result) < fmt.smallest_normal:
        return Fate(format=fmt.name, result=result, kind="subnormal", relative_error=error)
    return Fate(format=fmt.name, result=result, kind="rounded" if error else "exact", relative_error=error)
