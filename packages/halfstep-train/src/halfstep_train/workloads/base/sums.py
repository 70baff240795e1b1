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
        self._ranked: list[Tensor] = []

    def add(self, **more: Tensor) -> None:
        """Add to the sums by name, without a host wait."""
        for name, value in more.items():
            known = self.sums.get(name)
            # Sums loaded from a checkpoint may be on another device.
            self.sums[name] = value if known is None else known.to(value.device) + value

    def add_mean(self, name: str, values: Tensor, is_counted: Tensor | None = None) -> None:
        """Add values, or those of them that count, to the sum and the count from which `compute` makes a mean."""
        is_counted = torch.ones_like(values, dtype=torch.bool) if is_counted is None else is_counted
        total = torch.where(is_counted, values.double(), 0).sum()
        self.add(**{name: torch.stack([total, is_counted.sum().double()])})

    def compute(self) -> dict[str, float]:
        """Return the mean of each name given to `add_mean` that has counted values; waits for the device."""
        pairs = {name: found.tolist() for name, found in self.sums.items()}
        return {name: total / count for name, (total, count) in pairs.items() if count}

    def add_ranked(self, indices: Tensor, scores: Tensor) -> None:
        """Keep the scores of single samples for `rank_samples`, without a host wait."""
        self._ranked.append(torch.stack([indices.double(), scores.double()]))

    def rank_samples(self, *, largest_first: bool = False) -> list[tuple[int, float]]:
        """Return (index, score) of the samples given to `add_ranked`, sorted by score; waits for the device."""
        rows = torch.cat(self._ranked, dim=1).T.tolist() if self._ranked else []
        sign = -1 if largest_first else 1
        return sorted(((int(index), score) for index, score in rows), key=lambda row: (sign * row[1], row[0]))

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
            self.add_mean(name, score(outputs, batch))
