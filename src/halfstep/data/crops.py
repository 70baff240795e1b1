"""Which part of an image a sample shows: random-resized crops for training, the centre for evaluation.

A box is a pure function of (seed, epoch, index), computed for a whole batch at once: its random numbers are a hash of
the key (splitmix64, Steele et al. 2014), not a generator's stream. So a folder and its packed cache see the same
crops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ATTEMPTS = 10
"""Boxes tried before the fallback to a centred one, as torchvision does."""
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True, slots=True)
class CropRange:
    """How large and how wide the random crops are: the values of Szegedy et al. 2015, used for ImageNet since."""

    area: tuple[float, float] = (0.08, 1.0)
    """Share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height, drawn uniformly in its logarithm."""


def random_boxes(sizes: Array, spec: CropRange, *, seed: int, epoch: int, indices: Array) -> Array:
    """Boxes (N, 4) as left, top, right, bottom in whole pixels, inside images of sizes (N, 2) as width, height."""
    draws = uniform(seed, epoch, indices, count=2 * ATTEMPTS + 2)
    width, height = sizes[:, :1].astype(np.float64), sizes[:, 1:].astype(np.float64)
    area = width * height * _between(draws[:, :ATTEMPTS], *spec.area)
    low, high = (math.log(bound) for bound in spec.ratio)
    ratio = np.exp(_between(draws[:, ATTEMPTS : 2 * ATTEMPTS], low, high))
    wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (wide >= 1) & (wide <= width) & (tall >= 1) & (tall <= height)
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    any_fits = fits.any(axis=1)
    spare_wide, spare_tall = _largest_of_ratio(sizes, spec.ratio)
    wide = np.where(any_fits, wide[rows, first], spare_wide)
    tall = np.where(any_fits, tall[rows, first], spare_tall)
    free_x, free_y = width[:, 0] - wide, height[:, 0] - tall
    left = np.where(any_fits, np.floor(draws[:, -2] * (free_x + 1)), free_x // 2)
    top = np.where(any_fits, np.floor(draws[:, -1] * (free_y + 1)), free_y // 2)
    return np.stack([left, top, left + wide, top + tall], axis=1).astype(np.float32)


def centre_boxes(sizes: Array, share: float) -> Array:
    """Centred squares (N, 4) whose side is `share` of the shorter side: resize and centre crop in one box."""
    half = share * sizes.min(axis=1, keepdims=True) / 2
    middle = sizes / 2
    return np.concatenate([middle - half, middle + half], axis=1).astype(np.float32)


def uniform(seed: int, epoch: int, indices: Array, *, count: int) -> Array:
    """Numbers (N, count) in [0, 1), each row a function of (seed, epoch, index) alone."""
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.uint64(seed % 2**64) + np.uint64(GOLDEN)) ^ np.uint64(epoch))
        rows = _mix(key ^ np.asarray(indices).astype(np.uint64))
        steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        bits: Array = _mix(rows[:, None] + steps) >> np.uint64(11)  # 53 bits, a float64's whole mantissa
    return bits * 2.0**-53


def _mix(bits: Any) -> Any:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _between(draws: Array, low: float, high: float) -> Array:
    return low + draws * (high - low)


def _largest_of_ratio(sizes: Array, ratio: tuple[float, float]) -> tuple[Array, Array]:
    """For panoramas, in which no random box fits: the largest box of an allowed ratio."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    wide = np.minimum(width, np.rint(height * ratio[1]))
    tall = np.minimum(height, np.rint(width / ratio[0]))
    return np.maximum(wide, 1), np.maximum(tall, 1)
