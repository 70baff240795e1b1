"""Casts between fp16 and fp32 on the CPU, through numpy.

torch builds for ARM convert fp16 one number at a time (8 ms for 600 k numbers, 14 ms when they are subnormal); numpy
uses the vector unit (under 1 ms) and rounds alike. Simulation casts around every kernel, so this is a fifth of its
time. Below autograd only: numpy sees no gradients.
"""

from __future__ import annotations

import numpy as np
import torch


def to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 to bf16 or fp16: nearest even, too large becomes infinite."""
    if dtype == torch.float16 and tensor.device.type == "cpu":
        with np.errstate(over="ignore", under="ignore"):
            return torch.from_numpy(np.asarray(tensor.detach().numpy().astype(np.float16)))
    return tensor.to(dtype)


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 or fp16 to fp32, exact."""
    if tensor.dtype == torch.float16 and tensor.device.type == "cpu":
        return torch.from_numpy(np.asarray(tensor.detach().numpy().astype(np.float32)))
    return tensor.float()
