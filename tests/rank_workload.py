"""A tiny workload without dropout and BatchNorm, so that any number of processes trains the same weights: noise and
augmentation by place in the global batch. `model.options` says what goes wrong, at which step and in which process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.augment import Augmentation, augment
from halfstep.errors import DataError
from halfstep.workloads.workload import Batch, Workload
from tiny_workload import Accuracy, Samples


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Failing(Samples):
    """Samples of which one cannot be read."""

    def __init__(self, count: int, broken: int) -> None:
        super().__init__(count)
        self.broken = broken

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        if index == self.broken:
            raise DataError(f"sample {index} cannot be read", fix="look at it")
        return super().sample(index, key=key)


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options

    def is_now(what: str, step: int) -> bool:
        return bool(options.get(what) == [rank(), step])

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        if not training:
            return batch
        step = key[1]
        if is_now("killed", step) and not Path(options["once"]).exists():
            Path(options["once"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if is_now("asked", step):
            os.kill(os.getpid(), signal.SIGTERM)
        image, _ = augment(batch["image"], batch["image"][:, 0], Augmentation(flip=0.5), key=key)
        image = image + 0.1 * noise.normal(key, len(image), (2, 8, 8), image.device)
        if is_now("poisoned", step):
            image[0, 0, 0, 0] = float("nan")
        return batch | {"image": image}

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(outputs.float(), batch["label"]), len(outputs)

    return Workload(
        name="ranked",
        model=nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        train_samples=Failing(22, options.get("broken", -1)),
        val_samples=Samples(9),
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=loss,
        metrics=Accuracy,
        metric="accuracy",
        store=dict(store or {}),
    )
