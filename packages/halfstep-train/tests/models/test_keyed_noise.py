"""Gumbel noise that a model makes of keys: it is noise, and nothing but its keys decides it."""

from __future__ import annotations

import math

import torch

from halfstep_train.workloads.slots.dvae import hash_bits, make_gumbel_noise

KEYS = torch.tensor([[5, 7], [5, 8], [6, 7], [2**31 - 1, 0]])


def test_a_frame_gets_the_same_noise_in_a_batch_of_any_size_and_with_any_vocabulary() -> None:
    whole = make_gumbel_noise(KEYS, 6, 40)
    assert torch.equal(make_gumbel_noise(KEYS[2:3], 6, 40)[0], whole[2])
    assert torch.equal(make_gumbel_noise(KEYS, 4, 30), whole[:, :4, :30])


def word_by_hand(first: int, second: int, position: int, word: int) -> int:
    """The same hash in Python's own integers."""

    def mixed(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    row = mixed(mixed((position + first) % 2**32) ^ second)
    other = mixed(mixed((position + second) % 2**32) ^ first)
    return mixed(mixed((word + row) % 2**32) ^ other)


def test_bits_are_those_of_unsigned_arithmetic() -> None:
    """Products wrap around and shifts fill with zeros, on a type that has a sign."""
    found = hash_bits(KEYS, 3, 50)
    by_hand = [[[word_by_hand(*pair, p, w) for w in range(50)] for p in range(3)] for pair in KEYS.tolist()]
    assert torch.equal(found.long() % 2**32, torch.tensor(by_hand))


def test_it_has_the_mean_the_spread_and_the_tail_of_gumbels_distribution() -> None:
    noise = make_gumbel_noise(torch.arange(64).view(32, 2), 64, 1024).double()
    error = math.pi / math.sqrt(6 * noise.numel())
    assert abs(noise.mean() - 0.5772156649) < 5 * error
    assert abs(noise.var() / (math.pi**2 / 6) - 1) < 0.01
    assert noise.isfinite().all()
    share_above_ten = (noise > 10).double().mean()
    assert abs(share_above_ten / -math.expm1(-math.exp(-10)) - 1) < 0.35  # about 95 of two million
    assert -3 < noise.min() < noise.max() < 23
