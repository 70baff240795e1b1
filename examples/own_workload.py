"""A custom workload: one Kind makes your model and data available to the halfstep commands.

    halfstep train examples.own_workload:KIND train.max_steps=200
    halfstep evaluate runs/...
    halfstep predict runs/... points.csv
    halfstep bench examples.own_workload:KIND

The model learns which of two moons a point belongs to. Only the Kind's `builder` is required: `config` adds settings,
`demo` training without a data folder, `predict` the command `halfstep predict`. See docs/own_workload.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep_train.config.schema import ModelConfig, RunConfig
from halfstep_train.data.loader import TensorSamples
from halfstep_train.workloads.base.kind import Kind, PredictCommand
from halfstep_train.workloads.base.sums import Means
from halfstep_train.workloads.base.using import FilePredictor, TrainedModel
from halfstep_train.workloads.base.workload import Workload


class MoonsModel(ModelConfig):
    width: int = Field(default=32, ge=1, description="Hidden units")


class MoonsConfig(RunConfig):
    model: MoonsModel = MoonsModel()


def write_demo(folder: Path, *, seed: int) -> None:
    """Write points.csv, with x, y and the moon (0 or 1) in each line."""
    angle, moon = np.random.default_rng(seed).uniform(0, np.pi, 512), np.arange(512) % 2
    points = [np.cos(angle) + moon, np.sin(angle) * (1 - 2 * moon) + 0.3 * moon, moon]
    folder.mkdir(parents=True)
    np.savetxt(folder / "points.csv", np.stack(points, axis=1), delimiter=",")


def read_points(path: Path) -> Tensor:
    return torch.from_numpy(np.loadtxt(path, delimiter=",", dtype=np.float32, ndmin=2))


def make_network(config: MoonsConfig) -> nn.Module:
    return nn.Sequential(nn.Linear(2, config.model.width), nn.ReLU(), nn.Linear(config.model.width, 2))


def build(config: MoonsConfig, store: Any = None) -> Workload:
    rows = read_points(Path(config.data.dir, "points.csv"))
    train, val = (TensorSamples(point=part[:, :2], label=part[:, 2].long()) for part in (rows[128:], rows[:128]))
    return Workload(
        name="moons",
        model=make_network(config),
        train_samples=train,
        val_samples=val,
        forward=lambda net, batch: net(batch["point"]),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch["label"]),
        metrics=lambda: Means(accuracy=lambda outputs, batch: outputs.argmax(1) == batch["label"]),
        metric="accuracy",
    )


class MoonPredictor(FilePredictor):
    endings = (".csv",)

    def __init__(self, config: MoonsConfig, store: Any) -> None:
        self.model = make_network(config)

    def answer(self, path: Path, trained: TrainedModel) -> dict[str, Any]:
        return {"moons": trained(read_points(path)[:, :2].to(trained.device)).argmax(1).tolist()}


KIND = Kind(builder=build, config=MoonsConfig, demo=write_demo, predict=PredictCommand(MoonPredictor))
