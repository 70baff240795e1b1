"""A convolution whose patches do not overlap, as one matmul. Its weight is rearranged from the layer's own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def patches_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride is its kernel size, as one matmul over patches; the result is channels_last."""
    n, c, height, width = x.shape
    out, _, p, q = weight.shape
    grid = x.reshape(n, c, height // p, p, width // q, q)
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        # A patch's row of q pixels with their channels lies in one piece.
        patches, weight = grid.permute(0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)
    else:
        patches = grid.permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.reshape(out, -1), bias).permute(0, 3, 1, 2)
