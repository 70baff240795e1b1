"""STEVE's losses, metrics, temperature, and the loss scale that fp16 can start with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from halfstep.config.schema import RunConfig
from halfstep.models.steve import Seen
from halfstep.workloads.slots.metrics import SlotMetrics

HALF_LARGEST = 65504.0


class Cooled(Protocol):
    """Settings of a temperature."""

    @property
    def tau_start(self) -> float: ...
    @property
    def tau_final(self) -> float: ...
    @property
    def tau_steps(self) -> int: ...


def temperature(model: Cooled, step: int) -> float:
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


def settled_scale(config: RunConfig) -> dict[str, float]:
    """That scale, and a floor well below it, as settings, where the user named none."""
    named = config.scaler.model_fields_set
    if "init_scale" in named:
        return {}
    scale = start_scale(config.data.image_size)
    floor = {} if "min_scale" in named else {"scaler.min_scale": min(config.scaler.min_scale, scale / 2**12)}
    return floor | {"scaler.init_scale": scale}


LOSSES = ("loss", "mse", "cross_entropy")


class SteveMetrics(SlotMetrics):
    """The loss, its parts summed over a frame, and the masks' scores where there are true masks."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: Tensor | None = None

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        num = torch.full((), float(len(batch["video"])), dtype=torch.float64, device=outputs["loss"].device)
        sums = torch.stack([*(outputs[name].detach().double() * num for name in LOSSES), num])
        self._losses = sums if self._losses is None else self._losses.to(sums.device) + sums
        super().update(outputs, batch)

    def compute(self) -> dict[str, float]:
        if self._losses is None:
            return {}
        *sums, num = self._losses.tolist()
        return {name: total / num for name, total in zip(LOSSES, sums, strict=True)} | super().compute()

    def state_dict(self) -> dict[str, Tensor]:
        own: dict[str, Any] = {} if self._losses is None else {"losses": self._losses}
        return own | super().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._losses = state.get("losses")
        super().load_state_dict(state)
