"""Workspaces of cuDNN's convolutions in strict fp32.

Of four kinds of algorithms three write transformed copies to memory, whose sizes follow from the shapes. All 87 large
workspaces of 202 shapes on an H200 are one of them, to 3 %. Which algorithm is taken, cuDNN decides by tables of its
own, and no rule was found that says so: its answers are kept for a grid of shapes (cudnn_choices.txt), and a shape that
is not on it has those of the nearest. Of 168 passes of 56 shapes beside the grid that gets 151 right, to 30 MB or 10 %.

Strides, groups and kernels of one tap take none, or little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from importlib import resources
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

SIDES = (7, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
COMPLEX_BYTES, FLOAT_BYTES = 8, 4
TILE_FREQUENCIES = 32 * 17
"""Of a tile of 32 x 32 real numbers."""


LARGEST_BYTES = 10**11
"""Where a workspace cannot be had, torch takes cuDNN's next algorithm."""


class Shape(NamedTuple):
    """n images of c channels to k channels, by kernels of taps x taps, stride 1."""

    n: int
    c: int
    k: int
    height: int
    width: int
    taps: int


def by_fft(shape: Shape) -> int:
    """Whole images and kernels padded to powers of two, transformed, and once more as real and imaginary parts."""
    rows, columns = (1 << math.ceil(math.log2(side + shape.taps - 1)) for side in (shape.height, shape.width))
    return 2 * COMPLEX_BYTES * rows * (columns // 2 + 1) * (shape.c * shape.k + shape.n * shape.c)


def by_fft_of_tiles(shape: Shape) -> int:
    """Kernels, and two tiles of each image at a time."""
    return COMPLEX_BYTES * TILE_FREQUENCIES * (shape.c * shape.k + 2 * shape.n * (shape.c + shape.k))


def by_winograd(shape: Shape) -> int:
    """Tiles of 4 x 4 outputs and their 6 x 6 inputs, of both images, and the kernels."""
    tiles = shape.n * math.ceil(shape.height / 4) * math.ceil(shape.width / 4)
    return FLOAT_BYTES * 36 * (tiles * (shape.c + shape.k) + shape.c * shape.k)


Pass = Literal["forward", "input gradient", "weight gradient"]
ALGORITHMS: dict[Pass, Callable[[Shape], int]] = {
    "forward": by_fft,
    "input gradient": by_fft_of_tiles,
    "weight gradient": by_winograd,
}
"""The one of each pass that takes a workspace."""


def workspace_bytes(shape: Shape, which: Pass) -> int:
    """What cuDNN takes for one pass of a convolution in strict fp32."""
    if shape.taps == 1 or which == "weight gradient" and shape.taps != 3:
        return 0
    size = ALGORITHMS[which](shape)
    bit = 1 << list(ALGORITHMS).index(which)
    return size if _choice(shape) & bit and size < LARGEST_BYTES else 0


@functools.cache
def _choice(shape: Shape) -> int:
    places, choices = _grid()
    wanted: npt.NDArray[np.float64] = np.log2([shape.n, shape.c, shape.k, math.sqrt(shape.height * shape.width)])
    return int(choices[np.argmin(((places - wanted) ** 2).sum(axis=1))])


@functools.cache
def _grid() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Where cuDNN was asked, as logarithms of n, c, k and the side, and what it took there."""
    lines = resources.files(__package__).joinpath("cudnn_choices.txt").read_text().splitlines()
    known = [
        ((int(n), int(c), int(k), side), int(digit))
        for n, c, k, digits in (line.split() for line in lines if not line.startswith("#"))
        for side, digit in zip(SIDES, digits, strict=True)
        if digit != "."
    ]
    return np.log2([place for place, _ in known]), np.array([choice for _, choice in known])
