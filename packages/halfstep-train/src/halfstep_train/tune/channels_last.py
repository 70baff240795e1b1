"""Choose a model's memory layout, and convert images to the layout of its weights, so that no kernel transposes
them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.precision.plan import Plan
from halfstep_train.workloads import KINDS

LayoutWish = Literal["auto"] | bool


def wants_channels_last(wish: LayoutWish, workload: str, plan: Plan, *modules: nn.Module) -> bool:
    """True if the model should be channels_last: as requested or found by trials. Otherwise, if the model is known to
    support it, on a CPU, and on CUDA where matrix units, which read channels_last, compute. Never without 2D
    convolutions.

    benchmarks/NOTES.md has U-Net's times: on an Arm CPU 0.137 s channels_last, 0.243 contiguous; in strict fp32 on an
    H200 no difference (362 and 365 ms) without cuDNN's trials, and with trials only contiguous was timed.
    """
    if not convolves_images(*modules):
        return False
    if wish != "auto":
        return bool(wish)
    if plan.channels_last is not None:
        return plan.channels_last
    if not KINDS.of(workload).takes_channels_last:
        return False
    kind = torch.device(plan.device).type
    return kind == "cpu" or kind == "cuda" and plan.compute != "fp32"


def is_only_tried(wish: LayoutWish, workload: str, plan: Plan) -> bool:
    """True if this layout is only a candidate: a step may fail because of it while the run uses another."""
    return wish == "auto" and not KINDS.of(workload).takes_channels_last and bool(plan.channels_last)


def convolves_images(*modules: nn.Module) -> bool:
    """True if modules have 2D convolution kernels; a position table (1, C, H, W) does not count."""
    return any(parameter.ndim == 4 and len(parameter) > 1 for module in modules for parameter in module.parameters())


def to_channels_last_(model: nn.Module) -> nn.Module:
    """Convert convolution kernels to channels_last, in place; 3D kernels of video have no such layout.

    Per-channel factors (1, C, 1, 1) are skipped: both layouts are the same for them, and DDP would warn that their
    gradients have other strides.
    """
    factors = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.modules.conv._ConvNd)
        for parameter in module._parameters.values()
        if parameter is not None and parameter.shape[2:] == (1, 1)
    }
    model._apply(lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 and id(t) not in factors else t)
    return model


def match_layout(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the batch's images to the layout of the model's convolutions."""
    for name, value in batch.items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"the workload's prepare() returned {name!r} as {type(value).__name__}, {value!r:.60}",
                why="a batch must contain only tensors, which can be moved, split and captured",
                fix="make it a tensor on the batch's device, or leave it out of the batch",
            )
    images = torch.channels_last if is_channels_last(model) else None
    return {
        name: value.contiguous(memory_format=images) if images and value.ndim == 4 else _make_dense(value)
        for name, value in batch.items()
    }


def _make_dense(value: Tensor) -> Tensor:
    """Return the value with dense strides: compiled code specialises on strides, and a slice of a larger tensor has
    others than the copy that a captured step keeps."""
    if value.is_contiguous() or torch.empty_like(value, device="meta").stride() == value.stride():
        return value
    return value.contiguous()


def is_channels_last(model: nn.Module) -> bool:
    """Return the model's layout by its first conclusive weight: a 1x1 kernel is contiguous in both layouts."""
    kernels = (p for p in model.parameters() if p.ndim == 4 and not p.is_contiguous())
    return any(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
