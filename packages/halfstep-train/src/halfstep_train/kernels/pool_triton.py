"""Triton kernels of a U-Net's encoder: normalise, ReLU and 2×2 max-pooling in one pass, and their gradients in two.

A tile is [windows, channels], once for each of the four pixels: a, b above, c, d below, with gradients ga to gd. So one
thread finds a window's maximum and the pixel that gets its gradient. The four pixels of a window are rows `first`,
`first + 1`, `first + width` and `first + width + 1` of the channels_last map. If a side is odd, its last row or column
is in incomplete windows: these pixels get the skip's gradient and none from pooling. Sides are compile-time constants:
otherwise divisions by them would take as long as the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep_train.kernels.layout import Tiling, cut_tiles, get_row_stride
from halfstep_train.kernels.normalise_triton import GradientSums, Norm, allocate_like, finish_sums

POOLED = Tiling(values=512, most_channels=64, num_warps=4, num_programs=12 * 132)
SUMS = GRADIENT = Tiling(values=1024, most_channels=64, num_warps=4, num_programs=3 * 132)
"""Four or eight values, up to 16 bytes, of each pixel per thread; an H200 has 132 multiprocessors. The fastest of those
tried there on a U-Net's four levels."""


@triton.jit
def _locate_windows(tile, num_windows, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return the first pixel's row and the pooled row of each window in a tile, and masks of the pixels that exist."""
    window = tile * ROWS + tl.arange(0, ROWS)
    # Rounded up: at odd sides the last windows are incomplete, which `right` and `below` mask.
    across: tl.constexpr = (WIDTH + 1) // 2
    down: tl.constexpr = (HEIGHT + 1) // 2
    column, line = window % across, window // across
    row, image = line % down, line // down
    here = window < num_windows
    right = here if WIDTH % 2 == 0 else here & (2 * column + 1 < WIDTH)
    below = here if HEIGHT % 2 == 0 else here & (2 * row + 1 < HEIGHT)
    first = (image * HEIGHT + 2 * row) * WIDTH + 2 * column
    # Rounded down: incomplete windows have no pooled pixel. Their result here is masked by right & below.
    pooled = (image * (HEIGHT // 2) + row) * (WIDTH // 2) + column
    return first, pooled, here, right, below


@triton.jit
def _load_pixels(pointer, stride, first, width, here, right, below, columns, is_channel):
    """Load a window's four pixels in fp32; 0 for missing ones."""
    at = (pointer + first.to(tl.int64) * stride)[:, None] + columns[None, :]
    is_channel = is_channel[None, :]
    a = tl.load(at, mask=here[:, None] & is_channel, other=0.0)
    b = tl.load(at + stride, mask=right[:, None] & is_channel, other=0.0)
    c = tl.load(at + width * stride, mask=below[:, None] & is_channel, other=0.0)
    d = tl.load(at + (width + 1) * stride, mask=(right & below)[:, None] & is_channel, other=0.0)
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit
def _store_pixel(pointer, stride, row, mask, columns, is_channel, value):
    at = (pointer + row.to(tl.int64) * stride)[:, None] + columns[None, :]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=mask[:, None] & is_channel[None, :])


@triton.jit
def _normalise_rounded(y, scale, offset, pointer):
    """Return y * scale + offset, rounded as a stored map would be, so that ties for the maximum break as in torch.

    ReLU may follow later: it keeps the order of what it lets through, and the rest has no gradient.
    """
    return (y * scale[None, :] + offset[None, :]).to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def pooled_kernel(y, scale, offset, out, num_windows, channels,
                  HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y once and write a quarter of it."""
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_channel = columns < channels
    weight, bias = tl.load(scale + columns, mask=is_channel), tl.load(offset + columns, mask=is_channel)
    for tile in range(tl.program_id(0), tl.cdiv(num_windows, ROWS), tl.num_programs(0)):
        first, pooled, here, right, below = _locate_windows(tile, num_windows, HEIGHT, WIDTH, ROWS)
        a, b, c, d = _load_pixels(y, channels, first, WIDTH, here, right, below, columns, is_channel)
        a, b = _normalise_rounded(a, weight, bias, y), _normalise_rounded(b, weight, bias, y)
        c, d = _normalise_rounded(c, weight, bias, y), _normalise_rounded(d, weight, bias, y)
        # Not tl.maximum, which drops NaN. Statistics spread NaN over the whole channel, so the first pixel has it too.
        best = tl.where(b > a, b, a)
        best = tl.where(c > best, c, best)
        best = tl.where(d > best, d, best)
        _store_pixel(out, channels, pooled, right & below, columns, is_channel, tl.where(best < 0, 0.0, best))


@triton.jit
def _compute_pixel_gradients(y, dskip, dpooled, scale, offset, skip_stride, channels, tile, num_windows, columns,
                     is_channel, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Return each pixel's y and the gradient of y * scale + offset: the skip's, plus the pooled one at the first
    maximum."""
    first, pooled, here, right, below = _locate_windows(tile, num_windows, HEIGHT, WIDTH, ROWS)
    a, b, c, d = _load_pixels(y, channels, first, WIDTH, here, right, below, columns, is_channel)
    ga, gb, gc, gd = _load_pixels(dskip, skip_stride, first, WIDTH, here, right, below, columns, is_channel)
    at = (dpooled + pooled.to(tl.int64) * channels)[:, None] + columns[None, :]
    gpool = tl.load(at, mask=(right & below)[:, None] & is_channel[None, :], other=0.0).to(tl.float32)
    za, zb = _normalise_rounded(a, scale, offset, y), _normalise_rounded(b, scale, offset, y)
    zc, zd = _normalise_rounded(c, scale, offset, y), _normalise_rounded(d, scale, offset, y)
    # Pairs first, above before below and left before right: a tie belongs to the first in reading order, as in torch.
    best_ab, best_cd = tl.where(zb > za, zb, za), tl.where(zd > zc, zd, zc)
    is_above = ~(best_cd > best_ab)
    is_left_above, is_left_below = ~(zb > za), ~(zd > zc)
    ga += tl.where(is_above & is_left_above, gpool, 0.0)
    gb += tl.where(is_above & ~is_left_above, gpool, 0.0)
    gc += tl.where(~is_above & is_left_below, gpool, 0.0)
    gd += tl.where(~is_above & ~is_left_below, gpool, 0.0)
    # ReLU's gradient, for the skip's and the pooled part alike.
    ga, gb = tl.where(za > 0, ga, 0.0), tl.where(zb > 0, gb, 0.0)
    gc, gd = tl.where(zc > 0, gc, 0.0), tl.where(zd > 0, gd, 0.0)
    return a, b, c, d, ga, gb, gc, gd


@triton.jit
def pool_gradient_sums_kernel(y, dskip, dpooled, mean, scale, offset, partials, skip_stride, num_windows, channels,
                              HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                              ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y, the skip's gradient and the pooled one; write each program's sums of g and g * (y - mean)."""
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_channel = columns < channels
    weight, bias = tl.load(scale + columns, mask=is_channel), tl.load(offset + columns, mask=is_channel)
    mu = tl.load(mean + columns, mask=is_channel, other=0.0)[None, :]
    sum_g, sum_gx = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_windows, ROWS), tl.num_programs(0)):
        a, b, c, d, ga, gb, gc, gd = _compute_pixel_gradients(
            y, dskip, dpooled, weight, bias, skip_stride, channels, tile, num_windows, columns, is_channel,
            HEIGHT, WIDTH, ROWS)  # fmt: skip
        # Pixels that do not exist have a gradient of 0 and add nothing.
        sum_g += (ga + gb) + (gc + gd)
        sum_gx += (ga * (a - mu) + gb * (b - mu)) + (gc * (c - mu) + gd * (d - mu))
    at = partials + tl.program_id(0) * 2 * channels + columns
    tl.store(at, tl.sum(sum_g, 0), mask=is_channel)
    tl.store(at + channels, tl.sum(sum_gx, 0), mask=is_channel)


@triton.jit
def pool_gradient_kernel(y, dskip, dpooled, mean, inverse, scale, offset, sum_g, sum_gx, out, skip_stride, num_windows,
                         channels, num_values, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                         ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y, the skip's gradient and the pooled one; write the gradient of y."""
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    is_channel = columns < channels
    weight, bias = tl.load(scale + columns, mask=is_channel), tl.load(offset + columns, mask=is_channel)
    slope = tl.load(inverse + columns, mask=is_channel)
    # The gradient of BatchNorm, weight·(g - Σg/n - (y - mean)·inverse²·Σgx/n), is weight·g + (y·slope + level). Slope
    # and level are per channel, so they are computed once per program.
    slope = -weight * slope * slope * tl.load(sum_gx + columns, mask=is_channel) / num_values
    level = -weight * tl.load(sum_g + columns, mask=is_channel) / num_values
    level -= slope * tl.load(mean + columns, mask=is_channel)
    factor, slope, level = weight[None, :], slope[None, :], level[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(num_windows, ROWS), tl.num_programs(0)):
        a, b, c, d, ga, gb, gc, gd = _compute_pixel_gradients(
            y, dskip, dpooled, weight, bias, skip_stride, channels, tile, num_windows, columns, is_channel,
            HEIGHT, WIDTH, ROWS)  # fmt: skip
        a, b = factor * ga + (a * slope + level), factor * gb + (b * slope + level)
        c, d = factor * gc + (c * slope + level), factor * gd + (d * slope + level)
        # Offsets and masks again, for the stores: `_compute_pixel_gradients` does not return them.
        first, _, here, right, below = _locate_windows(tile, num_windows, HEIGHT, WIDTH, ROWS)
        _store_pixel(out, channels, first, here, columns, is_channel, a)
        _store_pixel(out, channels, first + 1, right, columns, is_channel, b)
        _store_pixel(out, channels, first + WIDTH, below, columns, is_channel, c)
        _store_pixel(out, channels, first + WIDTH + 1, right & below, columns, is_channel, d)


class PoolWindows(NamedTuple):
    """The tiling of windows × channels."""

    num: int
    grid: tuple[int, int]
    options: dict[str, int]  # compile-time constants of all window kernels


def cut_windows(y: Tensor, tiling: Tiling) -> PoolWindows:
    """Return the tiling for the windows of this map."""
    n, channels, height, width = y.shape
    count = n * triton.cdiv(height, 2) * triton.cdiv(width, 2)
    tiles = cut_tiles(count, channels, tiling)
    sides = {"HEIGHT": height, "WIDTH": width, "ROWS": tiles.rows, "COLS": tiles.channels}
    # `cut_tiles` puts channels first; in these kernels program_id(0) counts windows.
    return PoolWindows(count, tiles.grid[::-1], {**sides, "num_warps": tiles.num_warps})


def pool_map(y: Tensor, norm: Norm) -> Tensor:
    """Return the 2×2 max-pooling of relu(y normalised)."""
    n, channels, height, width = y.shape
    tiles = cut_windows(y, POOLED)
    out = torch.empty(
        (n, channels, height // 2, width // 2), dtype=y.dtype, device=y.device, memory_format=torch.channels_last
    )
    pooled_kernel[tiles.grid](*(y, norm.scale, norm.offset, out, tiles.num, channels), **tiles.options)
    return out


def sum_pool_gradients(y: Tensor, dskip: Tensor, dpooled: Tensor, norm: Norm) -> GradientSums:
    """Return the sums that BatchNorm's gradient needs; `dskip` may be a slice of a wider map's channels."""
    channels, tiles = y.shape[1], cut_windows(y, SUMS)
    partials = y.new_empty((tiles.grid[0], 2, channels), dtype=torch.float32)
    pool_gradient_sums_kernel[tiles.grid](
        *(y, dskip, dpooled, norm.mean, norm.scale, norm.offset, partials),
        *(get_row_stride(dskip), tiles.num, channels),
        **tiles.options,
    )
    return finish_sums(partials, norm)


def compute_pool_gradient(y: Tensor, dskip: Tensor, dpooled: Tensor, norm: Norm, sums: GradientSums) -> Tensor:
    """Return the gradient of y."""
    channels, tiles, out = y.shape[1], cut_windows(y, GRADIENT), allocate_like(y)
    pool_gradient_kernel[tiles.grid](
        *(y, dskip, dpooled, norm.mean, norm.inverse, norm.scale, norm.offset, sums.g, sums.gx, out),
        *(get_row_stride(dskip), tiles.num, channels, y.numel() // channels),
        **tiles.options,
    )
    return out
