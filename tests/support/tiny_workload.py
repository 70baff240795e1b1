"""A workload of a user's own, by import path: tiny, with everything that makes resume hard.

BatchNorm buffers, dropout (global RNG), augmentation by key, poisoned steps, and on request a signal in mid-run.
`model.options` says which steps are poisoned and when to signal: at a training step, or in a validation once the file
`signal_with` is there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.data.loader import make_generator
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.base.workload import Batch, Workload


class Samples:
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        generator = make_generator(index)
        label = index % 3
        image = torch.randn(2, 8, 8, generator=generator) + label
        # A sample may use its key: the epoch changes what is read.
        return {
            "image": image + 0.01 * torch.randn(2, 8, 8, generator=make_generator(*key)),
            "label": torch.tensor(label),
        }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Accuracy(Means):
    def __init__(self) -> None:
        super().__init__(accuracy=lambda outputs, batch: outputs.argmax(1) == batch["label"])


def signal_once(options: Mapping[str, Any]) -> None:
    """Send this process a signal if the file `signal_file` is there, and remove the file."""
    signal_file = Path(options.get("signal_file", "/nowhere"))
    if signal_file.exists():
        signal_file.unlink()
        os.kill(os.getpid(), getattr(signal, options.get("signal", "SIGTERM")))


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options
    poisoned, signal_step = set(options.get("poisoned", ())), options.get("signal_step", -1)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        step = key[1] if training else -1
        is_time = step == signal_step if training else Path(options.get("signal_with", "/nowhere")).exists()
        if is_time:
            signal_once(options)
        if not training:
            return batch
        image = batch["image"] + 0.1 * torch.randn(batch["image"].shape, generator=make_generator(*key)).to(
            batch["image"]
        )
        if step in poisoned:
            image[0, 0, 0, 0] = float("nan")
        return batch | {"image": image * options.get("loudness", 1.0)}

    return Workload(
        name="tiny",
        model=Net(),
        train_samples=Samples(22),
        val_samples=Samples(9),
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=lambda outputs, batch: (nn.functional.cross_entropy(outputs.float(), batch["label"]), len(outputs)),
        metrics=Accuracy,
        metric="accuracy",
        store=dict(store or {"classes": ["a", "b", "c"]}),
    )
