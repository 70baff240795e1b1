"""The Triton kernels of GroupNorm and SiLU on channels_last maps, viewed as rows of channels for each image.

x is [images, num_rows, num_channels]. A tile is [ROWS, COLUMNS] of one image. Sums over an image's rows are first
partial sums over ROWS rows, which one program per group adds in a fixed order, so that results are bit-identical in
every run. A partial sum holds its own mean and the squares around it: nothing cancels if a map's mean is large.

Normalising a channel is z = A·(x - mean) + B; `table` [images, 5, num_channels] holds A, B, mean, 1 / deviation and the
mean of x̂ over the image. `added` [images, num_channels] is added to x first: it only shifts means, so x + added is
never written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, WARPS = 64, 64, 4
PARTS = 32  # partial sums that a group's program adds at once
MOST_PARTS = 256  # partial sums over all rows: enough programs to fill the device, few enough to add quickly
FIELDS = tl.constexpr(5)  # rows of `table` and of the gradient's sums


@triton.jit
def _locate_tile(num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the channels of a tile, a mask of its values that exist, and their offsets in the map."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_rows)[:, None] & (column < num_channels)[None, :]
    # int64: offsets of a whole map can exceed 32 bits.
    image = tl.program_id(2).to(tl.int64)
    return column, inside, (image * num_rows + row)[:, None] * num_channels + column[None, :]


@triton.jit
def _load_channels(table, field, column, num_channels):
    """Load one field of the table for these channels of this program's image."""
    base = (tl.program_id(2) * FIELDS + field) * num_channels
    return tl.load(table + base + column, column < num_channels, 0.0)[None, :]


@triton.jit
def _group_parts(x, parts, num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write the mean of each channel over these rows, and Σ (x - mean)²."""
    column, inside, at = _locate_tile(num_rows, num_channels, ROWS, COLUMNS)
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    # The last tile of an image may have fewer rows. Missing ones were loaded as 0: the sum stays right.
    count = tl.minimum(ROWS, num_rows - tl.program_id(0) * ROWS).to(tl.float32)
    mean = tl.sum(value, 0) / count
    # Masked again: a missing value, loaded as 0, would deviate by -mean.
    deviation = tl.where(inside, value - mean[None, :], 0.0)
    part = parts + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * 2 * num_channels + column
    tl.store(part, mean, column < num_channels)
    tl.store(part + num_channels, tl.sum(deviation * deviation, 0), column < num_channels)


@triton.jit
def _group_table(
    parts, weight, bias, added, scale, shift, table, num_parts, num_rows, num_channels, channels_each, eps,
    IS_ADDED: tl.constexpr, IS_SCALED: tl.constexpr, PART_ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the table of one group of one image from partial sums; z = x̂·w·(1 + scale) + b·(1 + scale) + shift."""
    image, lane = tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    column, is_channel = tl.program_id(0) * channels_each + lane, lane < channels_each
    base = parts + image * num_parts * 2 * num_channels
    total, before = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    if IS_ADDED:
        before = tl.load(added + image * num_channels + column, is_channel, 0.0).to(tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < num_parts)[:, None] & is_channel[None, :]
        count = tl.maximum(tl.minimum(PART_ROWS, num_rows - part * PART_ROWS), 0).to(tl.float32)
        means = tl.load(base + part[:, None] * 2 * num_channels + column[None, :], inside, 0.0)
        # Weighted by their number of rows: the last part of an image may be shorter.
        total += tl.sum(means * count[:, None], 0)
    # `added` shifts the mean of a channel and leaves the squares around it unchanged.
    number, average = tl.cast(num_rows * channels_each, tl.float32), total / num_rows + before
    mean = tl.sum(tl.where(is_channel, average, 0.0), 0) / channels_each
    squares = 0.0
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < num_parts)[:, None] & is_channel[None, :]
        count = tl.maximum(tl.minimum(PART_ROWS, num_rows - part * PART_ROWS), 0).to(tl.float32)
        place = base + part[:, None] * 2 * num_channels + column[None, :]
        # Chan's formula: squares around the group's mean = squares around each part's mean + count · (difference of
        # means)².
        off = tl.where(inside, tl.load(place, inside, 0.0) + before[None, :] - mean, 0.0)
        squares += tl.sum(tl.sum(tl.load(place + num_channels, inside, 0.0) + off * off * count[:, None], 1), 0)
    inverse = 1.0 / tl.sqrt(squares / number + eps)
    w = tl.load(weight + column, is_channel, 0.0).to(tl.float32)
    b = tl.load(bias + column, is_channel, 0.0).to(tl.float32)
    if IS_SCALED:
        # Fold scale and shift into weight and bias, so that the map is normalised by A and B alone.
        factor = 1.0 + tl.load(scale + image * num_channels + column, is_channel, 0.0).to(tl.float32)
        b = b * factor + tl.load(shift + image * num_channels + column, is_channel, 0.0).to(tl.float32)
        w = w * factor
    row = table + image * FIELDS * num_channels + column
    tl.store(row, inverse * w, is_channel)
    tl.store(row + num_channels, b, is_channel)
    # x + added - mean = x - (mean - added): the addition is folded into the stored mean.
    tl.store(row + 2 * num_channels, mean - before, is_channel)
    tl.store(row + 3 * num_channels, inverse + tl.zeros([WIDTH], tl.float32), is_channel)
    tl.store(row + 4 * num_channels, (average - mean) * inverse, is_channel)


@triton.jit
def _group_silu(x, table, y, num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write y = silu(A·(x - mean) + B)."""
    column, inside, at = _locate_tile(num_rows, num_channels, ROWS, COLUMNS)
    a = _load_channels(table, 0, column, num_channels)
    b = _load_channels(table, 1, column, num_channels)
    z = (tl.load(x + at, inside, 0.0).to(tl.float32) - _load_channels(table, 2, column, num_channels)) * a + b
    tl.store(y + at, (z * tl.sigmoid(z)).to(y.dtype.element_ty), inside)


@triton.jit
def _undo_silu(x, dy, table, at, inside, column, num_channels):
    """Return dz and x̂, recomputed from x."""
    deviation = tl.load(x + at, inside, 0.0).to(tl.float32) - _load_channels(table, 2, column, num_channels)
    a = _load_channels(table, 0, column, num_channels)
    z = deviation * a + _load_channels(table, 1, column, num_channels)
    s = tl.sigmoid(z)
    # d silu(z) / dz = s (1 + z (1 - s)) with s = sigmoid(z).
    dz = tl.load(dy + at, inside, 0.0).to(tl.float32) * s * (1.0 + z * (1.0 - s))
    return dz, deviation * _load_channels(table, 3, column, num_channels), a


@triton.jit
def _group_gradient_parts(x, dy, table, parts, num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write Σ dz and Σ dz·x̂ of each channel over these rows."""
    column, inside, at = _locate_tile(num_rows, num_channels, ROWS, COLUMNS)
    dz, unit, _ = _undo_silu(x, dy, table, at, inside, column, num_channels)
    dz = tl.where(inside, dz, 0.0)
    part = parts + (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * 2 * num_channels + column
    tl.store(part, tl.sum(dz, 0), column < num_channels)
    tl.store(part + num_channels, tl.sum(dz * unit, 0), column < num_channels)


@triton.jit
def _group_gradient_table(
    parts, table, sums, num_parts, num_rows, num_channels, channels_each, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute sums [images, 5, num_channels] from partial sums.

    Σ dz and Σ dz·x̂ of each channel; the group's means of w·dz and of w·dz·x̂ times 1 / deviation, which are subtracted
    from dx; and Σ dx of each channel.
    """
    image, lane = tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    column, is_channel = tl.program_id(0) * channels_each + lane, lane < channels_each
    base = parts + image * num_parts * 2 * num_channels
    first, second = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < num_parts)[:, None] & is_channel[None, :]
        place = base + part[:, None] * 2 * num_channels + column[None, :]
        first += tl.sum(tl.load(place, inside, 0.0), 0)
        second += tl.sum(tl.load(place + num_channels, inside, 0.0), 0)
    # A is w / deviation already.
    at = table + image * FIELDS * num_channels + column
    a, unit = tl.load(at, is_channel, 0.0), tl.load(at + 4 * num_channels, is_channel, 0.0)
    number, none = tl.cast(num_rows * channels_each, tl.float32), tl.zeros([WIDTH], tl.float32)
    # Means over the group, subtracted later: dx = A·dz - flat - x̂·along.
    flat, along = tl.sum(a * first, 0) / number, tl.sum(a * second, 0) / number
    row = sums + image * FIELDS * num_channels + column
    tl.store(row, first, is_channel)
    tl.store(row + num_channels, second, is_channel)
    tl.store(row + 2 * num_channels, flat + none, is_channel)
    tl.store(row + 3 * num_channels, along + none, is_channel)
    # Σ dx over rows, the gradient of `added`: Σ x̂ over rows is num_rows · unit, so dx need not be read for it.
    tl.store(row + 4 * num_channels, a * first - num_rows * (flat + along * unit), is_channel)


@triton.jit
def _group_gradient(x, dy, table, sums, dx, num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write dx = A·dz minus the group's means."""
    column, inside, at = _locate_tile(num_rows, num_channels, ROWS, COLUMNS)
    dz, unit, a = _undo_silu(x, dy, table, at, inside, column, num_channels)
    found = (
        dz * a - _load_channels(sums, 2, column, num_channels) - unit * _load_channels(sums, 3, column, num_channels)
    )
    tl.store(dx + at, found.to(dx.dtype.element_ty), inside)


def _get_sizes(x: Tensor) -> tuple[int, int, int]:
    images, channels, height, width = x.shape
    return images, height * width, channels


def _make_grid(x: Tensor) -> tuple[int, int, int]:
    images, rows, channels = _get_sizes(x)
    return triton.cdiv(rows, ROWS), triton.cdiv(channels, COLUMNS), images


def normalise_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    y: Tensor,
    groups: int,
    eps: float,
) -> Tensor:
    """Write y, and return the table that its gradient needs."""
    (images, rows, channels), grid = _get_sizes(x), _make_grid(x)
    parts = torch.empty(images, grid[0], 2, channels, device=x.device, dtype=torch.float32)
    table = torch.empty(images, FIELDS.value, channels, device=x.device, dtype=torch.float32)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    _group_parts[grid](x, parts, rows, channels, **tile)
    each = channels // groups
    _group_table[(groups, images)](
        # The kernel does not read absent tensors, but needs an argument: bias takes their place.
        parts, weight, bias, *(bias if one is None else one for one in (added, scale, shift)), table,
        grid[0], rows, channels, each, eps, IS_ADDED=added is not None, IS_SCALED=scale is not None,
        PART_ROWS=ROWS, PARTS=PARTS, WIDTH=triton.next_power_of_2(each), num_warps=WARPS,
    )  # fmt: skip
    _group_silu[grid](x, table, y, rows, channels, **tile)
    return table


def recompute_silu(x: Tensor, table: Tensor, y: Tensor) -> None:
    """Write y again for backward."""
    (_, rows, channels), grid = _get_sizes(x), _make_grid(x)
    _group_silu[grid](x, table, y, rows, channels, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def compute_gradient(x: Tensor, dy: Tensor, table: Tensor, dx: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Write dx, and return Σ dz, Σ dz·x̂ and Σ dx, each [images, channels]."""
    (images, rows, channels), grid = _get_sizes(x), _make_grid(x)
    parts = torch.empty(images, grid[0], 2, channels, device=x.device, dtype=torch.float32)
    sums = torch.empty(images, FIELDS.value, channels, device=x.device, dtype=torch.float32)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": WARPS}
    _group_gradient_parts[grid](x, dy, table, parts, rows, channels, **tile)
    each = channels // groups
    _group_gradient_table[(groups, images)](
        parts, table, sums, grid[0], rows, channels, each,
        PARTS=PARTS, WIDTH=triton.next_power_of_2(each), num_warps=WARPS,
    )  # fmt: skip
    _group_gradient[grid](x, dy, table, sums, dx, rows, channels, **tile)
    return sums[:, 0], sums[:, 1], sums[:, 4]


@triton.jit
def _add_branch(x, branch, bias, y, num_rows, num_channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write y = x + branch + bias."""
    column, inside, at = _locate_tile(num_rows, num_channels, ROWS, COLUMNS)
    found = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(branch + at, inside, 0.0).to(tl.float32)
    found += tl.load(bias + column, column < num_channels, 0.0).to(tl.float32)[None, :]
    tl.store(y + at, found.to(y.dtype.element_ty), inside)


@triton.jit
def _row_sums(dy, parts, num_rows, num_channels, turns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write Σ dy of each channel over `turns` times ROWS rows; the rows of all images count as one map."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # A tile of sums, reduced over rows once at the end and not across threads in each turn.
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for turn in range(turns):
        row = (tl.program_id(0) * turns + turn).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < num_channels)[None, :]
        total += tl.load(dy + row[:, None] * num_channels + column[None, :], inside, 0.0).to(tl.float32)
    tl.store(parts + tl.program_id(0) * num_channels + column, tl.sum(total, 0), column < num_channels)


def add_branch(x: Tensor, branch: Tensor, bias: Tensor, y: Tensor) -> None:
    """Write y = x + branch + bias."""
    (_, rows, channels), grid = _get_sizes(x), _make_grid(x)
    _add_branch[grid](x, branch, bias, y, rows, channels, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)


def sum_channels(dy: Tensor) -> Tensor:
    """Return the sum over images and rows, in fp32."""
    images, rows, channels = _get_sizes(dy)
    turns = max(1, triton.cdiv(images * rows, ROWS * MOST_PARTS))
    num_parts = triton.cdiv(images * rows, ROWS * turns)
    parts = torch.empty(num_parts, channels, device=dy.device, dtype=torch.float32)
    grid = (num_parts, triton.cdiv(channels, COLUMNS))
    _row_sums[grid](dy, parts, images * rows, channels, turns, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS)
    return parts.sum(0)
