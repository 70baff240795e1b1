"""What `halfstep guide` needs from a family: open a data folder, draw samples of it, and suggest settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image
from torch import Tensor

from halfstep.data.images import open_picture
from halfstep.data.loader import Samples

SIZED_FILES = 32
"""Pictures whose size is read: each costs opening a file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedData:
    """A data folder as training reads it."""

    train: Samples
    val: Samples
    store: Mapping[str, Any]
    """Facts about the data that the model depends on, as a run stores them."""
    classes: tuple[str, ...]
    counts: tuple[int, ...] = ()
    """Training samples of each class; empty if one sample holds several classes."""
    notes: tuple[str, ...] = ()
    sides: tuple[int, int] | None = None
    """Median width and height of a few pictures."""


class Guiding(Protocol):
    """What a family implements for the guide."""

    small_on_cpu: Mapping[str, Any]
    """Settings of a smaller model, by path: a full-size one takes days on a CPU."""

    def open(self, config: Any) -> OpenedData: ...

    def picture(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Return a caption and a picture of a sample."""
        ...

    def for_side(self, config: Any, side: int) -> dict[str, Any]:
        """Return settings by path for images with `side` pixels per side."""
        ...


def measure_median_size(total: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Return the median width and height of a few of `total` pictures; `size_of(index)` gives (width, height)."""
    width, height = np.median([size_of(index) for index in spread_indices(total, SIZED_FILES)], axis=0)
    return int(width), int(height)


def read_size(path: Path) -> tuple[int, int]:
    with open_picture(path) as picture:
        return picture.size


def spread_indices(total: int, wanted: int) -> list[int]:
    """Return indices spread over the whole set: files are sorted by class, so the first ones all share one class."""
    num = min(total, wanted)
    return [index * total // num for index in range(num)]
