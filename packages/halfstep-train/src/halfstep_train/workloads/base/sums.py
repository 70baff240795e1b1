"""Metrics as sums on the device, divided once at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class Sums:
    """Named sums over batches, kept on the batches' device. A distributed run adds up the sums of all ranks."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **more: Tensor) -> None:
        """Add to the sums by name, without a host wait."""
        for name, value in more.items():
            known = self.sums.get(name)
            # Sums loaded from a checkpoint may be on another device.
            self.sums[name] = value if known is None else known.to(value.device) + value

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sums = {name: value.clone() for name, value in state.items()}


class Means(Sums):
    """Means over samples: each score function takes outputs and batch, and returns one value per sample."""

    def __init__(self, **scores: Callable[[Any, Mapping[str, Tensor]], Tensor]) -> None:
        super().__init__()
        self.scores = scores

    def update(self, outputs: Any, batch: Mapping[str, Tensor]) -> None:
        for name, score in self.scores.items():
            values = score(outputs, batch).double()
            self.add(**{name: torch.stack([values.sum(), values.new_tensor(values.numel())])})

    def compute(self) -> dict[str, float]:
        return {name: float(total / count) for name, (total, count) in self.sums.items()}
