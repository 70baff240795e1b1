"""What AdamW8bit and its kernel share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Setting(NamedTuple):
    """What all parameters of a group share in a step; tensors have one value, on the device."""

    lr: Tensor
    found_inf: Tensor
    grad_scale: Tensor | None
    betas: tuple[float, float]
    eps: float
    weight_decay: float
