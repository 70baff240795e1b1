"""What bf16 and fp16 can hold, computed from the bit layout.

Copied from halfstep, which this package does not need; halfstep's tests compare the two."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    def max_exponent(self) -> int:
        """Return the exponent of the largest number: finite-only formats use the code that IEEE reserves for
        infinity."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def spacing_at_1(self) -> float:
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def largest(self) -> float:
        # Finite-only formats lose their topmost mantissa code to NaN.
        top = 2.0 - self.spacing_at_1 * (1 if self.has_infinity else 2)
        return math.ldexp(top, self.max_exponent)

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


BF16 = Format(name="bf16", exponent_bits=8, mantissa_bits=7, storage_bits=16)
FP16 = Format(name="fp16", exponent_bits=5, mantissa_bits=10, storage_bits=16)


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
