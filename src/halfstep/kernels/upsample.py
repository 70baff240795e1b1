"""The transposed 2×2 convolution at stride 2 of relu(y normalised) into its half of a concatenation, and its gradient.

In kernels of our own where pixels are many and channels few, which is bound by memory. The few pixels of deep levels
are bound by arithmetic: there the library's matmul, and a copy to put its pixels in place, are left alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.kernels.normalise import GradientSums, Norm, gradient_sums, normalised

FEWEST_ROWS = 0
"""Pixels of y from which on our kernels are faster."""


def doubled_into(half: Tensor, y: Tensor, norm: Norm, taps: Tensor, bias: Tensor) -> None:
    """Fills `half`, a slice of a map's channels: y doubled in its middle, zeros around where it is larger."""
    height, width = 2 * y.shape[2], 2 * y.shape[3]
    if half.shape[2:] != (height, width):
        half.zero_()
    if has_own_kernels(y):
        from halfstep.kernels import upsample_triton as kernels

        kernels.doubled(y, norm, taps, bias, half)
    else:
        pixels = torch.addmm(bias.repeat(4), rows_of(normalised(y, norm)), taps)
        n, channels = y.shape[0], half.shape[1]
        four_pixels_of(half, y).copy_(pixels.view(n, *y.shape[2:], 2, 2, channels))


def doubling_gradients(
    dhalf: Tensor, y: Tensor, norm: Norm, taps: Tensor
) -> tuple[Tensor, GradientSums, Tensor, Tensor]:
    """From the gradient of `half`: that of the normalised map with BatchNorm's sums, and those of taps and bias."""
    if has_own_kernels(y):
        from halfstep.kernels import upsample_triton as kernels

        return *kernels.doubled_gradient(dhalf, y, norm, taps), *kernels.tap_gradients(dhalf, y, norm)
    z, pixels = normalised(y, norm), four_pixels_of(dhalf, y).reshape(-1, taps.shape[1])
    n, depth, height, width = y.shape
    dz = (pixels @ taps.t()).view(n, height, width, depth).permute(0, 3, 1, 2)
    dbias = pixels.view(-1, dhalf.shape[1]).sum(0, dtype=torch.float32)
    return dz, gradient_sums(dz, y, norm), (rows_of(z).t() @ pixels).float(), dbias


def has_own_kernels(y: Tensor) -> bool:
    """Whether this map is large enough for them."""
    return y.numel() // y.shape[1] >= FEWEST_ROWS


def rows_of(z: Tensor) -> Tensor:
    """A channels_last map as [pixels, channels]."""
    return z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])


def corner(half: Tensor, y: Tensor) -> tuple[int, int]:
    """Where y doubled begins: in the middle, half a pixel up and left of it where the difference is odd."""
    return (half.shape[2] - 2 * y.shape[2]) // 2, (half.shape[3] - 2 * y.shape[3]) // 2


def four_pixels_of(half: Tensor, y: Tensor) -> Tensor:
    """The view [n, height, width, 2, 2, channels] of what y becomes."""
    (top, left), (height, width) = corner(half, y), y.shape[2:]
    inner = half[:, :, top : top + 2 * height, left : left + 2 * width].permute(0, 2, 3, 1)
    pixels: Tensor = inner.unflatten(2, (width, 2)).unflatten(1, (height, 2))
    return pixels.permute(0, 1, 3, 2, 4, 5)
