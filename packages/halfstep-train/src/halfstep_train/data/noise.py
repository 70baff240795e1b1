"""Random tensors as pure functions of (key, position of the sample, stream), drawn on the device.

A generator's numbers depend on how many were drawn before, so on batch size, accumulation and order. Here they come
from a counter (Philox4x32-10 of Salmon et al. 2011, the one torch uses on CUDA, written in int64 operations): row j
depends only on the key's root, on the position `place` + j and on the stream's name. Bits, uniforms and integers are
the same on every device; normal and Gumbel numbers go through its log, sin and cos. Nothing waits, no generator moves.

    eps = noise.normal(key, len(latents), latents.shape[1:], latents.device, stream="eps")
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep_train.data.loader import Key

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF

Shape = Sequence[int]
Device = torch.device | str


def normal(key: tuple[int, ...], num: int, shape: Shape, device: Device, stream: str = "eps") -> Tensor:
    """Draw standard normal numbers (num, *shape), by the Box-Muller transform in fp32."""
    words = _draw_words(key, num, shape, device, stream)
    # From 2^-24 on, so that its log is finite: the largest number is 5.8.
    radius = ((words[:, :, :2] >> 8) + 1).float().mul_(2**-24).log_().mul_(-2).sqrt_()
    angle = (words[:, :, 2:] >> 8).float().mul_(2 * math.pi * 2**-24)
    return _to_rows(torch.cat([radius * angle.cos(), radius * angle.sin()], dim=2), num, shape)


def uniform(key: tuple[int, ...], num: int, shape: Shape, device: Device, stream: str = "uniform") -> Tensor:
    """Draw numbers (num, *shape) in 0 <= x < 1."""
    return _to_rows((_draw_words(key, num, shape, device, stream) >> 8).float().mul_(2**-24), num, shape)


def integers(
    key: tuple[int, ...], num: int, high: int, device: Device, stream: str = "integers", shape: Shape = ()
) -> Tensor:
    """Draw int64 numbers (num, *shape) in 0 <= x < high, for high up to 2^31; each within 2^-32 of equally likely."""
    assert 0 < high <= 2**31, high
    return _to_rows((_draw_words(key, num, shape, device, stream) * high) >> 32, num, shape)


def _draw_words(key: tuple[int, ...], num: int, shape: Shape, device: Device, stream: str) -> Tensor:
    """Draw 32-bit words (num, blocks, 4), with enough blocks for a row of this shape."""
    root, place = (key.root, key.place) if isinstance(key, Key) else (key, 0)
    blocks = torch.arange(-(-math.prod(shape) // 4), device=device)
    places = torch.arange(place, place + num, device=device).view(-1, 1)
    # The 128-bit counter: block within the row, low and high half of the position, and an unused word.
    counter = [blocks.expand(num, -1), (places & MASK).expand(-1, len(blocks)), (places >> 32).expand(-1, len(blocks))]
    return philox([*counter, torch.zeros_like(counter[0])], _make_seed(root, stream))


def _make_seed(root: tuple[int, ...], stream: str) -> tuple[int, int]:
    mixed = np.random.SeedSequence((len(root), *root, zlib.crc32(stream.encode())))
    low, high = mixed.generate_state(2, np.uint32)
    return int(low), int(high)


def philox(counter: Sequence[Tensor], seed: tuple[int, int]) -> Tensor:
    """Return four random words for each counter of four words; all are 32 bits in int64, stacked last."""
    device = counter[0].device
    # Words 0 and 2 are multiplied, 1 and 3 are what the products are mixed with, then cut to 32 bits.
    even, odd = torch.stack([counter[0], counter[2]]), torch.stack([counter[1], counter[3]])
    multipliers, keys, weyl = (_fill_pair(values, device, even.ndim) for values in (MULTIPLIERS, seed, WEYL))
    for _ in range(ROUNDS):
        product = (even * multipliers).flip(0)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(keys).bitwise_and_(MASK)
        odd = product
        keys = keys + weyl
    odd = odd & MASK
    return torch.stack([even[0], odd[0], even[1], odd[1]], dim=-1)


def _fill_pair(values: tuple[int, int], device: torch.device, ndim: int) -> Tensor:
    """Return two values as a tensor filled on the device: a copy from the host would wait."""
    return torch.stack([torch.full((1,) * (ndim - 1), value, device=device) for value in values])


def _to_rows(drawn: Tensor, num: int, shape: Shape) -> Tensor:
    return drawn.flatten(1)[:, : math.prod(shape)].reshape(num, *shape).contiguous()
