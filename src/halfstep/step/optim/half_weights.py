"""Weights stored in bf16 that learn as fp32 ones do: how a new fp32 value is put into them.

    split        the 16 bits that bf16 drops are kept beside it, so nothing is lost
    stochastic   up or down at random, by how near each is: right on average, without further memory
    nearest      as a cast rounds: an update below half of the spacing is lost, every time it comes

Split: the bits of an fp32 value are a whole number u. Its bf16 is u + 0x8000 over 65,536, rounded down, and what is
left, u less 65,536 times that, lies in -32,768 … 32,767 and fits into 16 bits. Rounding half up in the bit pattern,
rather than half to even, is what makes the rest fit; it moves exact ties only (one value in 65,536), away from zero
where a cast would go to the even neighbour. Putting the two together again is one addition, exact for every pair of
them, so a weight that a bad step did not touch comes back bit for bit, whatever it is; and so does every finite fp32
value whose bf16 is finite.

Stochastic: 16 random bits are added before the last 16 are cut off. They are a hash of seed, parameter, step and
position, so a resumed run draws what the first one would have drawn, on any device.
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
STEPS, NUMBERS = 0x9E3779B1, 0x85EBCA77  # odd numbers that set steps and parameters apart
Whole = TypeVar("Whole", int, Tensor)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return fp32 values from their bf16 high halves and the 16 low bits."""
    return ((high.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values as bf16 and the 16 bits beside it."""
    bits = values.view(torch.int32)
    high = bits + HALF >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def round_stochastically(values: Tensor, key: Tensor) -> Tensor:
    """fp32 values (a vector) as bf16, up or down by the hash of `key` and each one's position."""
    positions = torch.arange(values.numel(), device=values.device)
    noise = hash_numbers(positions + key) & 0xFFFF
    rounded = values.view(torch.int32) + noise.int() >> 16
    # Infinity and NaN have no neighbour to go to.
    return torch.where(values.isfinite(), rounded.to(torch.int16).view(torch.bfloat16), values.bfloat16())


def make_key(seed: int, number: int, step: Tensor) -> Tensor:
    """Return the random key of one parameter in one step; on the device, as the step's number is."""
    return hash_numbers(step.long() * STEPS + hash_numbers(seed * NUMBERS + number))


def hash_numbers(numbers: Whole) -> Whole:
    """32 bits of a number, or of each number of a tensor of int64."""
    bits = numbers & MASK
    bits = (bits ^ bits >> 16) * FIRST & MASK
    bits = (bits ^ bits >> 15) * SECOND & MASK
    return bits ^ bits >> 16


def is_kept_in_half(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16
