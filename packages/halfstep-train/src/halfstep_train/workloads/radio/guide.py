"""`halfstep guide` for radio maps."""

from __future__ import annotations

from typing import Any

from PIL import Image
from torch import Tensor

from halfstep_train.workloads.base.guiding import Guiding, OpenedData
from halfstep_train.workloads.radio.config import SMALL_FIRST_STAGE, RadioDiffConfig, RadioVaeConfig
from halfstep_train.workloads.radio.maps import find_data
from halfstep_train.workloads.radio.pictures import draw_condition, draw_gain

SMALL_SIZE = {"data.image_size": 64}
SMALL_UNET: dict[str, Any] = {
    "model.width": 32,
    "model.multipliers": (1, 2),
    "model.windows": ((2, 2), (1, 1)),
    "model.pyramid.width": 32,
    "model.pyramid.depths": (2, 2),
    "model.pyramid.num_heads": (2, 4),
    "model.pyramid.window": 8,
}


class Guide(Guiding):
    """Guide to the first stage, where users start."""

    small_on_cpu = {
        **SMALL_SIZE,
        **SMALL_FIRST_STAGE,
        "model.discriminator.enabled": False,
    }

    def open(self, config: RadioVaeConfig | RadioDiffConfig) -> OpenedData:
        data = find_data(config)
        size = data.train.size
        return OpenedData(
            train=data.train, val=data.val, store={}, classes=("map",), notes=data.notes, sides=(size[1], size[0])
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the city with its antenna, and the gain, side by side."""
        city = Image.fromarray(draw_condition(sample["condition"].numpy()))
        gain = Image.fromarray(draw_gain(sample["gain"][0].numpy() / 255))
        both = Image.new("RGB", (city.width + gain.width, city.height))
        both.paste(city, (0, 0))
        both.paste(gain, (city.width, 0))
        return f"map {index}", both

    def suggest_for_side(self, config: RadioVaeConfig | RadioDiffConfig, side: int) -> dict[str, Any]:
        """Return the largest image size up to `side` that every level can halve."""
        levels = len(config.model.first_stage.multipliers)
        if isinstance(config, RadioDiffConfig):
            levels += len(config.model.multipliers) - 1
        step = 2 ** (levels - 1)
        return {"data.image_size": max(step, side // step * step)}


class SecondGuide(Guide):
    """Guide to the second stage; training needs a trained first stage, planning does not."""

    small_on_cpu = {**SMALL_SIZE, **SMALL_FIRST_STAGE, **SMALL_UNET}
