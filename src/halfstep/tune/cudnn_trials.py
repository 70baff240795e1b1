"""`cudnn.benchmark`: cuDNN times its algorithms for a convolution when it meets it first, instead of guessing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

CUDNN_TRIALS_S = 20.0
"""What they add to a start: tens of seconds were seen for U-Net (docs/log.md). Nothing of it is kept on disk."""


@contextmanager
def cudnn_trials(wanted: bool) -> Iterator[None]:
    """Algorithms are timed inside, or not; the process's own switch comes back afterwards."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, _ConvNd) for module in model.modules())
