"""`halfstep guide` for segmentation."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from halfstep_train.data.images import read_image_facts
from halfstep_train.workloads.base.guiding import Guiding, OpenedData, measure_median_size
from halfstep_train.workloads.segmentation.build import build
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.data import SegmentationData
from halfstep_train.workloads.segmentation.pictures import draw_overlay


class Guide(Guiding):
    """Guide to segmentation."""

    small_on_cpu = {"data.image_size": 256, "model.base_channels": 16}

    def open(self, config: UNetConfig) -> OpenedData:
        # Only the data is used; initialising a full-size U-Net would take a second.
        tiny = config.replace(model={"base_channels": 1})
        built = build(tiny)
        assert isinstance(built.train_samples, SegmentationData)
        pairs = built.train_samples.pairs
        return OpenedData(
            train=built.train_samples,
            val=built.val_samples,
            store=built.store,
            classes=tuple(f"mask value {value}" for value in built.store["mask_values"]),
            notes=built.notes,
            sides=measure_median_size(len(pairs), lambda index: read_image_facts(pairs[index].image).size[::-1]),
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        return f"sample {index}", draw_overlay(np.moveaxis(sample["image"].numpy(), 0, -1), sample["mask"].numpy())

    def suggest_for_side(self, config: UNetConfig, side: int) -> dict[str, Any]:
        return {"data.image_size": side}
