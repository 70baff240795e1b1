"""A tiny workload without dropout and, unless asked for, BatchNorm, so that any number of processes trains the same
weights: noise and augmentation by place in the global batch. `model.options` says what goes wrong, at which step and in
which process."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from halfstep.errors import DataError
from halfstep_train.data import noise
from halfstep_train.workloads.base.over_ranks import gather_rows
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.segmentation.build import augment
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig
from tiny_workload import Accuracy, Samples

MADE: list[nn.Module] = []
"""The model of this process's newest run."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


FLIPS = UNetAugmentConfig(flip=0.5, rotate_degrees=0, scale=0, brightness=0)


def kill_once(done: Path) -> None:
    """Kill this process unless the file `done` is there, which is then made."""
    if not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Failing(Samples):
    """Samples of which one cannot be read."""

    def __init__(self, count: int, broken: int) -> None:
        super().__init__(count)
        self.broken = broken

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        if index == self.broken:
            raise DataError(f"sample {index} cannot be read", fix="look at it")
        return super().sample(index, key=key)


class Rising(Accuracy):
    """Of a machine that counts otherwise than the others: better with each look."""

    looks = 0

    def compute(self) -> dict[str, float]:
        Rising.looks += 1
        return dict.fromkeys(super().compute(), Rising.looks)


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options
    most = [1000]
    """Samples that a forward pass has memory for."""

    def is_now(what: str, step: int) -> bool:
        return bool(options.get(what) == [rank(), step])

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        if not training:
            return batch
        step = key[1]
        if is_now("killed", step):
            kill_once(Path(options["once"]))
        if is_now("asked", step):
            os.kill(os.getpid(), signal.SIGTERM)
        if is_now("warns", step):
            warnings.warn("odd pixels", stacklevel=2)
        if is_now("stuck", step):
            time.sleep(3600)
        if is_now("too large", step):
            most[0] = 0
        image, _ = augment(batch["image"], batch["image"][:, 0], FLIPS, key=key)
        image = image + 0.1 * noise.normal(key, len(image), (2, 8, 8), image.device)
        if is_now("poisoned", step):
            image[0, 0, 0, 0] = float("nan")
        return batch | {"image": image}

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        if len(batch["image"]) > most[0]:
            raise torch.OutOfMemoryError(f"out of memory with {len(batch['image'])} samples")
        out: Tensor = model(batch["image"])
        return out

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        value = nn.functional.cross_entropy(outputs.float(), batch["label"])
        if options.get("compares"):
            value = value + (outputs - gather_rows(outputs)[0].mean(0)).pow(2).mean()
        return value, len(outputs)

    norm = [nn.BatchNorm2d(4)] if options.get("normalises") else []
    MADE[:] = [nn.Sequential(nn.Conv2d(2, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))]
    return Workload(
        name="ranked",
        model=MADE[0],
        train_samples=Failing(22, options.get("broken", -1)),
        val_samples=Samples(9),
        prepare=prepare,
        forward=forward,
        loss=loss,
        metrics=Rising if options.get("rising") == rank() else Accuracy,
        metric="accuracy",
        store=dict(store or {}),
    )


def fail_at_three(event: dict[str, Any]) -> None:
    """A callback that fails on rank 0, which alone calls it."""
    if event["kind"] == "train" and event["step"] >= 3:
        raise ValueError("my own mistake")
