"""What a training step needs, counted without running it: on torch's meta device tensors have shapes but no content.

Forward and backward run there at the real image size, and every storage is counted while it lives. The numbers are
estimates: kernels' workspaces and the allocator's gaps come on top, which is what USABLE_MEMORY leaves room for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from halfstep.config.schema import RunConfig
from halfstep.measure.live_bytes import LiveBytes
from halfstep.precision.advice import USABLE_MEMORY
from halfstep.workloads.classification import build as image_classification
from halfstep.workloads.classification.config import ClassifierConfig
from halfstep.workloads.segmentation import build as unet
from halfstep.workloads.segmentation.config import UNetConfig

FIXED_BYTES = {"sgd": 12}
"""Of one parameter: weight, gradient and momentum in fp32."""
ADAM_FIXED_BYTES = 16
"""The same with two moments."""
BATCH = 64
"""Samples of the counted step; many, since weight gradients on their way are counted with the activations."""
HALF_COPY_BYTES = 2
"""Autocast keeps a half copy of every weight for the length of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Memory and arithmetic of one training step."""

    num_parameters: int
    fixed_bytes: int
    sample_bytes: int
    sample_flops: int
    """Forward and backward, nothing recomputed; a multiplication and an addition are two."""

    def bytes_at(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.sample_bytes

    def largest_batch(self, memory_bytes: int) -> int:
        """Samples that fit a device; 0 where not even one does."""
        return max(0, int((memory_bytes * USABLE_MEMORY - self.fixed_bytes) / self.sample_bytes))


def step_cost(config: RunConfig, store: Mapping[str, Any], precision: str) -> StepCost:
    """What a step of one of our models costs; `store` says what the data are, as a run would store it."""
    with torch.device("meta"):
        model = model_for(config, store)
    side = config.data.image_size
    image = (int(store.get("channels", 3)), side, side)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    is_half = precision not in ("fp32", "tf32")
    a_parameter = FIXED_BYTES.get(config.optimizer.name, ADAM_FIXED_BYTES) + HALF_COPY_BYTES * is_half
    return StepCost(
        num_parameters=num_parameters,
        fixed_bytes=num_parameters * a_parameter,
        sample_bytes=_peak_bytes(model, image) // BATCH // (2 if is_half else 1),
        sample_flops=_flops(model, image),
    )


def model_for(config: RunConfig, store: Mapping[str, Any]) -> nn.Module:
    """One of our models, freshly initialised, for data of which `store` tells."""
    if isinstance(config, UNetConfig):
        return unet.model_from_store(config, {**store, "image_size": config.data.image_size})
    assert isinstance(config, ClassifierConfig)
    return image_classification.model_from_store(config, store)


def _peak_bytes(model: nn.Module, image: tuple[int, int, int]) -> int:
    """Bytes alive at the worst moment of forward and backward, besides weights and gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)  # made here, so not counted as activations
    with LiveBytes() as live:
        model(torch.empty(BATCH, *image, device="meta")).float().square().mean().backward()
    peak: int = live.peak
    return peak


def _flops(model: nn.Module, image: tuple[int, int, int]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(torch.empty(1, *image, device="meta"))  # BatchNorm refuses to train on one value a channel
    return 3 * int(counter.get_total_flops())  # backward: one product for the input's gradient, one for the weight's
