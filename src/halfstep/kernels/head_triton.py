"""Triton kernels of a U-Net's end: normalise, ReLU and the 1×1 convolution to a few logits in one pass over the map.

The normalised map is never written. A tile is [rows, all channels]; classes are few, so a program walks over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.kernels.normalise import GradientSums, Norm, combined, dense_like

TILE_VALUES = 4096
NUM_WARPS = 4
NUM_PROGRAMS = 132 * 8
DOT_CLASSES = tl.constexpr(16)
"""Fewest rows of a matrix product: classes are filled up with zeros."""


@triton.jit
def _map_tile(y, scale, offset, start, num_rows, channels, columns, is_channel, ROWS: tl.constexpr):
    """Rows of y and of relu(y * scale + offset), in fp32, the latter rounded as a stored map would be; NaN stays."""
    row = start + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None] & is_channel[None, :]
    value = tl.load((y + row.to(tl.int64) * channels)[:, None] + columns[None, :], mask=inside, other=0.0)
    value = value.to(tl.float32)
    z = value * scale[None, :] + offset[None, :]
    return value, tl.where(z <= 0, 0.0, z).to(y.dtype.element_ty).to(tl.float32), row, inside


@triton.jit
def _pixel_offsets(row, height, width, n_stride, h_stride, w_stride):
    """Where a row's pixel lies in a map of any strides."""
    line = row // width
    image = (line // height).to(tl.int64)
    return image * n_stride + (line % height) * h_stride + (row % width) * w_stride


@triton.jit
def _map_gradient(dlogits, weight, pixel, row, num_rows, k_stride, channels, columns, is_channel,
                  CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """The gradient of the normalised map: a few outer products."""
    dz = tl.zeros((ROWS, COLS), tl.float32)
    for k in tl.static_range(CLASSES):
        dlogit = tl.load(dlogits + pixel + k * k_stride, mask=row < num_rows, other=0.0).to(tl.float32)
        w = tl.load(weight + k * channels + columns, mask=is_channel, other=0.0).to(tl.float32)
        dz += dlogit[:, None] * w[None, :]
    return dz


@triton.jit
def logits_kernel(y, scale, offset, weight, bias, out, num_rows, channels,
                  CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Reads y, writes logits."""
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a = tl.load(scale + columns, mask=is_channel, other=0.0)
    b = tl.load(offset + columns, mask=is_channel, other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        _, z, row, _ = _map_tile(y, a, b, tile * ROWS, num_rows, channels, columns, is_channel, ROWS)
        for k in tl.static_range(CLASSES):
            w = tl.load(weight + k * channels + columns, mask=is_channel, other=0.0).to(tl.float32)
            logit = tl.sum(z * w[None, :], 1) + tl.load(bias + k).to(tl.float32)
            tl.store(out + row.to(tl.int64) * CLASSES + k, logit.to(out.dtype.element_ty), mask=row < num_rows)


@triton.jit
def head_sums_kernel(y, dlogits, mean, scale, offset, weight, partials, bias_partials, num_rows, channels, height,
                     width, n_stride, k_stride, h_stride, w_stride,
                     CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Reads y and the logits' gradient; writes each program's sums of g, of g * (y - mean) and of dlogits * z."""
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a = tl.load(scale + columns, mask=is_channel, other=0.0)
    b = tl.load(offset + columns, mask=is_channel, other=0.0)
    mu = tl.load(mean + columns, mask=is_channel, other=0.0)
    classes = tl.arange(0, DOT_CLASSES)
    sum_g, sum_gx = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    dweight = tl.zeros((DOT_CLASSES, COLS), tl.float32)
    dbias = tl.zeros((DOT_CLASSES, ROWS), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        value, z, row, _ = _map_tile(y, a, b, tile * ROWS, num_rows, channels, columns, is_channel, ROWS)
        pixel = _pixel_offsets(row, height, width, n_stride, h_stride, w_stride)
        dz = _map_gradient(
            dlogits, weight, pixel, row, num_rows, k_stride, channels, columns, is_channel,
            CLASSES, ROWS, COLS)  # fmt: skip
        g = tl.where(z > 0, dz, 0.0)
        sum_g += g
        sum_gx += g * (value - mu[None, :])
        turned = tl.load(
            dlogits + pixel[None, :] + classes[:, None] * k_stride,
            mask=(classes < CLASSES)[:, None] & (row < num_rows)[None, :],
            other=0.0,
        )
        dweight = tl.dot(turned, z.to(turned.dtype), dweight, input_precision="ieee")
        dbias += turned.to(tl.float32)
    at = partials + tl.program_id(0) * (2 + CLASSES) * channels + columns
    tl.store(at, tl.sum(sum_g, 0), mask=is_channel)
    tl.store(at + channels, tl.sum(sum_gx, 0), mask=is_channel)
    at = at[None, :] + (2 + classes[:, None]) * channels
    tl.store(at, dweight, mask=(classes < CLASSES)[:, None] & is_channel[None, :])
    tl.store(bias_partials + tl.program_id(0) * CLASSES + classes, tl.sum(dbias, 1), mask=classes < CLASSES)


@triton.jit
def head_gradient_kernel(y, dlogits, mean, inverse, scale, offset, weight, sum_g, sum_gx, out, num_rows, channels,
                         height, width, n_stride, k_stride, h_stride, w_stride,
                         CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Reads y and the logits' gradient, writes the gradient of y."""
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a = tl.load(scale + columns, mask=is_channel, other=0.0)
    b = tl.load(offset + columns, mask=is_channel, other=0.0)
    mu = tl.load(mean + columns, mask=is_channel, other=0.0)[None, :]
    slope = tl.load(inverse + columns, mask=is_channel, other=0.0)
    slope = (slope * slope * tl.load(sum_gx + columns, mask=is_channel, other=0.0) / num_rows)[None, :]
    level = (tl.load(sum_g + columns, mask=is_channel, other=0.0) / num_rows)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        value, z, row, inside = _map_tile(y, a, b, tile * ROWS, num_rows, channels, columns, is_channel, ROWS)
        pixel = _pixel_offsets(row, height, width, n_stride, h_stride, w_stride)
        dz = _map_gradient(
            dlogits, weight, pixel, row, num_rows, k_stride, channels, columns, is_channel,
            CLASSES, ROWS, COLS)  # fmt: skip
        dy = a[None, :] * (tl.where(z > 0, dz, 0.0) - level - (value - mu) * slope)
        at = (out + row.to(tl.int64) * channels)[:, None] + columns[None, :]
        tl.store(at, dy.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How rows are cut: programs, each of which walks over tiles of rows with all channels."""

    num_rows: int
    rows: int
    columns: int
    programs: int


def tiles_of(y: Tensor) -> Tiles:
    """The cut for this map."""
    num_rows, columns = y.numel() // y.shape[1], max(16, triton.next_power_of_2(y.shape[1]))
    rows = min(TILE_VALUES // columns, 128)
    return Tiles(num_rows, rows, columns, min(triton.cdiv(num_rows, rows), NUM_PROGRAMS))


def logits(y: Tensor, norm: Norm, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(y normalised) times the kernel [classes, channels], plus the bias."""
    n, channels, height, width = y.shape
    classes, tiles = len(weight), tiles_of(y)
    out = torch.empty((n, classes, height, width), dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
    logits_kernel[(tiles.programs,)](
        *(y, norm.scale, norm.offset, weight, bias, out, tiles.num_rows, channels),
        CLASSES=classes,
        ROWS=tiles.rows,
        COLS=tiles.columns,
        num_warps=NUM_WARPS,
    )
    return out


def head_sums(y: Tensor, dlogits: Tensor, norm: Norm, weight: Tensor) -> tuple[GradientSums, Tensor, Tensor]:
    """The sums that BatchNorm's gradient needs, and the gradients of kernel and bias."""
    channels, height, width = y.shape[1:]
    classes, tiles = len(weight), tiles_of(y)
    partials = y.new_empty((tiles.programs, 2 + classes, channels), dtype=torch.float32)
    bias_partials = y.new_empty((tiles.programs, classes), dtype=torch.float32)
    head_sums_kernel[(tiles.programs,)](
        *(y, dlogits, norm.mean, norm.scale, norm.offset, weight, partials, bias_partials),
        *(tiles.num_rows, channels, height, width, *dlogits.stride()),
        CLASSES=classes,
        ROWS=tiles.rows,
        COLS=tiles.columns,
        num_warps=NUM_WARPS,
    )
    total = combined(partials)
    return GradientSums(total[0], total[1], total[1] * norm.inverse), total[2:], combined(bias_partials[:, None])[0]


def head_gradient(y: Tensor, dlogits: Tensor, norm: Norm, weight: Tensor, sums: GradientSums) -> Tensor:
    """The gradient of y."""
    channels, height, width = y.shape[1:]
    tiles, out = tiles_of(y), dense_like(y)
    head_gradient_kernel[(tiles.programs,)](
        *(y, dlogits, norm.mean, norm.inverse, norm.scale, norm.offset, weight, sums.g, sums.gx, out),
        *(tiles.num_rows, channels, height, width, *dlogits.stride()),
        CLASSES=len(weight),
        ROWS=tiles.rows,
        COLS=tiles.columns,
        num_warps=NUM_WARPS,
    )
    return out
