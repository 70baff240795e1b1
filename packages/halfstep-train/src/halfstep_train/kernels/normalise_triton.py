"""BatchNorm in training and the ReLU after it, in kernels that read a map as few times as possible.

    z = relu(y·scale + offset), scale = weight·inverse, offset = bias - mean·scale, inverse = 1/√(variance + eps)
    dy = scale·(g - Σg/n - (y - mean)·inverse²·Σg(y - mean)/n), g = dz where z > 0

Statistics need one pass over y, and z one more. In backward the sums need one pass over dz and y, and dy a second. The
variance comes from two plain sums, which read memory faster than Welford's update:

    s1 = Σ (y - shift), s2 = Σ (y - shift)²; mean = shift + s1/n; variance = s2/n - (s1/n)²

With shift 0 the difference cancels if |mean| ≫ deviation. So the shift is one value of the channel, which is near the
mean. The relative error of the variance is then about 2⁻²³ (1 + r²) times that of the summation, with r = |shift -
mean| / deviation, rarely above 3 however large the mean is. A NaN or infinity anywhere in a channel makes its variance
NaN, as with Welford. Vectors of channels and all sums are fp32.

Maps are channels_last, viewed as rows of channels, [num_rows, num_channels]. A tile is [ROWS, COLUMNS]: adjacent
threads hold adjacent channels, which are adjacent in memory. Kernels that sum keep two such tiles of sums and add up
their rows once, at the end. Each program writes [2, COLUMNS] to `partials`, and a `_finish` kernel adds those in a
fixed order, so that results are bit-identical in every run.

A program takes some channels of many rows: vectors of channels are loaded once, and sums stay in registers until the
end. Row strides are free, so that a map may be a slice of a wider one's channels. Offsets of a whole map can exceed 32
bits; those within a tile cannot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from halfstep_train.kernels.layout import get_row_stride

SUM_COLUMNS, SUM_WARPS = 64, 8
STATISTICS_ROWS, GRADIENT_ROWS = 64, 32
SUM_PROGRAMS = 4 * 132
"""Four per multiprocessor of an H200; more would lengthen the second sum, over programs. This and the tiles are the
fastest of those tried there on maps of 67 to 411 MB."""
MAP_COLUMNS, MAP_ROWS, MAP_TILES = 128, 32, 4
MAP_VALUES = 512  # values of a tile per warp: sixteen per thread
FINISH_VALUES, FINISH_WARPS = 8192, 8
"""How many of one sum's parts a program adds at once: all that `SUM_PROGRAMS` leave, in one round trip to memory."""


class Norm(NamedTuple):
    """The normalisation y·scale + offset of a raw map y; each field is [channels]."""

    mean: Tensor
    inverse: Tensor
    scale: Tensor
    offset: Tensor


class GradientSums(NamedTuple):
    """Sums over rows, each [channels], with g the gradient of y·scale + offset."""

    g: Tensor  # Σ g, the gradient of the bias
    gx: Tensor  # Σ g·(y - mean)
    weight: Tensor  # inverse·Σ g·(y - mean), the gradient of the weight


@triton.jit
def _partial_sums(
    y, dz, centre, scale, offset, partials,
    num_rows, num_channels, y_stride, dz_stride,
    IS_GRADIENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write this program's part of Σ d and Σ d², d = y - centre; or of Σ g and Σ g·d, g = dz where ReLU let z through.

    Reads each map once, from its end: what was written last is still in the cache, and what this kernel reads last, the
    beginning, is cached for the next one.
    """
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < num_channels
    middle = tl.load(centre + columns, is_channel, 0.0).to(tl.float32)
    if IS_GRADIENT:
        a, b = tl.load(scale + columns, is_channel, 0.0), tl.load(offset + columns, is_channel, 0.0)
    # Tiles, not vectors: rows are summed once after the loop, without a reduction across threads in each tile.
    first = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = tl.zeros([ROWS, COLUMNS], tl.float32)
    num_tiles = tl.cdiv(num_rows, ROWS)
    # Program p takes tiles p, p + N, p + 2N, ...: programs that run together read adjacent memory.
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tl.arange(0, ROWS)[:, None]
        # From the map's end: see the docstring.
        start = (num_tiles - 1 - tile) * ROWS
        inside = (start + row < num_rows) & is_channel[None, :]
        values = y + tl.cast(start, tl.int64) * y_stride + (row * y_stride + columns[None, :])
        value = tl.load(values, inside, 0.0).to(tl.float32)
        deviation = value - middle
        if IS_GRADIENT:
            gradients = dz + tl.cast(start, tl.int64) * dz_stride + (row * dz_stride + columns[None, :])
            g = tl.load(gradients, inside, 0.0).to(tl.float32)
            # The mask of ReLU is recomputed from y, so z is not read. NaN <= 0 is false: NaN passes.
            g = tl.where(value * a + b <= 0, 0.0, g)
            first += g
            second += g * deviation
        else:
            # Rows past the end loaded 0, whose deviation is -middle.
            deviation = tl.where(inside, deviation, 0.0)
            first += deviation
            second += deviation * deviation
    part = partials + tl.program_id(0) * 2 * num_channels + columns
    tl.store(part, tl.sum(first, 0), is_channel)
    tl.store(part + num_channels, tl.sum(second, 0), is_channel)


@triton.jit
def _add_partials(
    partials, kind, num_kinds, columns, num_parts, num_channels, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the sum over parts of one kind of sum, always in the same order."""
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        inside = (part < num_parts) & (columns < num_channels)[None, :]
        values = partials + (part * num_kinds + kind) * num_channels + columns[None, :]
        total += tl.sum(tl.load(values, inside, 0.0), 0)
    return total


@triton.jit
def _finish_plain(partials, totals, num_parts, num_channels, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write totals[kind] = Σ over parts; one program for some channels of one kind."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    kind, num_kinds = tl.program_id(1), tl.num_programs(1)
    total = _add_partials(partials, kind, num_kinds, columns, num_parts, num_channels, PARTS, COLUMNS)
    tl.store(totals + kind * num_channels + columns, total, columns < num_channels)


@triton.jit
def _finish_gradient(partials, inverse, sums, num_parts, num_channels, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write Σ g, Σ g·(y - mean), and the latter times inverse, which is the gradient of the weight."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < num_channels
    g = _add_partials(partials, 0, 2, columns, num_parts, num_channels, PARTS, COLUMNS)
    gx = _add_partials(partials, 1, 2, columns, num_parts, num_channels, PARTS, COLUMNS)
    tl.store(sums + columns, g, is_channel)
    tl.store(sums + num_channels + columns, gx, is_channel)
    tl.store(sums + 2 * num_channels + columns, gx * tl.load(inverse + columns, is_channel, 0.0), is_channel)


@triton.jit
def _finish_statistics(
    partials, shift, weight, bias, norm, running_mean, running_var, num_batches_tracked,
    num_parts, num_rows, num_channels, eps, momentum,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write mean, inverse (1 / standard deviation), scale and offset from the partial sums Σ d and Σ d², d = y - shift.

    Also updates the running statistics and their count of batches.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < num_channels
    count = tl.cast(num_rows, tl.float32)
    first = _add_partials(partials, 0, 2, columns, num_parts, num_channels, PARTS, COLUMNS) / count
    second = _add_partials(partials, 1, 2, columns, num_parts, num_channels, PARTS, COLUMNS) / count
    # `shift` is the map itself: its first row is what `_partial_sums` subtracted.
    mean = tl.load(shift + columns, is_channel, 0.0).to(tl.float32) + first
    # The shift is near the mean, so little cancels here (see the module docstring).
    variance = second - first * first
    variance = tl.where(variance < 0, 0.0, variance)  # `maximum` would turn NaN into 0
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = tl.load(weight + columns, is_channel, 0.0) * inverse
    tl.store(norm + columns, mean, is_channel)
    tl.store(norm + num_channels + columns, inverse, is_channel)
    tl.store(norm + 2 * num_channels + columns, scale, is_channel)
    tl.store(norm + 3 * num_channels + columns, tl.load(bias + columns, is_channel, 0.0) - mean * scale, is_channel)
    _move(running_mean + columns, mean, momentum, is_channel)
    # torch keeps the unbiased variance in running_var and normalises by the biased one.
    _move(running_var + columns, variance * (count / (count - 1)), momentum, is_channel)
    # There is one program per block of channels; one of them counts the batch.
    if tl.program_id(0) == 0:
        tl.store(num_batches_tracked, tl.load(num_batches_tracked) + 1)


@triton.jit
def _move(running, value, momentum, is_channel):
    """Move a running statistic towards the value of this batch."""
    before = tl.load(running, is_channel, 0.0)
    tl.store(running, before + momentum * (value - before), is_channel)


@triton.jit
def _normalised(
    y, scale, offset, out,
    num_rows, num_channels, y_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write out = relu(y·scale + offset): reads a value, writes a value."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < num_channels
    a, b = tl.load(scale + columns, is_channel, 0.0), tl.load(offset + columns, is_channel, 0.0)
    row = tl.arange(0, ROWS)[:, None]
    for tile in range(TILES):  # adjacent tiles, so that a program reads contiguous memory
        start = (tl.program_id(0) * TILES + tile) * ROWS
        inside = (start + row < num_rows) & is_channel[None, :]
        values = y + start.to(tl.int64) * y_stride + (row * y_stride + columns[None, :])
        z = tl.load(values, inside, 0.0).to(tl.float32) * a + b
        z = tl.where(z <= 0, 0.0, z)  # `maximum` would turn NaN into 0
        results = out + start.to(tl.int64) * out_stride + (row * out_stride + columns[None, :])
        tl.store(results, z.to(out.dtype.element_ty), inside)


@triton.jit
def _gradient_of_raw(
    g, y, mean, inverse, scale, offset, sum_g, sum_gx, dy,
    num_rows, num_channels, g_stride, y_stride,
    IS_MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Write dy = scale·(g - Σg/n - (y - mean)·inverse²·Σgx/n), dense: reads two values, writes one."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_channel = columns < num_channels
    middle, narrow = tl.load(mean + columns, is_channel, 0.0), tl.load(inverse + columns, is_channel, 0.0)
    a, b = tl.load(scale + columns, is_channel, 0.0), tl.load(offset + columns, is_channel, 0.0)
    count = tl.cast(num_rows, tl.float32)
    # Both means are per channel, so they are computed once per program.
    mean_g = tl.load(sum_g + columns, is_channel, 0.0) / count
    slope = tl.load(sum_gx + columns, is_channel, 0.0) / count * narrow * narrow
    row = tl.arange(0, ROWS)[:, None]
    for tile in range(TILES):
        start = (tl.program_id(0) * TILES + tile) * ROWS
        inside = (start + row < num_rows) & is_channel[None, :]
        # 64 bits for the start of the tile, 32 bits for offsets within it.
        far = start.to(tl.int64)
        value = tl.load(y + far * y_stride + (row * y_stride + columns[None, :]), inside, 0.0).to(tl.float32)
        gradient = tl.load(g + far * g_stride + (row * g_stride + columns[None, :]), inside, 0.0).to(tl.float32)
        # Without the mask, g has already passed the gradient of ReLU.
        if IS_MASKED:
            gradient = tl.where(value * a + b <= 0, 0.0, gradient)
        result = a * (gradient - mean_g - (value - middle) * slope)
        results = dy + far * num_channels + (row * num_channels + columns[None, :])
        tl.store(results, result.to(dy.dtype.element_ty), inside)


def compute_norm(y: Tensor, norm: nn.BatchNorm2d) -> Norm:
    """Return the normalisation by this batch's statistics, and update the running ones."""
    num_channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    if num_rows == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {y.shape}")
    partials = _sum_rows(y, y, y, y, y, is_gradient=False)
    result = torch.empty(4, num_channels, dtype=torch.float32, device=y.device)
    grid, blocks = _choose_finish_blocks(partials)
    _finish_statistics[grid](
        partials, y, norm.weight, norm.bias, result, norm.running_mean, norm.running_var, norm.num_batches_tracked,
        len(partials), num_rows, num_channels, norm.eps, norm.momentum, **blocks,
    )  # fmt: skip
    return Norm(*result)


def sum_gradients(dz: Tensor, y: Tensor, norm: Norm) -> GradientSums:
    """Return the sums for z = relu(y·scale + offset) with gradient dz, which may be a slice of a wider map's
    channels."""
    return finish_sums(_sum_rows(y, dz, norm.mean, norm.scale, norm.offset, is_gradient=True), norm)


def _sum_rows(y: Tensor, dz: Tensor, centre: Tensor, scale: Tensor, offset: Tensor, *, is_gradient: bool) -> Tensor:
    """Return partial sums over rows, [parts, 2, channels]: Σ d and Σ d², d = y - its first row; or Σ g and
    Σ g·(y - mean), g = dz where y·scale + offset > 0."""
    num_channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    columns, rows = choose_channel_block(num_channels), GRADIENT_ROWS if is_gradient else STATISTICS_ROWS
    num_blocks = triton.cdiv(num_channels, columns)
    num_parts = min(triton.cdiv(num_rows, rows), triton.cdiv(SUM_PROGRAMS, num_blocks))
    partials = torch.empty(num_parts, 2, num_channels, dtype=torch.float32, device=y.device)
    _partial_sums[(num_parts, num_blocks)](
        y, dz, centre, scale, offset, partials,
        num_rows, num_channels, get_row_stride(y), get_row_stride(dz),
        IS_GRADIENT=is_gradient, ROWS=rows, COLUMNS=columns, num_warps=SUM_WARPS,
    )  # fmt: skip
    return partials


def choose_channel_block(num_channels: int, most: int = SUM_COLUMNS) -> int:
    """Return the width of a tile."""
    return int(min(most, triton.next_power_of_2(num_channels)))


def finish_sums(partials: Tensor, norm: Norm) -> GradientSums:
    """Return the sums from partial Σ g and Σ g·(y - mean), [parts, 2, channels]."""
    sums = torch.empty(3, partials.shape[2], dtype=torch.float32, device=partials.device)
    grid, blocks = _choose_finish_blocks(partials)
    _finish_gradient[grid](partials, norm.inverse, sums, len(partials), partials.shape[2], **blocks)
    return GradientSums(*sums)


def combine_partials(partials: Tensor) -> Tensor:
    """Sum [parts, kinds, channels] over parts, always in the same order."""
    num_parts, num_kinds, num_channels = partials.shape
    totals = torch.empty(num_kinds, num_channels, dtype=torch.float32, device=partials.device)
    grid, blocks = _choose_finish_blocks(partials)
    _finish_plain[(*grid, num_kinds)](partials, totals, num_parts, num_channels, **blocks)
    return totals


def _choose_finish_blocks(partials: Tensor) -> tuple[tuple[int], dict[str, int]]:
    """Return grid and tile of the kernels that add [parts, kinds, channels] over parts."""
    num_parts, _, num_channels = partials.shape
    # At most an eighth of FINISH_VALUES, so that a tile can be 8 channels wide.
    parts = min(triton.next_power_of_2(num_parts), FINISH_VALUES // 8)
    columns = min(FINISH_VALUES // parts, choose_channel_block(num_channels))
    return (triton.cdiv(num_channels, columns),), {"PARTS": parts, "COLUMNS": columns, "num_warps": FINISH_WARPS}


def normalise(y: Tensor, norm: Norm, *, out: Tensor | None = None) -> Tensor:
    """Return relu(y·scale + offset); `out` may be a slice of the channels of a wider map."""
    num_channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    out = allocate_like(y) if out is None else out
    grid, blocks = _choose_map_blocks(num_rows, num_channels)
    strides = get_row_stride(y), get_row_stride(out)
    _normalised[grid](y, norm.scale, norm.offset, out, num_rows, num_channels, *strides, **blocks)
    return out


def compute_raw_gradient(g: Tensor, y: Tensor, norm: Norm, sums: GradientSums, *, masked: bool) -> Tensor:
    """Return dy; `masked` first zeroes g where y·scale + offset <= 0, as ReLU does. g may be a slice of a wider map."""
    num_channels, num_rows, dy = y.shape[1], y.numel() // y.shape[1], allocate_like(y)
    grid, blocks = _choose_map_blocks(num_rows, num_channels)
    strides = get_row_stride(g), get_row_stride(y)
    _gradient_of_raw[grid](
        g, y, *norm, sums.g, sums.gx, dy, num_rows, num_channels, *strides, IS_MASKED=masked, **blocks
    )
    return dy


def _choose_map_blocks(num_rows: int, num_channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = choose_channel_block(num_channels, MAP_COLUMNS)
    grid = (triton.cdiv(num_rows, MAP_ROWS * MAP_TILES), triton.cdiv(num_channels, columns))
    num_warps = max(MAP_ROWS * columns // MAP_VALUES, 1)
    return grid, {"ROWS": MAP_ROWS, "COLUMNS": columns, "TILES": MAP_TILES, "num_warps": num_warps}


def allocate_like(y: Tensor) -> Tensor:
    """Allocate a map of y's shape and dtype, channels_last, and dense even if y is a slice."""
    return torch.empty(y.shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
