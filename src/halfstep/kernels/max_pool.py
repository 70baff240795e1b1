"""Max-pooling at stride 2 whose backward gathers: each pixel looks at the windows it lies in, no two writers meet.

torch's backward scatters window by window, with atomics where windows overlap, so its sums have no fixed order and no
neighbour can be fused to it. Forward keeps one byte a window, the place of its maximum; ties and NaN are resolved as
torch does: the first maximum in reading order, or the last NaN. Kernel 2 without padding, or kernel 3 with padding 1.
A window of nothing but -inf gives its gradient to nobody, where torch gives it to the window's first pixel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.kernels.layout import layout_of


def max_pool_stride2(x: Tensor, kernel: int) -> Tensor:
    """`F.max_pool2d` with this kernel, 2 or 3, at stride 2."""
    pooled = MaxPoolStride2.apply(x, kernel)  # type: ignore[no-untyped-call]
    assert isinstance(pooled, Tensor)
    return pooled


class MaxPoolStride2(torch.autograd.Function):
    """x and the kernel's size, 2 or 3, to the pooled x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int) -> Tensor:
        pooled, places = pool_with_places(x, kernel)
        ctx.save_for_backward(places)
        ctx.kernel, ctx.size, ctx.layout = kernel, x.shape[2:], layout_of(x)
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gathered(gradients[0], places, ctx.kernel, *ctx.size).contiguous(memory_format=ctx.layout), None


def pool_with_places(x: Tensor, kernel: int) -> tuple[Tensor, Tensor]:
    """Maximum of each window, and its place there, row · (kernel + 1) + column: one more than a row has columns, so
    that a column beside the window is not mistaken for one in the next row."""
    padding = kernel // 2 if kernel % 2 else 0
    rows, columns = ((side + 2 * padding - kernel) // 2 + 1 for side in x.shape[2:])
    padded = F.pad(x, [padding] * 4, value=float("-inf")) if padding else x
    best = padded[:, :, : 2 * rows : 2, : 2 * columns : 2]
    places = torch.zeros_like(best, dtype=torch.int8)
    for row in range(kernel):
        for column in range(kernel):
            value = padded[:, :, row : row + 2 * rows - 1 : 2, column : column + 2 * columns - 1 : 2]
            is_better = (value > best) | value.isnan()
            best = torch.where(is_better, value, best)
            places = places.masked_fill(is_better, row * (kernel + 1) + column)
    return best.contiguous(memory_format=layout_of(x)), places


def gathered(gradient: Tensor, places: Tensor, kernel: int, height: int, width: int) -> Tensor:
    """The gradient of x: at each pixel the sum, in fp32 at least, over windows that have their maximum there.

    Pixel h lies in window h//2 + i at row h%2 + padding - 2i, for i = 0 and, with padding, 1.
    """
    padding = kernel // 2 if kernel % 2 else 0
    parity = torch.arange(max(height, width), device=places.device) % 2 + padding
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = torch.zeros((), dtype=wide.dtype, device=wide.device)
    for i in range(padding + 1):
        for j in range(padding + 1):
            here = (parity[:height, None] - 2 * i) * (kernel + 1) + (parity[:width] - 2 * j)
            is_maximum = spread(places, i, j, height, width) == here
            total = total + torch.where(is_maximum, spread(wide, i, j, height, width), 0)
    return total.to(gradient.dtype)


def spread(windows: Tensor, i: int, j: int, height: int, width: int) -> Tensor:
    """For each pixel (h, w) the value of window (h//2 + i, w//2 + j), or 0 where there is none."""
    n, c, rows, columns = windows.shape
    half_height, half_width = (height + 1) // 2, (width + 1) // 2
    windows = F.pad(windows, (0, half_width + j - columns, 0, half_height + i - rows))[:, :, i:, j:]
    doubled = windows[:, :, :, None, :, None].expand(n, c, half_height, 2, half_width, 2)
    return doubled.reshape(n, c, 2 * half_height, 2 * half_width)[:, :, :height, :width]
