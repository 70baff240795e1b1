"""Triton kernels of a U-Net's way up: the transposed 2×2 convolution at stride 2 as one matmul, in place.

Its input is a raw map y, normalised where it is read: z = relu(y * scale + offset) is never written. With C channels
out, the weights are [channels in, 4C]: column `tap * C + c` gives channel c of pixel `tap` of the 2×2 that a pixel
becomes. These lie in a slice of the channels of a wider map, at `first + (tap // 2) * row of pixels + tap % 2`, where
the kernels write them or gather their gradient: no copy of either is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.layout import row_stride
from halfstep.kernels.normalise import GradientSums, Norm, dense_like, finished_sums
from halfstep.kernels.upsample import corner

ROWS, COLUMNS, DEPTH = 128, 256, 64
"""A tile of the product, and how many terms are added at once."""
GRADIENT_COLUMNS = 128
"""Of the gradient's product, which has y beside it at the end: more would not stay in registers."""
WEIGHT_ROWS, WEIGHT_COLUMNS = 256, 128
NUM_WARPS, NUM_STAGES = 8, 3
WEIGHT_PROGRAMS = 132
"""One a multiprocessor of an H200, since a program's tiles fill its shared memory."""


@triton.jit
def _first_pixels(row, height, width, out_height, out_width, top, left):
    """The row, in the wider map, of the first of the 2×2 pixels."""
    line = row // width
    image = line // height
    return (image * out_height + top + 2 * (line % height)) * out_width + left + 2 * (row % width)


@triton.jit
def _tap_offsets(column, out_width, stride, CHANNELS: tl.constexpr):
    tap = column // CHANNELS
    return ((tap // 2) * out_width + tap % 2) * stride + column % CHANNELS


@triton.jit
def _activated(y, scale, offset):
    """relu(y * scale + offset) in y's dtype; NaN stays."""
    z = y.to(tl.float32) * scale[None, :] + offset[None, :]
    return tl.where(z <= 0, 0.0, z).to(y.dtype)


@triton.jit
def doubled_kernel(y, scale, offset, taps, bias, out, num_rows, depth, stride, height, width, out_height, out_width,
                   top, left, CHANNELS: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Reads y, writes four times as many pixels. Programs of the same rows follow each other: the cache has y."""
    across = tl.cdiv(4 * CHANNELS, BN)
    row = tl.program_id(0) // across * BM + tl.arange(0, BM)
    column = tl.program_id(0) % across * BN + tl.arange(0, BN)
    is_row, is_column = row < num_rows, column < 4 * CHANNELS
    at = (y + row.to(tl.int64) * depth)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        is_term = k < depth
        values = tl.load(at + k[None, :], mask=is_row[:, None] & is_term[None, :], other=0.0)
        a = tl.load(scale + k, mask=is_term, other=0.0)
        b = tl.load(offset + k, mask=is_term, other=0.0)
        weights = taps + k[:, None] * (4 * CHANNELS) + column[None, :]
        weights = tl.load(weights, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(_activated(values, a, b), weights, total, input_precision="ieee")
    total += tl.load(bias + column % CHANNELS, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first = _first_pixels(row, height, width, out_height, out_width, top, left).to(tl.int64)
    at = (out + first * stride)[:, None] + _tap_offsets(column, out_width, stride, CHANNELS)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def halved_kernel(dout, taps, y, mean, scale, offset, g, partials, num_rows, columns, stride, height, width, out_height,
                  out_width, top, left, CHANNELS: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The gradient of y * scale + offset: reads the gradient of four pixels and y, writes g and its sums over rows."""
    across = tl.cdiv(columns, BN)
    tile = tl.program_id(0) // across
    row = tile * BM + tl.arange(0, BM)
    column = tl.program_id(0) % across * BN + tl.arange(0, BN)
    is_row, is_column = row < num_rows, column < columns
    first = _first_pixels(row, height, width, out_height, out_width, top, left).to(tl.int64)
    at = (dout + first * stride)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, 4 * CHANNELS, BK):
        k = start + tl.arange(0, BK)
        is_term = k < 4 * CHANNELS
        gradient = tl.load(
            at + _tap_offsets(k, out_width, stride, CHANNELS)[None, :],
            mask=is_row[:, None] & is_term[None, :],
            other=0.0,
        )
        weights = taps + k[:, None] + column[None, :] * (4 * CHANNELS)
        weights = tl.load(weights, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(gradient, weights, total, input_precision="ieee")
    inside = is_row[:, None] & is_column[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(scale + column, mask=is_column, other=0.0)
    b = tl.load(offset + column, mask=is_column, other=0.0)
    mu = tl.load(mean + column, mask=is_column, other=0.0)
    total = tl.where(value * a[None, :] + b[None, :] <= 0, 0.0, total)
    tl.store(g + place, total.to(g.dtype.element_ty), mask=inside)
    part = partials + tile * 2 * columns + column
    tl.store(part, tl.sum(total, 0), mask=is_column)
    tl.store(part + columns, tl.sum(total * (value - mu[None, :]), 0), mask=is_column)


@triton.jit
def weight_parts_kernel(dout, y, scale, offset, partials, bias_partials, num_rows, columns, rows_each, stride, height,
                        width, out_height, out_width, top, left, CHANNELS: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A program's part of the gradients of taps and, for each tap, of the bias: reads y and four pixels' gradient."""
    tap = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    is_tap, is_column = tap < 4 * CHANNELS, column < columns
    a = tl.load(scale + column, mask=is_column, other=0.0)
    b = tl.load(offset + column, mask=is_column, other=0.0)
    pixels = dout + _tap_offsets(tap, out_width, stride, CHANNELS)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    # Sums over rows come from a product too, with ones: in registers the gradient is nowhere else needed.
    total_bias = tl.zeros((BM, 16), tl.float32)
    begin = tl.program_id(2) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    for start in range(begin, end, BK):
        row = start + tl.arange(0, BK)
        is_row = row < end
        first = _first_pixels(row, height, width, out_height, out_width, top, left).to(tl.int64)
        gradient = tl.load(pixels + (first * stride)[None, :], mask=is_tap[:, None] & is_row[None, :], other=0.0)
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        values = tl.load(y + place, mask=is_row[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(gradient, _activated(values, a, b), total, input_precision="ieee")
        total_bias = tl.dot(gradient, tl.full((BK, 16), 1.0, gradient.dtype), total_bias, input_precision="ieee")
    part = partials + tl.program_id(2).to(tl.int64) * columns * (4 * CHANNELS)
    at = part + column[None, :] * (4 * CHANNELS) + tap[:, None]
    tl.store(at, total, mask=is_tap[:, None] & is_column[None, :])
    bias_part = bias_partials + tl.program_id(2) * (4 * CHANNELS) + tap
    if tl.program_id(1) == 0:
        tl.store(bias_part, tl.sum(total_bias, 1) / 16, mask=is_tap)


def doubled(y: Tensor, norm: Norm, taps: Tensor, bias: Tensor, out: Tensor) -> None:
    """Writes relu(y normalised), transposedly convolved, into `out`, a slice of a map's channels."""
    num_rows, depth, channels = y.numel() // y.shape[1], y.shape[1], out.shape[1]
    columns = _tile(4 * channels, COLUMNS)
    doubled_kernel[(triton.cdiv(num_rows, ROWS) * triton.cdiv(4 * channels, columns),)](
        *(y, norm.scale, norm.offset, taps, bias, out, num_rows, depth, row_stride(out), *sizes_of(out, y)),
        CHANNELS=channels,
        BM=ROWS,
        BN=columns,
        BK=_tile(depth, DEPTH),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def doubled_gradient(dout: Tensor, y: Tensor, norm: Norm, taps: Tensor) -> tuple[Tensor, GradientSums]:
    """The gradient of y * scale + offset, zero where ReLU was, and its sums."""
    num_rows, columns, channels = y.numel() // y.shape[1], y.shape[1], dout.shape[1]
    g, num_tiles = dense_like(y), triton.cdiv(num_rows, ROWS)
    partials = y.new_empty((num_tiles, 2, columns), dtype=torch.float32)
    width = _tile(columns, GRADIENT_COLUMNS)
    halved_kernel[(num_tiles * triton.cdiv(columns, width),)](
        *(dout, taps, y, norm.mean, norm.scale, norm.offset, g, partials),
        *(num_rows, columns, row_stride(dout), *sizes_of(dout, y)),
        CHANNELS=channels,
        BM=ROWS,
        BN=width,
        BK=_tile(4 * channels, DEPTH),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return g, finished_sums(partials, norm)


def tap_gradients(dout: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The gradients of taps, [channels in, 4C], and of the bias."""
    num_rows, columns, channels = y.numel() // y.shape[1], y.shape[1], dout.shape[1]
    rows, width, depth = _tile(4 * channels, WEIGHT_ROWS), _tile(columns, WEIGHT_COLUMNS), _tile(num_rows, DEPTH)
    tiles = triton.cdiv(4 * channels, rows), triton.cdiv(columns, width)
    rows_each = triton.cdiv(num_rows, max(1, WEIGHT_PROGRAMS // (tiles[0] * tiles[1])) * depth) * depth
    num_parts = triton.cdiv(num_rows, rows_each)
    partials = y.new_empty((num_parts, columns, 4 * channels), dtype=torch.float32)
    bias_partials = y.new_empty((num_parts, 4, channels), dtype=torch.float32)
    weight_parts_kernel[(*tiles, num_parts)](
        *(dout, y, norm.scale, norm.offset, partials, bias_partials),
        *(num_rows, columns, rows_each, row_stride(dout), *sizes_of(dout, y)),
        CHANNELS=channels,
        BM=rows,
        BN=width,
        BK=depth,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return partials.sum(0), bias_partials.sum((0, 1))


def sizes_of(half: Tensor, y: Tensor) -> tuple[int, ...]:
    """Height and width of y and of the map that gets it doubled, and where in the latter it begins."""
    return *y.shape[2:], *half.shape[2:], *corner(half, y)


def _tile(size: int, most: int) -> int:
    """Of a side this long: a power of two, as every product needs it at least 16."""
    return int(min(max(16, triton.next_power_of_2(size)), most))
