"""`halfstep guide` for diffusion models and VAEs."""

from __future__ import annotations

from typing import Any

from halfstep_train.workloads.base.guiding import Guiding, OpenedData, measure_median_size, read_size
from halfstep_train.workloads.diffusion.config import DiffusionConfig, VaeConfig
from halfstep_train.workloads.diffusion.data import make_square_samples, open_diffusion_data

SMALLEST_LEVEL = 4
"""Smallest useful side of the deepest level, in pixels."""


class Guide(Guiding):
    """Guide to diffusion models."""

    small_on_cpu = {"data.image_size": 32, "model.channels": (32, 64, 64), "model.attention": (2,)}

    def open(self, config: DiffusionConfig | VaeConfig) -> OpenedData:
        data = open_diffusion_data(config.data)
        return OpenedData(
            train=make_square_samples(data.train, config.data.image_size),
            val=make_square_samples(data.val, config.data.image_size),
            store={"classes": []},
            classes=("picture",),
            notes=data.notes,
            sides=measure_median_size(len(data.train), lambda index: read_size(data.train.paths[index])),
        )

    def suggest_for_side(self, config: DiffusionConfig | VaeConfig, side: int) -> dict[str, Any]:
        """Return an image size up to `side` that every level can halve, with fewer levels for small images."""
        levels = len(config.model.channels)
        while levels > 1 and side >> (levels - 1) < SMALLEST_LEVEL:
            levels -= 1
        step = 2 ** (levels - 1)
        found: dict[str, Any] = {"data.image_size": max(step, side // step * step)}
        if levels < len(config.model.channels):
            found["model.channels"] = tuple(config.model.channels[:levels])
        return found


class VaeGuide(Guide):
    """Guide to VAEs."""

    small_on_cpu = {"data.image_size": 64, "model.channels": (32, 64, 64)}
