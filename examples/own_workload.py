"""A workload of your own: everything `halfstep` can do with it follows from one Kind.

    halfstep train examples.own_workload:KIND train.max_steps=200
    halfstep bench examples.own_workload:KIND
    halfstep predict runs/... points.csv

It learns which of two moons a point belongs to. Only `builder` is needed; each further part adds a command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from halfstep.config.schema import ModelConfig, RunConfig
from halfstep.report.prediction_view import Answer
from halfstep.workloads.kind import Kind
from halfstep.workloads.workload import Workload


class MoonsModel(ModelConfig):
    width: int = Field(default=32, ge=1, description="Hidden units")


class MoonsConfig(RunConfig):
    model: MoonsModel = MoonsModel()


class Moons:
    """A data set: `sample` is a pure function of index and key."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        label, angle = index % 2, torch.tensor(3.14 * ((index * 0.618) % 1))
        point = torch.stack([angle.cos() + label, angle.sin() * (1 - 2 * label) + 0.3 * label])
        return {"point": point, "label": torch.tensor(label)}


class Accuracy:
    """Counts on the device; divided once, at the end."""

    def __init__(self) -> None:
        self.hits, self.seen = torch.zeros(()), torch.zeros(())

    def update(self, outputs: Tensor, batch: Any) -> None:
        self.hits = self.hits.to(outputs.device) + (outputs.argmax(1) == batch["label"]).sum()
        self.seen = self.seen.to(outputs.device) + len(outputs)

    def compute(self) -> dict[str, float]:
        return {"accuracy": float(self.hits / self.seen)}

    def state_dict(self) -> dict[str, Tensor]:
        return {"hits": self.hits, "seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        self.hits, self.seen = state["hits"], state["seen"]


def model(config: MoonsConfig, store: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(2, config.model.width), nn.ReLU(), nn.Linear(config.model.width, 2))


def over(config: MoonsConfig, store: Any, samples: Any) -> Workload:
    return Workload(
        name="moons",
        model=model(config, store),
        train_samples=samples,
        val_samples=samples,
        prepare=lambda batch, key, training: batch,
        forward=lambda net, batch: net(batch["point"]),
        loss=lambda outputs, batch: (F.cross_entropy(outputs, batch["label"]), len(outputs)),
        metrics=Accuracy,
        metric="accuracy",
    )


def build(config: MoonsConfig, store: Any = None) -> Workload:
    return over(config, store, Moons(256))


def random_batch(config: MoonsConfig, store: Any) -> dict[str, Tensor]:
    size = config.train.batch_size
    return {"point": torch.randn(size, 2), "label": torch.randint(2, (size,)), "index": torch.arange(size)}


class Predictor:
    """Files with two numbers in each line."""

    endings = (".csv",)

    def __init__(self, config: MoonsConfig, store: Any) -> None:
        self.model = model(config, store)

    def answers(self, inputs: list[Any], trained: Any, wishes: Any, bar: Any) -> Iterator[Answer]:
        for item in inputs:
            rows = [[float(word) for word in line.split(",")] for line in Path(item.path).read_text().split()]
            labels = trained(torch.tensor(rows, device=trained.device)).argmax(1).tolist()
            text = " ".join(map(str, labels))
            yield Answer(file=str(item.path), found={"labels": labels}, cells={"labels": text}, brief={"labels": text})


KIND = Kind(
    builder=build,
    config=MoonsConfig,
    random_store=lambda config: {},
    random_batch=random_batch,
    over=over,
    predictor=Predictor,
)
