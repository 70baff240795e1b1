"""Noise is a function of key, place and stream; never of how samples fell into batches."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep_train.data import noise
from halfstep_train.data.loader import Key

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_the_bits_are_those_of_the_published_philox(word: int, expected: tuple[int, ...]) -> None:
    """Known answers of Random123, the reference implementation: all words of counter and key alike."""
    counter = [torch.full((1,), word)] * 4
    assert noise.philox(counter, (word, word))[0].tolist() == list(expected)


@pytest.mark.parametrize("draw", [noise.normal, noise.uniform])
@pytest.mark.parametrize("sizes", [(1, 6), (3, 4), (5, 1, 1)])
@pytest.mark.parametrize("shape", [(), (3,), (3, 5, 7)])
def test_a_sample_gets_the_same_numbers_in_a_batch_of_any_size(draw, sizes: tuple[int, ...], shape) -> None:
    whole = draw(Key.for_training(3, 7), 7, shape, CPU)
    parts, place = [], 0
    for k, size in enumerate(sizes):
        parts.append(draw(Key.for_training(3, 7, k, place), size, shape, CPU))
        place += size
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == (7, *shape)
    assert whole.dtype == torch.float32


def test_integers_follow_the_same_rule_and_stay_below_their_bound() -> None:
    whole = noise.integers(Key.for_training(0, 1), 4000, 1000, CPU, stream="t")
    assert torch.equal(whole[1500:], noise.integers(Key.for_training(0, 1, 1, 1500), 2500, 1000, CPU, stream="t"))
    assert whole.shape == (4000,)
    assert whole.dtype == torch.int64
    assert 0 <= int(whole.min()) < 10
    assert 990 < int(whole.max()) < 1000
    assert noise.integers(Key.for_sampling(0), 2, 5, CPU, shape=(3,)).shape == (2, 3)


def test_seed_step_stream_and_purpose_each_give_other_numbers() -> None:
    keys = [Key.for_training(0, 0), Key.for_training(1, 0), Key.for_training(0, 1), Key.for_training(0, 0, 0, 8),
            Key.for_validation(), Key.for_sampling(0)]  # fmt: skip
    drawn = [noise.normal(key, 8, (4,), CPU) for key in keys] + [noise.normal(keys[0], 8, (4,), CPU, stream="other")]
    assert len({tuple(d.flatten().tolist()) for d in drawn}) == len(drawn)
    assert torch.equal(noise.normal(Key.for_validation(3), 1, (4,), CPU)[0], drawn[4][3])


def test_the_moments_are_those_of_the_distributions() -> None:
    """Within five standard errors of 200,000 draws."""
    num, key = 200_000, Key.for_training(0, 0)
    error = 5 / math.sqrt(num)
    normal, uniform = noise.normal(key, num, (), CPU).double(), noise.uniform(key, num, (), CPU).double()
    assert abs(normal.mean()) < error
    assert abs(normal.var() - 1) < error * math.sqrt(2)
    assert abs(normal.pow(4).mean() - 3) < error * math.sqrt(96)
    assert abs(uniform.mean() - 0.5) < error * math.sqrt(1 / 12)
    rows = noise.normal(key, num // 100, (100,), CPU).double()
    assert abs((rows[:, :-1] * rows[:, 1:]).mean()) < error, "neighbours in a row are independent"
    assert abs((rows[:-1] * rows[1:]).mean()) < error, "rows are independent"


def test_normal_numbers_are_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([[[0, 2**32 - 1, 0, 2**32 - 1]]])
    monkeypatch.setattr(noise, "_draw_words", lambda *args: ends)
    assert bool(noise.normal((), 1, (4,), CPU).isfinite().all())


def test_no_generator_moves_and_a_plain_tuple_is_a_key_too() -> None:
    before = torch.get_rng_state()
    assert torch.equal(noise.uniform((1, 2), 3, (2,), CPU), noise.uniform((1, 2), 3, (2,), "cpu"))
    assert torch.equal(torch.get_rng_state(), before)
