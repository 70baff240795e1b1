"""What `halfstep guide` asks of a family: a look into a data folder, and settings that suit what is found."""

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
"""Pictures whose size is looked up: a header is a file to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedData:
    """A data folder as training would read it."""

    train: Samples
    val: Samples
    store: Mapping[str, Any]
    """What a model must know of the data, as a run stores it."""
    classes: tuple[str, ...]
    counts: tuple[int, ...] = ()
    """Training samples of each class; empty where one sample holds many classes."""
    notes: tuple[str, ...] = ()
    sides: tuple[int, int] | None = None
    """Median width and height of a few pictures."""


class Guiding(Protocol):
    """A family's part in the conversation."""

    small_on_cpu: Mapping[str, Any]
    """Settings by path: a full-size model takes a CPU days."""

    def open(self, config: Any) -> OpenedData: ...

    def picture(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """A sample to look at, and its caption."""
        ...

    def for_side(self, config: Any, side: int) -> dict[str, Any]:
        """Settings by path for images of so many pixels per side."""
        ...


def measure_median_size(total: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Median width and height of some of so many pictures, each (width, height)."""
    width, height = np.median([size_of(index) for index in spread_indices(total, SIZED_FILES)], axis=0)
    return int(width), int(height)


def read_size(path: Path) -> tuple[int, int]:
    with open_picture(path) as picture:
        return picture.size


def spread_indices(total: int, wanted: int) -> list[int]:
    """Indices over the whole set: files are sorted by class, so the first ones alone would all be of one."""
    num = min(total, wanted)
    return [index * total // num for index in range(num)]
