"""STEVE's losses, metrics, temperature, and the loss scale that fp16 can start with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.data.loader import Batch
from halfstep.workloads.slots.metrics import SlotMetrics
from halfstep.workloads.slots.steve_config import SteveConfig, SteveModelConfig
from halfstep.workloads.workload import Loss

HALF_LARGEST = 65504.0


def temperature(model: SteveModelConfig, step: int) -> float:
    """A cosine from tau_start to tau_final over tau_steps."""
    share = min(step / model.tau_steps, 1.0)
    return model.tau_final + (model.tau_start - model.tau_final) * 0.5 * (1 + math.cos(math.pi * share))


def loss_of(config: SteveConfig) -> Loss:
    """Squared error of the VAE + cross-entropy of the words, by clips."""
    averaged = config.model.loss == "mean"

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        video = batch["video"]
        pixels, words = (video[0, 0].numel(), outputs["words"].shape[1]) if averaged else (1, 1)
        return outputs["mse"] / pixels + outputs["cross_entropy"] / words, len(video)

    return loss


def start_scale(image_size: int) -> float:
    """A loss scale at which summed losses do not overflow fp16: the last bias sums 2 · error over all pixels of a frame,
    and every layer before it has gradients of that order."""
    return 2.0 ** math.floor(math.log2(HALF_LARGEST / (8 * image_size**2)))


class SteveMetrics:
    """Both parts of the loss by frame, and the masks' scores where there are true masks."""

    def __init__(self) -> None:
        self.masks = SlotMetrics()
        self._sums: Tensor | None = None

    def update(self, outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> None:
        num = torch.full((), float(len(batch["video"])), dtype=torch.float64, device=outputs["mse"].device)
        losses = [outputs[name].detach().double() * num for name in ("mse", "cross_entropy")]
        sums = torch.stack([*losses, num])
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums
        self.masks.update(outputs, batch)

    def compute(self) -> dict[str, float]:
        if self._sums is None:
            return {}
        mse, cross_entropy, num = self._sums.tolist()
        return {"mse": mse / num, "cross_entropy": cross_entropy / num, **self.masks.compute()}

    def state_dict(self) -> dict[str, Tensor]:
        own: dict[str, Any] = {} if self._sums is None else {"losses": self._sums}
        return own | self.masks.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sums = state.get("losses")
        self.masks.load_state_dict(state)
