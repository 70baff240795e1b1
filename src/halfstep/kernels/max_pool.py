"""Max-pooling at stride 2 whose backward gathers: each pixel looks at the windows it lies in, no two writers meet.

torch's backward scatters window by window, with atomics where windows overlap, so its sums have no fixed order and no
neighbour can be fused to it. Forward keeps one byte per window, the place of its maximum: the first in reading order
where there are several, as torch has it. Kernel 2 without padding, or kernel 3 with padding 1. Two cases that no
training survives differ in whom the gradient goes to: of several NaN in a window the first (torch: the last), and
nobody at a border where all is -inf.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def max_pool_stride2(x: Tensor, kernel: int) -> Tensor:
    """`F.max_pool2d` of a channels_last x with this kernel, 2 or 3, at stride 2."""
    pooled = MaxPoolStride2.apply(x, kernel)  # type: ignore[no-untyped-call]
    assert isinstance(pooled, Tensor)
    return pooled


class MaxPoolStride2(torch.autograd.Function):
    """x and the kernel's size, 2 or 3, to the pooled x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int) -> Tensor:
        pooled, places = pool_with_places(x, kernel)
        ctx.save_for_backward(places)
        ctx.kernel, ctx.size = kernel, x.shape[2:]
        return pooled

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        return gathered(gradients[0], places, ctx.kernel, *ctx.size), None


def pool_with_places(x: Tensor, kernel: int) -> tuple[Tensor, Tensor]:
    """Maximum of each window, and its place there, row · (kernel + 1) + column: one more than a row has columns, so
    that a column beside the window is not mistaken for one in the row before."""
    padding = (kernel - 1) // 2
    pooled = F.max_pool2d(x, kernel, stride=2, padding=padding)
    # The compiler's partitioner compares again in backward, unless forward needs the result too and it takes less than
    # a quarter of the bytes it came from. Hence fp32 although bf16 would do, and the NaN, which no window ever gets.
    wide, best = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, pooled))
    wide = F.pad(wide, [padding] * 4, value=float("-inf"))
    rows, columns = pooled.shape[2:]
    places = torch.full_like(pooled, -1, dtype=torch.int8)
    for row in reversed(range(kernel)):
        for column in reversed(range(kernel)):
            value = wide[:, :, row : row + 2 * rows - 1 : 2, column : column + 2 * columns - 1 : 2]
            places = torch.where((value == best) | value.isnan(), row * (kernel + 1) + column, places)
    places = places.contiguous(memory_format=torch.channels_last)
    return torch.where(places < 0, float("nan"), pooled), places


def gathered(gradient: Tensor, places: Tensor, kernel: int, height: int, width: int) -> Tensor:
    """The gradient of x: at each pixel the sum, in fp32 at least, over windows that have their maximum there.

    Pixel h lies in window h//2 + i at row h%2 + padding - 2i, for i = 0 and, with padding, 1. All is written channels
    last, as it lies in memory: where strides do not tell, the compiler walks through memory in the order written.
    """
    padding = (kernel - 1) // 2
    parity = torch.arange(max(height, width), dtype=torch.int32, device=places.device)[:, None] % 2 + padding
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = torch.zeros((), dtype=wide.dtype, device=wide.device)
    for i in range(padding + 1):
        for j in range(padding + 1):
            here = (parity[:height, None] - 2 * i) * (kernel + 1) + (parity[:width] - 2 * j)
            is_maximum = spread(places, i, j, height, width) == here
            total = total + torch.where(is_maximum, spread(wide, i, j, height, width), 0)
    return total.to(gradient.dtype).permute(0, 3, 1, 2)


def spread(windows: Tensor, i: int, j: int, height: int, width: int) -> Tensor:
    """For each pixel (h, w) the value of window (h//2 + i, w//2 + j), or 0 where there is none; channels last."""
    n, c, rows, columns = windows.shape
    half_height, half_width = (height + 1) // 2, (width + 1) // 2
    windows = F.pad(windows, (0, half_width + j - columns, 0, half_height + i - rows))[:, :, i:, j:].permute(0, 2, 3, 1)
    doubled = windows[:, :, None, :, None].expand(n, half_height, 2, half_width, 2, c)
    return doubled.reshape(n, 2 * half_height, 2 * half_width, c)[:, :height, :width]
