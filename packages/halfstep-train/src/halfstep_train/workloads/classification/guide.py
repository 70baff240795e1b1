"""`halfstep guide` for classification."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep_train.data.image_samples import TrainingFiles, TrainingImages
from halfstep_train.data.loader import Samples
from halfstep_train.workloads.base.guiding import Guiding, OpenedData, measure_median_size, read_size
from halfstep_train.workloads.classification.config import ClassifierConfig, ResNetConfig, ViTConfig
from halfstep_train.workloads.classification.data import open_image_data

SMALL_SIDE, PATCHES_PER_SIDE = 64, 8
"""Up to this side in pixels, a ResNet needs the stem that keeps the resolution, and a ViT smaller patches: this many
per side."""


class Guide(Guiding):
    """Guide to image classifiers."""

    small_on_cpu = {"data.image_size": 128, "data.eval_size": 0}

    def open(self, config: ClassifierConfig) -> OpenedData:
        data = open_image_data(config.data)
        assert isinstance(data.train, TrainingFiles | TrainingImages)
        return OpenedData(
            train=data.train,
            val=data.val,
            store={"classes": list(data.classes)},
            classes=tuple(data.titles.get(name, name) for name in data.classes),
            counts=tuple(torch.bincount(data.train.labels, minlength=len(data.classes)).tolist()),
            notes=data.notes,
            sides=measure_sides(data.train),
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        return classes[int(sample["label"])], Image.fromarray(sample["image"].numpy())

    def suggest_for_side(self, config: ClassifierConfig, side: int) -> dict[str, Any]:
        paths: dict[str, Any] = {"data.image_size": side, "data.eval_size": 0}
        if side <= SMALL_SIDE and isinstance(config, ResNetConfig):
            paths["model.stem"] = "small"
        if side <= SMALL_SIDE and isinstance(config, ViTConfig):
            paths["model.patch"] = side // PATCHES_PER_SIDE
        return paths


def measure_sides(train: Samples) -> tuple[int, int] | None:
    """Return the median width and height of the training images; None if they are neither files nor arrays."""
    if isinstance(train, TrainingImages):
        width, height = np.median(train.images.sizes, axis=0)
        return int(width), int(height)
    if isinstance(train, TrainingFiles):
        return measure_median_size(len(train), lambda index: read_size(train.listing.paths[index]))
    return None
