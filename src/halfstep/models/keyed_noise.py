"""Gumbel noise as a function of keys that ride in the batch, made where it is read.

The noise of 72 frames of 1024 tokens over 4096 words is 1.2 GB a draw in fp32; a frame's keys are eight bytes. So the
batch carries keys, drawn by the sample's own key, and the model hashes (key, position, word) into noise: compiled code
fuses that with the softmax it is for, a recomputing backward makes the same numbers again, and a captured graph gets
new ones with each batch. No generator is involved.

The hash is two rounds of a 32-bit mixer (the constants are lowbias32's, found by C. Wellons by search) around a
64-bit key for each row. int32 products wrap around on every device, so that the bits are the same everywhere; only the
logarithms are the device's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""Odd factors, as int32 holds them."""
BITS = 31
LARGEST_BELOW_ONE = 1 - 2**-24


def gumbel_noise(source: Tensor, num_positions: int, num_words: int) -> Tensor:
    """Noise (N, positions, words) in fp32 by keys (N, 2); noise that was drawn before passes through."""
    if source.is_floating_point():
        return source
    # 31 bits and a half: never 0, and at most 1 - 2^-24, so that both logarithms are finite. Small numbers keep all
    # their bits and become the largest noise, up to 22.
    inside = ((random_words(source, num_positions, num_words) & (2**BITS - 1)).float() + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log1p(-inside.clamp(max=LARGEST_BELOW_ONE)))


def random_words(keys: Tensor, num_positions: int, num_words: int) -> Tensor:
    """32 random bits (N, positions, words) for keys (N, 2), as int32."""
    first, second = keys.to(torch.int32).unsqueeze(-1).unbind(1)
    position = torch.arange(num_positions, device=keys.device, dtype=torch.int32)
    word = torch.arange(num_words, device=keys.device, dtype=torch.int32)
    row = mixed(mixed(position + first) ^ second).unsqueeze(-1)
    other = mixed(mixed(position + second) ^ first).unsqueeze(-1)
    return mixed(mixed(word + row) ^ other)


def mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit flips every output bit about half the time."""
    x = (x ^ _shifted(x, 16)) * FIRST
    x = (x ^ _shifted(x, 15)) * SECOND
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, filled with zeros: torch's shift of a negative number fills with ones."""
    shifted: Tensor = (x >> by) & ((1 << 32 - by) - 1)
    return shifted
