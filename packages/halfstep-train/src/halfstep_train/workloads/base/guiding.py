"""What `halfstep guide` needs from a family: open a data folder, draw samples of it, and suggest settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch import Tensor

from halfstep_train.data.images import open_image_file
from halfstep_train.data.loader import Samples

SIZED_FILES = 32
"""Number of images whose size is read; each one means opening a file."""
SIDE_STEP, LEAST_SIDE = 16, 32
"""Image sides are multiples of the first, which fits the levels and patches of our models."""


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
    """Median width and height of a few images, in pixels."""
    about: tuple[tuple[str, str], ...] = ()
    """Facts to show instead of the classes."""
    remarks: tuple[tuple[str, str], ...] = ()
    """What a suggestion should point out, such as a file that training needs."""


class Guiding:
    """What `halfstep guide` needs from a family; subclasses define `open`."""

    small_on_cpu: ClassVar[Mapping[str, Any]]
    """Settings of a smaller model, by path: a full-size model takes days on a CPU."""

    def open(self, config: Any) -> OpenedData:
        """Open the data folder of a config."""
        raise NotImplementedError

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw a sample; return a caption and the picture."""
        return f"sample {index}", Image.fromarray(sample["image"].numpy())

    def suggest_for_side(self, config: Any, side: int) -> dict[str, Any]:
        """Return settings, by path, that suit images with `side` pixels per side."""
        return {}


def measure_median_size(total: int, size_of: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Return the median width and height of a few of `total` images; `size_of(index)` gives (width, height)."""
    width, height = np.median([size_of(index) for index in spread_indices(total, SIZED_FILES)], axis=0)
    return int(width), int(height)


def choose_side(sides: tuple[int, int]) -> int:
    """Return the side in pixels at which images of this width and height are seen whole, without scaling them up."""
    return max(LEAST_SIDE, -(-max(sides) // SIDE_STEP) * SIDE_STEP)


def read_size(path: Path) -> tuple[int, int]:
    """Return width and height of an image file, in pixels."""
    with open_image_file(path) as picture:
        return picture.size


def spread_indices(total: int, wanted: int) -> list[int]:
    """Return indices spread over the whole set: files are sorted by class, so the first ones would all share one
    class."""
    num = min(total, wanted)
    return [index * total // num for index in range(num)]
