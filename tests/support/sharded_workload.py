"""A tiny workload with repeated blocks, whose sizes divide unevenly, a scalar, a frozen layer and a frozen network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.data import noise
from halfstep_train.workloads.base.workload import Batch, Workload
from rank_workload import kill_once, rank
from tiny_workload import Accuracy, Samples

WIDTH = 13
MADE: list[nn.Module] = []
"""The model of this rank's newest run."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(128, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def classify(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    options = config.model.options
    model = Net(options.get("depth", 3))
    model.blocks[0].first.requires_grad_(False)
    frozen = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        if not training:
            return batch
        image = batch["image"] + 0.1 * noise.normal(key, len(batch["image"]), (2, 8, 8), batch["image"].device)
        time.sleep(options.get("pause_s", 0))
        if options.get("killed") == [rank(), key[1]]:
            kill_once(Path(options["once"]))
        if options.get("poisoned") == key[1] and rank() == 1:
            image[0, 0, 0, 0] = float("nan")
        seen = image.flatten(1)[:, :WIDTH]
        for block in frozen:
            seen = block(seen)
        return batch | {"image": image, "extra": seen}

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model.classify(batch["image"])  # not model(x), as in many families
        return out + (0.01 * batch["extra"][:, :3] if "extra" in batch else 0.0)

    def loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(outputs.float(), batch["label"]), len(outputs)

    MADE[:] = [model]
    return Workload(
        name="sharded",
        model=model,
        frozen={"extra": frozen},
        train_samples=Samples(22),
        val_samples=Samples(9),
        prepare=prepare,
        forward=forward,
        loss=loss,
        metrics=Accuracy,
        metric="accuracy",
        sample=lambda model, key: {
            "scores": str(model.classify(torch.ones(1, 2, 8, 8, device=model.calls.device)).tolist())
        },
        store=dict(store or {}),
    )
