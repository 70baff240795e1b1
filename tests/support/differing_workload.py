"""The tiny workload with a layer that switches autocast off in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.workloads.base.workload import Workload
from tiny_workload import build as build_tiny


class InFullPrecision(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return super().forward(x.float())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), InFullPrecision(2 * 8 * 8, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    return dataclasses.replace(build_tiny(config, store), model=Net())
