"""Which part of an image a sample shows: random-resized crops for training, the centre for evaluation.

A box is a pure function of (seed, epoch, index), computed for a whole batch at once: its random numbers are a hash of
the key (splitmix64, Steele et al. 2014), not a generator's stream. So a folder and its packed cache see the same
crops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

ATTEMPTS = 10
"""Boxes tried before the largest one of an allowed ratio, which panoramas get; as torchvision does."""
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
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    side = np.sqrt(_between(draws[:, :ATTEMPTS], *spec.area) * (width * height)[:, None])
    low, high = (math.log(bound) / 2 for bound in spec.ratio)
    stretch = np.exp(_between(draws[:, ATTEMPTS:-2], low, high))
    wide, tall = np.maximum(np.rint(side * stretch), 1), np.maximum(np.rint(side / stretch), 1)
    fits = (wide <= width[:, None]) & (tall <= height[:, None])
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    wide, tall, has_fit = wide[rows, first], tall[rows, first], fits[rows, first]
    if not has_fit.all():
        wide = np.where(has_fit, wide, np.minimum(width, np.rint(height * spec.ratio[1])))
        tall = np.where(has_fit, tall, np.minimum(height, np.rint(width / spec.ratio[0])))
    boxes = np.empty((len(sizes), 4), dtype=np.float32)
    boxes[:, 0] = np.floor(draws[:, -2] * (width - wide + 1))
    boxes[:, 1] = np.floor(draws[:, -1] * (height - tall + 1))
    boxes[:, 2], boxes[:, 3] = boxes[:, 0] + wide, boxes[:, 1] + tall
    return boxes


def centre_boxes(sizes: Array, share: float) -> Array:
    """Centred squares (N, 4) whose side is `share` of the shorter side: resize and centre crop in one box."""
    half = share * sizes.min(axis=1, keepdims=True) / 2
    middle = sizes / 2
    return np.concatenate([middle - half, middle + half], axis=1).astype(np.float32)


def uniform(seed: int, epoch: int, indices: Array, *, count: int) -> Array:
    """Numbers (N, count) in [0, 1), each row a function of (seed, epoch, index) alone."""
    rows = _mix(_key(seed, epoch) ^ np.asarray(indices).astype(np.uint64))
    bits: Array = _mix(rows[:, None] + _steps(count)) >> np.uint64(11)  # 53 bits, a float64's whole mantissa
    return bits * 2.0**-53


@lru_cache(maxsize=16)
def _key(seed: int, epoch: int) -> Array:
    # An array of one: numpy's scalars would warn where arrays wrap around, as meant here.
    return _mix(_mix(np.array([seed], dtype=np.uint64) + np.uint64(GOLDEN)) ^ np.uint64(epoch))


@lru_cache(maxsize=16)
def _steps(count: int) -> Array:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _mix(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _between(draws: Array, low: float, high: float) -> Array:
    return low + draws * (high - low)
