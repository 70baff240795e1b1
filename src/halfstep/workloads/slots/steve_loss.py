"""STEVE's losses, metrics, temperature, and the loss scale that fp16 can start with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep.models.steve import Seen
from halfstep.workloads.slots.metrics import SlotMetrics
from halfstep.workloads.slots.steve_config import SteveModelConfig

HALF_LARGEST = 65504.0


def temperature(model: SteveModelConfig, step: int) -> float:
    """A cosine from tau_start to tau_final over tau_steps."""
    share = min(step / model.tau_steps, 1.0)
    return model.tau_final + (model.tau_start - model.tau_final) * 0.5 * (1 + math.cos(math.pi * share))


def total_loss(seen: Seen, reduction: Literal["sum", "mean"]) -> Tensor:
    """Squared error of the VAE + cross-entropy of the words, each a sum over a frame or its mean."""
    if reduction == "sum":
        return seen.mse + seen.cross_entropy
    return seen.mse / seen.reconstruction[0, 0].numel() + seen.cross_entropy / seen.words.shape[1]


def start_scale(image_size: int) -> float:
    """A loss scale at which summed losses do not overflow fp16: the last bias sums 2 · error over all pixels of a
    frame, and layers before it have gradients of that order."""
    return 2.0 ** math.floor(math.log2(HALF_LARGEST / (8 * image_size**2)))


LOSSES = ("loss", "mse", "cross_entropy")


class SteveMetrics:
    """The loss, its parts summed over a frame, and the masks' scores where there are true masks."""

    def __init__(self) -> None:
        self.masks = SlotMetrics()
        self._sums: Tensor | None = None

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        num = torch.full((), float(len(batch["video"])), dtype=torch.float64, device=outputs["loss"].device)
        sums = torch.stack([*(outputs[name].detach().double() * num for name in LOSSES), num])
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums
        self.masks.update(outputs, batch)

    def compute(self) -> dict[str, float]:
        if self._sums is None:
            return {}
        *sums, num = self._sums.tolist()
        return {name: total / num for name, total in zip(LOSSES, sums, strict=True)} | self.masks.compute()

    def state_dict(self) -> dict[str, Tensor]:
        own: dict[str, Any] = {} if self._sums is None else {"losses": self._sums}
        return own | self.masks.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums = state.get("losses")
        self.masks.load_state_dict(state)
