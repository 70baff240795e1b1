"""Metrics as sums on the device, divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Sums:
    """What metrics keep over batches: tensors by name, on the batches' device. Processes add theirs up."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def add(self, **more: Tensor) -> None:
        """No host wait."""
        for name, value in more.items():
            known = self.sums.get(name)
            self.sums[name] = value if known is None else known.to(value.device) + value

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.sums)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sums = {name: value.clone() for name, value in state.items()}
