"""Triton kernels where paths of a ResNet meet: the end of a block, where its shortcut is added, and the stem's pooling.

A map is dense rows (pixels) of channels. A tile is [BR, BC], rows × channels. A program owns BC channels and walks over
tiles of rows, so that per-channel values are loaded once, and sums over rows stay in registers, as tiles, until the
end. Arithmetic is fp32 whatever the maps' dtype.

Comparisons are written so that a NaN wins: a non-finite map must not look finite after a ReLU or a maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep_train.kernels.layout import Tiling, cut_tiles
from halfstep_train.kernels.normalise_triton import GradientSums, Norm, allocate_like, finish_sums

SUMS = Tiling(values=2048, most_channels=64, num_warps=8, num_programs=132 * 4)
"""Programs that keep sums in registers, and leave them to a second kernel: not too many."""
MAPS = Tiling(values=4096, most_channels=128, num_warps=8, num_programs=132 * 16)
POOLS = Tiling(values=1024, most_channels=64, num_warps=4, num_programs=132 * 32)
"""9 or 4 pixels of a window are operands; 8 values per thread, so that threads hold bytes in the order of halfs."""


def join_maps(y: Tensor, norm: Norm, shortcut: Tensor | None, shortcut_norm: Norm | None) -> Tensor:
    """Return relu(y normalised + shortcut), with the shortcut normalised too if it has a Norm; reads each once, writes
    one."""
    num_rows, num_channels = y.numel() // y.shape[1], y.shape[1]
    z, tiles, other = allocate_like(y), cut_tiles(num_rows, num_channels, MAPS), shortcut_norm or norm
    _join[tiles.grid](
        *(y, norm.scale, norm.offset, y if shortcut is None else shortcut, other.scale, other.offset, z),
        *(num_rows, num_channels),
        HAS_SHORTCUT=shortcut is not None,
        IS_NORMALISED=shortcut_norm is not None,
        **tiles.options,
    )
    return z


@triton.jit
def _join(
    y, scale, offset, shortcut, shortcut_scale, shortcut_offset, z, num_rows, num_channels,
    HAS_SHORTCUT: tl.constexpr, IS_NORMALISED: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Read y and the shortcut, and write z."""
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = columns < num_channels
    a = tl.load(scale + columns, mask=is_channel)[None, :]
    b = tl.load(offset + columns, mask=is_channel)[None, :]
    if IS_NORMALISED:
        a_shortcut = tl.load(shortcut_scale + columns, mask=is_channel)[None, :]
        # Both offsets are per channel, so they are added once, before the loop.
        b += tl.load(shortcut_offset + columns, mask=is_channel)[None, :]
    rows = tl.arange(0, BR)
    places = rows[:, None] * num_channels + columns[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(num_rows, BR), tl.num_programs(1)):
        start = tl.cast(tile, tl.int64) * BR
        inside = (start + rows < num_rows)[:, None] & is_channel[None, :]
        at = start * num_channels + places
        v = tl.load(y + at, mask=inside).to(tl.float32) * a + b
        if HAS_SHORTCUT:
            s = tl.load(shortcut + at, mask=inside).to(tl.float32)
            v += s * a_shortcut if IS_NORMALISED else s
        tl.store(z + at, tl.where(v <= 0, 0.0, v).to(z.dtype.element_ty), mask=inside)


def compute_join_gradient(
    dzs: Sequence[Tensor], z: Tensor, raws: Sequence[tuple[Tensor, Norm]]
) -> tuple[Tensor, list[GradientSums]]:
    """Return g = Σ dzs where z > 0, and its sums for each raw map that z was made of; one or two of either.

    If the second of `dzs` is smaller than z, it belongs to even rows and columns: a stride-2 convolution read them.
    """
    num_rows, num_channels = z.numel() // z.shape[1], z.shape[1]
    g, tiles = allocate_like(z), cut_tiles(num_rows, num_channels, SUMS)
    (y, norm), (other, other_norm) = raws[0], raws[-1]
    first, second = dzs[0], dzs[-1]
    partials = torch.empty(len(raws), tiles.grid[1], 2, num_channels, dtype=torch.float32, device=z.device)
    _join_gradient[tiles.grid](
        *(first, second, z, y, norm.mean, other, other_norm.mean, g, partials),
        *(num_rows, num_channels, *z.shape[2:]),
        HAS_SECOND=len(dzs) == 2,
        IS_SPARSE=second.shape != z.shape,
        NUM_RAWS=len(raws),
        **tiles.options,
    )
    return g, [finish_sums(parts, norm) for parts, (_, norm) in zip(partials, raws, strict=True)]


@triton.jit
def _join_gradient(
    first, second, z, y, mean, other, other_mean, g, partials, num_rows, num_channels, height, width,
    HAS_SECOND: tl.constexpr, IS_SPARSE: tl.constexpr, NUM_RAWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Read first, second, z, y and the other raw map; write g and, per raw map, a program's sums [2, channels].

    Starts at the maps' end, which was written last and may still be cached; the next kernel begins where this one ends.
    """
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = columns < num_channels
    mu = tl.load(mean + columns, mask=is_channel)[None, :]
    sum_g = tl.zeros((BR, BC), tl.float32)
    sum_gx = tl.zeros((BR, BC), tl.float32)
    if NUM_RAWS == 2:
        other_mu = tl.load(other_mean + columns, mask=is_channel)[None, :]
        sum_other = tl.zeros((BR, BC), tl.float32)
    rows = tl.arange(0, BR)
    places = rows[:, None] * num_channels + columns[None, :]
    num_tiles = tl.cdiv(num_rows, BR)
    for number in range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        tile = num_tiles - 1 - number
        start = tl.cast(tile, tl.int64) * BR
        inside = (start + rows < num_rows)[:, None] & is_channel[None, :]
        at = start * num_channels + places
        # All loads come before the store: the compiler would not move one past it.
        dz = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        # `second` has rows for even pixels only: compute the row of each pixel there. Other pixels were not read by the
        # convolution and get nothing from it.
        if IS_SPARSE:
            row = tile * BR + rows
            w, h, image = row % width, row // width % height, row // (width * height)
            sparse_row = (image * ((height + 1) // 2) + h // 2) * ((width + 1) // 2) + w // 2
            is_read = inside & ((w % 2 == 0) & (h % 2 == 0))[:, None]
            at_sparse = sparse_row.to(tl.int64)[:, None] * num_channels + columns[None, :]
            dz += tl.load(second + at_sparse, mask=is_read, other=0.0).to(tl.float32)
        elif HAS_SECOND:
            dz += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        is_on = tl.load(z + at, mask=inside, other=0.0).to(tl.float32) > 0
        x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) - mu
        if NUM_RAWS == 2:
            other_x = tl.load(other + at, mask=inside, other=0.0).to(tl.float32) - other_mu
        dz = tl.where(is_on, dz, 0.0).to(g.dtype.element_ty)
        tl.store(g + at, dz, mask=inside)
        dz = dz.to(tl.float32)  # rounded first: the sums must match the stored values
        sum_g += dz
        sum_gx += dz * x
        if NUM_RAWS == 2:
            sum_other += dz * other_x
    to, total = partials + tl.program_id(1) * 2 * num_channels + columns, tl.sum(sum_g, 0)
    tl.store(to, total, mask=is_channel)
    tl.store(to + num_channels, tl.sum(sum_gx, 0), mask=is_channel)
    if NUM_RAWS == 2:
        # partials is [raw maps, programs, 2, channels]: on to the second map. Σ g is the same for both.
        to += tl.num_programs(1) * 2 * num_channels
        tl.store(to, total, mask=is_channel)
        tl.store(to + num_channels, tl.sum(sum_other, 0), mask=is_channel)


def compute_pair_gradients(
    g: Tensor, raws: Sequence[tuple[Tensor, Norm]], sums: Sequence[GradientSums]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of two raw maps whose normalised sum has the gradient g, in one pass over all of them."""
    num_rows, num_channels = g.numel() // g.shape[1], g.shape[1]
    (y, how), (other, other_how) = raws
    dy, dother, tiles = allocate_like(y), allocate_like(other), cut_tiles(num_rows, num_channels, MAPS)
    _pair_gradients[tiles.grid](
        *(g, y, how.mean, how.inverse, how.scale, sums[0].g, sums[0].gx, dy),
        *(other, other_how.mean, other_how.inverse, other_how.scale, sums[1].gx, dother),
        *(num_rows, num_channels),
        **tiles.options,
    )
    return dy, dother


@triton.jit
def _pair_gradients(
    g, y, mean, inverse, scale, sum_g, sum_gx, dy, other, other_mean, other_inverse, other_scale, sum_other, dother,
    num_rows, num_channels, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Read g and both raw maps, and write the gradients of both."""
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = columns < num_channels
    one_nth = 1.0 / num_rows
    a, mu, slope, level = _compute_line(mean, inverse, scale, sum_g, sum_gx, one_nth, columns, is_channel)
    a2, mu2, slope2, level2 = _compute_line(
        other_mean, other_inverse, other_scale, sum_g, sum_other, one_nth, columns, is_channel
    )
    rows = tl.arange(0, BR)
    places = rows[:, None] * num_channels + columns[None, :]
    for tile in range(tl.program_id(1), tl.cdiv(num_rows, BR), tl.num_programs(1)):
        start = tl.cast(tile, tl.int64) * BR
        inside = (start + rows < num_rows)[:, None] & is_channel[None, :]
        at = start * num_channels + places
        dz = tl.load(g + at, mask=inside).to(tl.float32)
        x = tl.load(y + at, mask=inside).to(tl.float32) - mu
        x2 = tl.load(other + at, mask=inside).to(tl.float32) - mu2
        tl.store(dy + at, (a * dz + slope * x + level).to(dy.dtype.element_ty), mask=inside)
        tl.store(dother + at, (a2 * dz + slope2 * x2 + level2).to(dother.dtype.element_ty), mask=inside)


@triton.jit
def _compute_line(mean, inverse, scale, sum_g, sum_gx, one_nth, columns, is_channel):
    """Return a, mean, slope and level of a raw map's gradient a·g + slope·(y - mean) + level, as rows of a tile."""
    a = tl.load(scale + columns, mask=is_channel)
    inv = tl.load(inverse + columns, mask=is_channel)
    # BatchNorm: a·(g - Σg/n - (y - mean)·inverse²·Σgx/n), with both means per channel.
    slope = -a * inv * inv * tl.load(sum_gx + columns, mask=is_channel) * one_nth
    level = -a * tl.load(sum_g + columns, mask=is_channel) * one_nth
    return a[None, :], tl.load(mean + columns, mask=is_channel)[None, :], slope[None, :], level[None, :]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The maximum of each 3×3 window (stride 2, padding 1) of relu(y normalised), and which pixel it came from."""

    z: Tensor
    raw: Tensor
    """The value of y that became the maximum: pixels that became none get no gradient, so backward needs no others."""
    places: Tensor
    """int8, row · 3 + column in the window: the first in reading order if there are several, as in torch."""


def pool_stem(y: Tensor, norm: Norm) -> Pooled:
    """Pool the stem's map: reads y once (a window's pixels come from the cache), writes a quarter of it twice and a
    quarter in bytes."""
    n, num_channels, height, width = y.shape
    shape = (n, num_channels, (height + 1) // 2, (width + 1) // 2)
    z = torch.empty(shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
    raw, places = torch.empty_like(z), torch.empty_like(z, dtype=torch.int8)
    num_windows = z.numel() // num_channels
    tiles = cut_tiles(num_windows, num_channels, POOLS)
    _pool[tiles.grid](
        *(y, norm.scale, norm.offset, z, raw, places, num_windows, num_channels, height, width), **tiles.options
    )
    return Pooled(z, raw, places)


@triton.jit
def _pool(
    y, scale, offset, z, raw, places, num_windows, num_channels, height, width, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """Read y; write z, raw and places of a quarter as many pixels.

    Rows of a tile are windows; `best`, `best_raw` and `place` hold the maximum so far. Pixels are visited in reading
    order, and only a larger value replaces the maximum: of equal ones the first wins, as in torch.
    """
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = columns < num_channels
    a = tl.load(scale + columns, mask=is_channel)[None, :]
    b = tl.load(offset + columns, mask=is_channel)[None, :]
    windows_across, windows_down = (width + 1) // 2, (height + 1) // 2
    for tile in range(tl.program_id(1), tl.cdiv(num_windows, BR), tl.num_programs(1)):
        window = tile * BR + tl.arange(0, BR)
        # Padding 1: windows begin one pixel above and to the left of even pixels.
        left, top = window % windows_across * 2 - 1, window // windows_across % windows_down * 2 - 1
        image = (window // (windows_across * windows_down)).to(tl.int64)
        is_window = (window < num_windows)[:, None] & is_channel[None, :]
        best = tl.full((BR, BC), float("-inf"), tl.float32)
        best_raw = tl.zeros((BR, BC), tl.float32)
        place = tl.zeros((BR, BC), tl.int8)
        for number in tl.static_range(9):
            h, w = top + number // 3, left + number % 3
            is_pixel = (h >= 0) & (h < height) & (w >= 0) & (w < width)
            inside = is_window & is_pixel[:, None]
            at = ((image * height + h) * width + w)[:, None] * num_channels + columns[None, :]
            x = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
            v = x * a + b
            # v != v holds for NaN only. It replaces any maximum, and no number replaces it, since v > NaN is false.
            is_better = inside & ((v > best) | (v != v))
            best = tl.where(is_better, v, best)
            best_raw = tl.where(is_better, x, best_raw)
            place = tl.where(is_better, tl.full((BR, BC), number, tl.int8), place)
        to = window.to(tl.int64)[:, None] * num_channels + columns[None, :]
        tl.store(z + to, tl.where(best <= 0, 0.0, best).to(z.dtype.element_ty), mask=is_window)
        tl.store(raw + to, best_raw.to(raw.dtype.element_ty), mask=is_window)
        tl.store(places + to, place, mask=is_window)


def compute_stem_pool_gradient(g: Tensor, places: Tensor, y: Tensor, norm: Norm, sums: GradientSums) -> Tensor:
    """Return the gradient of y, given the gradient g of the pooled map.

    Each pixel reads the windows that contain it, so no two programs write to the same address.
    """
    num_windows, num_channels = g.numel() // g.shape[1], g.shape[1]
    dy, tiles = allocate_like(y), cut_tiles(num_windows, num_channels, POOLS)
    _pool_gradient[tiles.grid](
        *(g, places, y, norm.mean, norm.inverse, norm.scale, sums.g, sums.gx, dy),
        *(num_windows, num_channels, *y.shape[2:], num_channels / y.numel()),
        **tiles.options,
    )
    return dy


@triton.jit
def _pool_gradient(
    g, places, y, mean, inverse, scale, sum_g, sum_gx, dy, num_windows, num_channels, height, width, one_nth,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Read g and places of a quarter of the pixels (each four times, from the cache) and y; write dy.

    Window (i, j) reads rows 2i - 1 to 2i + 1 and columns 2j - 1 to 2j + 1. So the 2×2 pixels from (2i, 2j) on are in it
    and in its neighbours to the right and below, and in no others.
    """
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = columns < num_channels
    a, mu, slope, level = _compute_line(mean, inverse, scale, sum_g, sum_gx, one_nth, columns, is_channel)
    across, down = (width + 1) // 2, (height + 1) // 2
    for tile in range(tl.program_id(1), tl.cdiv(num_windows, BR), tl.num_programs(1)):
        window = tile * BR + tl.arange(0, BR)
        j, i, image = window % across, window // across % down, (window // (across * down)).to(tl.int64)
        inside = (window < num_windows)[:, None] & is_channel[None, :]
        has_right = inside & (j + 1 < across)[:, None]
        has_below = inside & (i + 1 < down)[:, None]
        at = window.to(tl.int64)[:, None] * num_channels + columns[None, :]
        right, below = at + num_channels, at + across * num_channels
        pixel = ((image * height + 2 * i) * width + 2 * j)[:, None] * num_channels + columns[None, :]
        pixel_below = pixel + width * num_channels
        is_in_width = inside & (2 * j + 1 < width)[:, None]
        is_in_height = inside & (2 * i + 1 < height)[:, None]
        is_in_both = is_in_width & is_in_height
        # All loads come before the stores: the compiler would not move one past them.
        g00, p00 = _gather_window(g, places, at, inside)
        g01, p01 = _gather_window(g, places, right, has_right)
        g10, p10 = _gather_window(g, places, below, has_below)
        g11, p11 = _gather_window(g, places, below + num_channels, has_right & has_below)
        x00 = tl.load(y + pixel, mask=inside, other=0.0).to(tl.float32) - mu
        x01 = tl.load(y + pixel + num_channels, mask=is_in_width, other=0.0).to(tl.float32) - mu
        x10 = tl.load(y + pixel_below, mask=is_in_height, other=0.0).to(tl.float32) - mu
        x11 = tl.load(y + pixel_below + num_channels, mask=is_in_both, other=0.0).to(tl.float32) - mu
        # p is row · 3 + column of the maximum in its window. Pixel (2i, 2j) is the centre, 4, of window (i, j) and in
        # no other. Pixel (2i, 2j + 1) is in column 2 there, 5, and in column 0 of the window to the right, 3. Pixel (2i
        # + 1, 2j) is in row 2, 7, and in row 0 of the window below, 1. The last one is in a corner of all four.
        even_even = tl.where(p00 == 4, g00, 0.0)
        even_odd = tl.where(p00 == 5, g00, 0.0) + tl.where(p01 == 3, g01, 0.0)
        odd_even = tl.where(p00 == 7, g00, 0.0) + tl.where(p10 == 1, g10, 0.0)
        odd_odd = tl.where(p00 == 8, g00, 0.0) + tl.where(p01 == 6, g01, 0.0)
        odd_odd += tl.where(p10 == 2, g10, 0.0) + tl.where(p11 == 0, g11, 0.0)
        kind = dy.dtype.element_ty
        tl.store(dy + pixel, (a * even_even + slope * x00 + level).to(kind), mask=inside)
        tl.store(dy + pixel + num_channels, (a * even_odd + slope * x01 + level).to(kind), mask=is_in_width)
        tl.store(dy + pixel_below, (a * odd_even + slope * x10 + level).to(kind), mask=is_in_height)
        tl.store(dy + pixel_below + num_channels, (a * odd_odd + slope * x11 + level).to(kind), mask=is_in_both)


@triton.jit
def _gather_window(g, places, at, inside):
    """Load the gradient of a window and the index of its maximum; -1, which is no pixel, for a missing window."""
    return tl.load(g + at, mask=inside, other=0.0).to(tl.float32), tl.load(places + at, mask=inside, other=-1)
