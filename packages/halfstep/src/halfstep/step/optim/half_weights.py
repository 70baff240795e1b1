"""Store fp32 weights in bf16 without losing small updates.

    split        keep the 16 bits that bf16 drops in a second tensor: nothing is lost
    stochastic   round up or down at random, in proportion to the distance: unbiased, without further memory
    nearest      round as a cast does: an update below half of the spacing is lost, every time

Split: read the bits of an fp32 value as an integer u. Its bf16 is h = floor((u + 0x8000) / 65,536), and the remainder u
- 65,536 h is in -32,768 … 32,767, which fits into 16 bits. The remainder fits because the bit pattern is rounded half
up, not half to even. This differs from a cast for exact ties only (one value in 65,536), which round away from zero.
Joining the two is one addition, exact for every pair, so a weight that a bad step did not touch comes back
bit-identical. So does every finite fp32 value whose bf16 is finite.

Stochastic: 16 random bits are added before the last 16 are cut off. They are a hash of seed, parameter, step and
position, so a resumed run draws the same bits on any device.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import torch
from torch import Tensor

Rounding = Literal["split", "stochastic", "nearest"]

HALF = 0x8000
MASK = 0xFFFF_FFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Multipliers of Wellons' hash "lowbias32", whose every bit of output depends evenly on every bit of input."""
STEPS, NUMBERS = 0x9E3779B1, 0x85EBCA77  # odd factors that keep the keys of steps and parameters distinct
Whole = TypeVar("Whole", int, Tensor)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return fp32 values from their bf16 high halves and the 16 low bits."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into bf16 and the remaining 16 bits."""
    bits = values.view(torch.int32)
    high = bits + HALF >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def round_stochastically(values: Tensor, key: Tensor) -> Tensor:
    """Round a vector of fp32 values to bf16, up or down by the hash of `key` and each value's position."""
    positions = torch.arange(values.numel(), device=values.device)
    noise = hash_numbers(positions + key) & 0xFFFF
    rounded = values.view(torch.int32) + noise.int() >> 16
    # Infinity and NaN cannot be rounded to a neighbour.
    return torch.where(values.isfinite(), rounded.to(torch.int16).view(torch.bfloat16), values.bfloat16())


def make_key(seed: int, number: int, step: Tensor) -> Tensor:
    """Return the random key of one parameter in one step; on the device, as the step's number is."""
    return hash_numbers(step.long() * STEPS + hash_numbers(seed * NUMBERS + number))


def hash_numbers(numbers: Whole) -> Whole:
    """Return a 32-bit hash of a number, or of each number in an int64 tensor."""
    bits = numbers & MASK
    bits = (bits ^ bits >> 16) * FIRST & MASK
    bits = (bits ^ bits >> 15) * SECOND & MASK
    return bits ^ bits >> 16


def is_kept_in_half(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16
