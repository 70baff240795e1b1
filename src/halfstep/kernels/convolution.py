"""Convolutions as cheaper ones or as matmuls: few input channels, patches that do not overlap, and their transpose.

Matrix units read channels 8 at a time. A convolution on 3 channels is therefore padded by the library, with kernels of
its own, or falls back to a slow one. Here padding is a part of the copy that casts the image. The weights are
rearranged on the fly from the layer's own, so gradients arrive where the state dict has them.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from halfstep.kernels.layout import has_channels_last, layout_of

CHANNELS_AT_ONCE = 8  # 16 bytes of a half format: the alignment that tensor-core convolutions ask for


def is_foldable(x: Tensor, stride: int) -> bool:
    """Whether `folded_conv2d` can compute a convolution of `x`, and gains by it: few channels, even sides, stride 2."""
    return stride == 2 and x.shape[1] < CHANNELS_AT_ONCE and x.shape[2] % 2 == x.shape[3] % 2 == 0


def folded_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution at stride 2 with an odd kernel of size k, padded by k // 2, on pixels folded into channels.

    Output o reads the pixels from 2o - k//2 on; with a zero before the kernel where k//2 is odd, else behind it, they
    fill pairs 2i, 2i + 1: half the kernel size at stride 1. 7×7 on 3 channels becomes 4×4 on 12, filled up to 16, which
    needs one row and column more before the image than behind it. (Filling up alone, for a 3×3 kernel at stride 1, was
    measured: on an H200 the weight's gradient loses more than the padding kernels had cost.)
    """
    layout, lead = layout_of(x, weight), weight.shape[2] // 2 % 2
    x, weight = folded(x), folded(F.pad(weight, (lead, 1 - lead, lead, 1 - lead)))
    missing = -x.shape[1] % CHANNELS_AT_ONCE
    x = F.pad(x, (lead, 0, lead, 0, 0, missing)).contiguous(memory_format=layout)
    weight = F.pad(weight, (0, 0, 0, 0, 0, missing)).contiguous(memory_format=layout)
    return F.conv2d(x, weight, padding=(weight.shape[2] - 1) // 2)


def folded(x: Tensor) -> Tensor:
    """Each 2×2 pixels as channels: (N, C, H, W) to (N, 4C, H/2, W/2)."""
    n, c, height, width = x.shape
    pixels = x.reshape(n, c, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return pixels.reshape(n, 4 * c, height // 2, width // 2)


def patches_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride is its kernel size, as one matmul over patches; the result is channels_last."""
    n, c, height, width = x.shape
    out, _, p, q = weight.shape
    grid = x.reshape(n, c, height // p, p, width // q, q)
    if has_channels_last(x):
        # A patch's row of q pixels with their channels lies in one piece.
        patches, weight = grid.permute(0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)
    else:
        patches = grid.permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.reshape(out, -1), bias).permute(0, 3, 1, 2)


def doubling_conv_transpose2d(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A transposed convolution of kernel 2×2 and stride 2 as one matmul to the four pixels each pixel becomes.

    The copy that puts them in place is one that a concatenation, or the slice of its gradient, has to make anyway.
    """
    n, _, height, width = x.shape
    out = weight.shape[1]
    taps = weight.permute(2, 3, 1, 0).reshape(4 * out, -1)
    pixels = F.linear(x.permute(0, 2, 3, 1), taps, None if bias is None else bias.repeat(4))
    rows = pixels.view(n, height, width, 2, 2, out).permute(0, 1, 3, 2, 4, 5)
    return rows.reshape(n, 2 * height, 2 * width, out).permute(0, 3, 1, 2)
