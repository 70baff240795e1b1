"""In which order a 4-dimensional tensor lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor


def has_channels_last(x: Tensor) -> bool:
    """Whether channels lie innermost, and not only because some side is 1."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def layout_of(*tensors: Tensor) -> torch.memory_format:
    """channels_last where any of them has it, as torch's convolutions decide."""
    return torch.channels_last if any(map(has_channels_last, tensors)) else torch.contiguous_format
