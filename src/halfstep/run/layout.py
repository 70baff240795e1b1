"""Memory layout: which one a model gets, and images in the layout of its weights, so that no kernel turns them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.config.schema import RunConfig
from halfstep.precision.plan import Plan


def wants_channels_last(config: RunConfig, plan: Plan) -> bool:
    """Measured: half of the U-Net's time on an H200 in half precision, a third on an Arm CPU; strict fp32 on the
    H200 loses by it (362 against 247 ms, and three times the memory in cuDNN's workspaces)."""
    wish = config.train.channels_last
    if wish != "auto":
        return bool(wish)
    if plan.channels_last is not None:
        return plan.channels_last
    kind = torch.device(plan.device).type
    return kind == "cpu" or kind == "cuda" and plan.compute != "fp32"


def in_layout_of(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its images as the model's convolutions read them."""
    if not is_channels_last(model):
        return batch
    return {
        name: value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value
        for name, value in batch.items()
    }


def is_channels_last(model: nn.Module) -> bool:
    """By the first weight that can tell: a 1x1 kernel is contiguous in both layouts."""
    kernels = (p for p in model.parameters() if p.ndim == 4 and not p.is_contiguous())
    return any(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
