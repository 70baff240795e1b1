"""A small CNN on CIFAR-10's binary batches, or on generated pictures of that shape: the workload of exercise 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.config.schema import RunConfig
from halfstep.data.binary_sets import cifar_folder, cifar_planes
from halfstep.data.loader import TensorSamples
from halfstep.errors import DataError
from halfstep.workloads.base.kind import Kind
from halfstep.workloads.base.sums import Means
from halfstep.workloads.base.workload import Workload

SIDE, NUM_CLASSES = 32, 10
MOST_TESTED = 1000
"""Of CIFAR-10's 10,000 test pictures: fifteen runs validate, within two minutes on two cores."""


def pictures(pixels: Tensor, labels: Tensor) -> TensorSamples:
    return TensorSamples(image=pixels, label=labels)


def read_cifar(root: Path) -> tuple[TensorSamples, TensorSamples]:
    """The binary version's five batches and its test batch, as they unpack; fewer training batches do too."""
    folder = cifar_folder(root)
    if folder is None:
        raise DataError(
            f"{root} holds no CIFAR-10",
            why="its binary version is read: data_batch_1.bin to data_batch_5.bin and test_batch.bin",
            fix="unpack cifar-10-binary.tar.gz there, or leave the folder out for generated pictures",
        )
    train, (pixels, labels) = cifar_planes(folder)
    return pictures(*train), pictures(pixels[:MOST_TESTED], labels[:MOST_TESTED])


def generated(count: int, seed: int) -> TensorSamples:
    """Gratings: the class is angle and frequency, colour and phase are chance, and there is noise."""
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, NUM_CLASSES, count)
    angle = (labels % 5) * np.pi / 5 + draws.normal(0, 0.12, count)
    waves = np.where(labels < 5, 2.0, 4.0) * draws.uniform(0.8, 1.25, count)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    along = np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y
    phase = draws.uniform(0, 2 * np.pi, count)[:, None, None]
    grating = np.sin(2 * np.pi * waves[:, None, None] * along + phase)
    colour = draws.uniform(0.2, 1.0, (count, 3, 1, 1))
    pixels = 128 + 60 * colour * grating[:, None] + draws.normal(0, 60, (count, 3, SIDE, SIDE))
    return pictures(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels))


class SmallCnn(nn.Sequential):
    def __init__(self) -> None:
        blocks: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            blocks += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*blocks, nn.Flatten(), nn.Linear(32 * 16, NUM_CLASSES))


def prepare(batch: dict[str, Tensor], *, key: Any, training: bool) -> dict[str, Tensor]:
    return {"image": (batch["image"].float() - 128) / 64, "label": batch["label"]}


def build(config: RunConfig, store: Any = None) -> Workload:
    folder = config.data.dir
    train, test = read_cifar(Path(folder)) if folder else (generated(1200, 0), generated(500, 1))
    return Workload(
        name="small_cnn",
        model=SmallCnn(),
        train_samples=train,
        val_samples=test,
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch["label"]),
        metrics=lambda: Means(accuracy=lambda outputs, batch: outputs.argmax(1) == batch["label"]),
        metric="accuracy",
    )


KIND = Kind(builder=build, takes_channels_last=True)
