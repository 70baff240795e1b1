"""The diffusion family in `halfstep guide`."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from halfstep.data.decode import open_picture
from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.diffusion.data import open_pictures, square_pictures
from halfstep.workloads.guiding import SIZED_FILES, Opened, spread

SMALLEST_LEVEL = 4
"""Pixels a side at the deepest level that still have something to tell."""


class Guide:
    small_on_cpu = {"data.image_size": 32, "model.channels": (32, 64, 64), "model.attention": (2,)}

    def open(self, config: DiffusionConfig | VaeConfig) -> Opened:
        data = open_pictures(config.data)
        sizes = []
        for index in spread(len(data.train), SIZED_FILES):
            with open_picture(data.train.paths[index]) as picture:
                sizes.append(picture.size)
        width, height = np.median(np.array(sizes), axis=0)
        return Opened(
            train=square_pictures(data.train, config.data.image_size),
            val=square_pictures(data.val, config.data.image_size),
            store={"classes": []},
            classes=("picture",),
            notes=data.notes,
            sides=(int(width), int(height)),
        )

    def picture(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        return f"picture {index}", Image.fromarray(sample["image"].numpy())

    def for_side(self, config: DiffusionConfig | VaeConfig, side: int) -> dict[str, Any]:
        """A side that the network can halve, and no more levels than it has pixels for."""
        levels = len(config.model.channels)
        while levels > 1 and side >> (levels - 1) < SMALLEST_LEVEL:
            levels -= 1
        step = 2 ** (levels - 1)
        found: dict[str, Any] = {"data.image_size": max(step, side // step * step)}
        if levels < len(config.model.channels):
            found["model.channels"] = tuple(config.model.channels[:levels])
        return found


class VaeGuide(Guide):
    small_on_cpu = {"data.image_size": 64, "model.channels": (32, 64, 64)}
