"""The transposed 2×2 convolution at stride 2 of a map z into its half of a concatenation, and its gradient.

In kernels of our own, which write pixels where they belong and gather their gradient from there; or, for maps of fewer
pixels than `FEWEST_ROWS`, as the library's matmul and a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST_ROWS = 0
"""Pixels of z from which on our kernels are faster."""


def doubled_into(half: Tensor, z: Tensor, taps: Tensor, bias: Tensor) -> None:
    """Fills `half`, a slice of a map's channels: z doubled in its middle, zeros around where it is larger."""
    height, width = 2 * z.shape[2], 2 * z.shape[3]
    if half.shape[2:] != (height, width):
        half.zero_()
    if has_own_kernels(z):
        from halfstep.kernels import upsample_triton as kernels

        kernels.doubled(z, taps, bias, half)
    else:
        pixels = torch.addmm(bias.repeat(4), rows_of(z), taps)
        four_pixels_of(half, z).copy_(pixels.view(z.shape[0], *z.shape[2:], 2, 2, half.shape[1]))


def doubling_gradients(dhalf: Tensor, z: Tensor, taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient of `half`: those of z, taps and bias."""
    if has_own_kernels(z):
        from halfstep.kernels import upsample_triton as kernels

        return kernels.doubled_gradient(dhalf, z, taps), *kernels.tap_gradients(dhalf, z)
    pixels = four_pixels_of(dhalf, z).reshape(-1, taps.shape[1])
    n, depth, height, width = z.shape
    dz = (pixels @ taps.t()).view(n, height, width, depth).permute(0, 3, 1, 2)
    dbias = pixels.view(-1, dhalf.shape[1]).sum(0, dtype=torch.float32)
    return dz, (rows_of(z).t() @ pixels).float(), dbias


def has_own_kernels(z: Tensor) -> bool:
    """Whether this map is large enough for them."""
    return z.numel() // z.shape[1] >= FEWEST_ROWS


def rows_of(z: Tensor) -> Tensor:
    """A channels_last map as [pixels, channels]."""
    return z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])


def corner(half: Tensor, z: Tensor) -> tuple[int, int]:
    """Where z doubled begins: in the middle, half a pixel up and left of it where the difference is odd."""
    return (half.shape[2] - 2 * z.shape[2]) // 2, (half.shape[3] - 2 * z.shape[3]) // 2


def four_pixels_of(half: Tensor, z: Tensor) -> Tensor:
    """The view [n, height, width, 2, 2, channels] of what z becomes."""
    (top, left), (height, width) = corner(half, z), z.shape[2:]
    inner = half[:, :, top : top + 2 * height, left : left + 2 * width].permute(0, 2, 3, 1)
    pixels: Tensor = inner.unflatten(2, (width, 2)).unflatten(1, (height, 2))
    return pixels.permute(0, 1, 3, 2, 4, 5)
