"""The Triton kernels of BatchNorm and ReLU on channels_last maps, viewed as rows of channels, [num_rows, num_channels].

A tile is [ROWS, COLUMNS]: adjacent threads hold adjacent channels, which are adjacent in memory. Kernels that sum keep
two such tiles of sums and add up their rows once, at the end. Each program writes [2, COLUMNS] to `partials`, and a
`_finish` kernel adds those in a fixed order, so that results are bit-identical in every run.

A program takes some channels of many rows: vectors of channels are loaded once, and sums stay in registers until the
end. Row strides are free, so that a map may be a slice of a wider one's channels. Offsets of a whole map can exceed 32
bits; those within a tile cannot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    # The shift is near the mean, so little cancels here (see normalise.py).
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


def sum_statistics(y: Tensor) -> Tensor:
    """Return partial Σ d and Σ d² over rows, [parts, 2, channels]; d = y - its first row."""
    return _launch_sums(y, y, y, y, y, is_gradient=False)


def sum_gradient_parts(dz: Tensor, y: Tensor, mean: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Return partial Σ g and Σ g·(y - mean) over rows, [parts, 2, channels]; g = dz where y·scale + offset > 0."""
    return _launch_sums(y, dz, mean, scale, offset, is_gradient=True)


def _launch_sums(y: Tensor, dz: Tensor, centre: Tensor, scale: Tensor, offset: Tensor, *, is_gradient: bool) -> Tensor:
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


def finish_plain(partials: Tensor, totals: Tensor) -> None:
    """Write totals [kinds, channels]: the sum of partials [parts, kinds, channels]."""
    num_parts, num_kinds, num_channels = partials.shape
    blocks = _choose_finish_blocks(num_parts, num_channels)
    grid = (triton.cdiv(num_channels, blocks["COLUMNS"]), num_kinds)
    _finish_plain[grid](partials, totals, num_parts, num_channels, **blocks)


def finish_gradient(partials: Tensor, inverse: Tensor, sums: Tensor) -> None:
    """Write sums [3, channels]: Σ g, Σ gx, inverse·Σ gx."""
    num_parts, _, num_channels = partials.shape
    blocks = _choose_finish_blocks(num_parts, num_channels)
    grid = (triton.cdiv(num_channels, blocks["COLUMNS"]),)
    _finish_gradient[grid](partials, inverse, sums, num_parts, num_channels, **blocks)


def finish_statistics(partials: Tensor, y: Tensor, norm: torch.nn.BatchNorm2d, result: Tensor) -> None:
    """Write result [4, channels]: mean, inverse, scale, offset; and update the running statistics of `norm`."""
    num_parts, _, num_channels = partials.shape
    blocks = _choose_finish_blocks(num_parts, num_channels)
    grid = (triton.cdiv(num_channels, blocks["COLUMNS"]),)
    _finish_statistics[grid](
        partials, y, norm.weight, norm.bias, result, norm.running_mean, norm.running_var, norm.num_batches_tracked,
        num_parts, y.numel() // num_channels, num_channels, norm.eps, norm.momentum, **blocks,
    )  # fmt: skip


def _choose_finish_blocks(num_parts: int, num_channels: int) -> dict[str, int]:
    # At most an eighth of FINISH_VALUES, so that a tile can be 8 channels wide.
    parts = min(triton.next_power_of_2(num_parts), FINISH_VALUES // 8)
    columns = min(FINISH_VALUES // parts, choose_channel_block(num_channels))
    return {"PARTS": parts, "COLUMNS": columns, "num_warps": FINISH_WARPS}


def normalise(y: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
    """Write out = relu(y·scale + offset)."""
    num_channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    grid, blocks = _choose_map_blocks(num_rows, num_channels)
    _normalised[grid](y, scale, offset, out, num_rows, num_channels, get_row_stride(y), get_row_stride(out), **blocks)


def compute_raw_gradient(
    g: Tensor, y: Tensor, norm: tuple[Tensor, ...], sums: tuple[Tensor, Tensor], dy: Tensor, *, is_masked: bool
) -> None:
    """Write dy of a dense map; norm holds mean, inverse, scale and offset, sums hold Σ g and Σ gx."""
    num_channels, num_rows = y.shape[1], y.numel() // y.shape[1]
    grid, blocks = _choose_map_blocks(num_rows, num_channels)
    strides = get_row_stride(g), get_row_stride(y)
    _gradient_of_raw[grid](g, y, *norm, *sums, dy, num_rows, num_channels, *strides, IS_MASKED=is_masked, **blocks)


def _choose_map_blocks(num_rows: int, num_channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    columns = choose_channel_block(num_channels, MAP_COLUMNS)
    grid = (triton.cdiv(num_rows, MAP_ROWS * MAP_TILES), triton.cdiv(num_channels, columns))
    num_warps = max(MAP_ROWS * columns // MAP_VALUES, 1)
    return grid, {"ROWS": MAP_ROWS, "COLUMNS": columns, "TILES": MAP_TILES, "num_warps": num_warps}
