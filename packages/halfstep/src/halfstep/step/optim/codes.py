"""One-byte codes for optimizer moments: a table of 256 values between -1 and 1, denser towards zero, and block scales.

The table is the dynamic tree of Dettmers 2015: seven decades, each with twice as many equal intervals as the one below
it. The nearest code is computed, not searched for: eight table reads per value would take longer than the memory
traffic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256  # values that share a scale
SMALLEST_SCALE = 1e-12
NUM_DECADES = 7


@functools.cache
def make_signed_table() -> tuple[float, ...]:
    """Return the signed table: a sign bit, an exponent of ten in unary, and a fraction in the remaining bits."""
    return tuple(sorted([0.0, 1.0, *(sign * value for value in _build_tree(0) for sign in (1, -1))]))


@functools.cache
def make_unsigned_table() -> tuple[float, ...]:
    """Return the unsigned table: as the signed one, with the sign's bit added to the fraction."""
    return tuple(sorted([0.0, 1.0, *_build_tree(1)]))


def _build_tree(extra_bits: int) -> list[float]:
    """Return the midpoints of 2**(level + extra) equal intervals of 0.1 to 1, for seven decades."""
    values: list[float] = []
    for level in range(NUM_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (level + extra_bits) + 1)
        values += (10.0 ** (level - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return values


class CodeRange(NamedTuple):
    """A range of magnitudes from `threshold` on, where the nearest value has rank floor(slope * x + offset), at most
    `last`."""

    threshold: float
    slope: float
    offset: float
    last: float


def make_levels(extra_bits: int) -> tuple[CodeRange, ...]:
    """Return the decades of the table's upper half, and its last value, 1; rank 0 is zero."""
    found: list[CodeRange] = []
    rank = 1
    for level in range(NUM_DECADES):
        low, parts = 10.0 ** (level - NUM_DECADES), 2 ** (level + extra_bits)
        width = 9 * low / parts
        # The midpoint to the value below, which is zero for the first decade. The decade below has intervals of a fifth
        # of this width, so its last midpoint is a tenth of this width under `low`.
        threshold = low + width / 5 if level else (low + width / 2) / 2
        found.append(CodeRange(threshold, 1 / width, rank - low / width, rank + parts - 1))
        rank += parts
    return (*found, CodeRange(1 - width / 4, 0.0, rank, rank))


SIGNED, UNSIGNED = make_levels(0), make_levels(1)


def rank_magnitudes(magnitudes: Tensor, decades: tuple[CodeRange, ...]) -> Tensor:
    """Return the rank of the nearest value in the table's upper half."""
    slope, offset, last = (torch.zeros_like(magnitudes) for _ in range(3))
    for level in decades:
        reached = magnitudes >= level.threshold
        slope = torch.where(reached, level.slope, slope)
        offset = torch.where(reached, level.offset, offset)
        last = torch.where(reached, level.last, last)
    return torch.minimum(magnitudes * slope + offset, last).int()


def encode_signed(values: Tensor) -> Tensor:
    """Return signed codes; the index of zero is 127, and -1 has no code."""
    found = rank_magnitudes(values.abs(), SIGNED)
    return torch.where(values < 0, (127 - found).clamp(min=0), 127 + found).to(torch.uint8)


def encode_unsigned(values: Tensor) -> Tensor:
    return rank_magnitudes(values, UNSIGNED).to(torch.uint8)
