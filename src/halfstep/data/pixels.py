"""What every change of a batch of images on its device needs."""

from __future__ import annotations

import torch
from torch import Tensor

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


def gray(image: Tensor) -> Tensor:
    """Luma (N, 1, H, W)."""
    red, green, blue = image.unbind(dim=1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).unsqueeze(1)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
