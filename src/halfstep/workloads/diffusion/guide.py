"""The diffusion family in `halfstep guide`."""

from __future__ import annotations

from typing import Any

from PIL import Image
from torch import Tensor

from halfstep.workloads.base.guiding import Opened, file_size, median_size
from halfstep.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep.workloads.diffusion.data import open_pictures, square_pictures

SMALLEST_LEVEL = 4
"""Pixels a side at the deepest level that still have something to tell."""


class Guide:
    small_on_cpu = {"data.image_size": 32, "model.channels": (32, 64, 64), "model.attention": (2,)}

    def open(self, config: DiffusionConfig | VaeConfig) -> Opened:
        data = open_pictures(config.data)
        return Opened(
            train=square_pictures(data.train, config.data.image_size),
            val=square_pictures(data.val, config.data.image_size),
            store={"classes": []},
            classes=("picture",),
            notes=data.notes,
            sides=median_size(len(data.train), lambda index: file_size(data.train.paths[index])),
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
