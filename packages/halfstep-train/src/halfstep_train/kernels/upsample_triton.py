"""Triton kernels of a U-Net's decoder: the transposed 2×2 convolution at stride 2 as one matmul, in place.

With C output channels, the weights are [channels in, 4C]: column `tap * C + c` gives channel c of pixel `tap` in the
2×2 pixels that one pixel becomes. These pixels are in a slice of the channels of a wider map, at `first + (tap // 2) *
row of pixels + tap % 2`, where the kernels write them or gather their gradient: neither is copied. Sides are
compile-time constants: otherwise divisions by them would take as long as the products.

Tiles of each product are [BM, BK] × [BK, BN], summed in [BM, BN] in fp32. Forward: BM pixels of z, BN of the 4C
columns, BK input channels. Gradient of z: BM pixels, BN input channels, BK of the 4C. Gradient of the taps: BM of the
4C, BN input channels, BK pixels; the pixels are divided among programs, since the result alone has too few tiles to
fill a GPU, and the partial results are summed later.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep_train.kernels.layout import get_row_stride
from halfstep_train.kernels.normalise_triton import allocate_like


class UpsampleBlocks(NamedTuple):
    """The tile sizes of a product, and how many terms are added at once."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


DOUBLED = UpsampleBlocks(128, 128, 64, warps=4, stages=3)
"""Two programs share a multiprocessor: one computes while the other reads or writes."""
HALVED = UpsampleBlocks(128, 256, 64, warps=8, stages=3)
WEIGHTS = UpsampleBlocks(128, 256, 64, warps=8, stages=4)
WEIGHT_PROGRAMS = 132  # one per multiprocessor of an H200, since a program's tiles fill its shared memory
EXACT = UpsampleBlocks(32, 32, 32, warps=4, stages=3)
"""Tiles for fp32, which no matrix unit multiplies: larger tiles become code that takes minutes to compile."""


@triton.jit
def _locate_first_pixels(
    row, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Return the row, in the wider map, of the first of the 2×2 pixels."""
    line = row // WIDTH
    image = line // HEIGHT
    return ((image * OUT_HEIGHT + TOP + 2 * (line % HEIGHT)) * OUT_WIDTH + LEFT + 2 * (row % WIDTH)).to(tl.int64)


@triton.jit
def _compute_tap_offsets(column, stride, CHANNELS: tl.constexpr, OUT_WIDTH: tl.constexpr):
    """Return the offsets of the 4C columns from the first of their 2×2 pixels."""
    tap = column // CHANNELS
    return ((tap // 2) * OUT_WIDTH + tap % 2) * stride + column % CHANNELS


@triton.jit
def doubled_kernel(z, taps, bias, out, num_rows, depth, stride, CHANNELS: tl.constexpr,
                   HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
                   TOP: tl.constexpr, LEFT: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Read z and write four times as many pixels. Programs of the same rows are adjacent, so z is in the cache."""
    across = tl.cdiv(4 * CHANNELS, BN)
    row = tl.program_id(0) // across * BM + tl.arange(0, BM)
    column = tl.program_id(0) % across * BN + tl.arange(0, BN)
    is_row, is_column = row < num_rows, column < 4 * CHANNELS
    at = (z + row.to(tl.int64) * depth)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        k = start + tl.arange(0, BK)
        values = tl.load(at + k[None, :], mask=is_row[:, None] & (k < depth)[None, :], other=0.0)
        weights = taps + k[:, None] * (4 * CHANNELS) + column[None, :]
        weights = tl.load(weights, mask=(k < depth)[:, None] & is_column[None, :], other=0.0)
        # "ieee" concerns fp32 maps: their operands are not rounded to TF32.
        total = tl.dot(values, weights, total, input_precision="ieee")
    total += tl.load(bias + column % CHANNELS, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first = _locate_first_pixels(row, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, TOP, LEFT)
    at = (out + first * stride)[:, None] + _compute_tap_offsets(column, stride, CHANNELS, OUT_WIDTH)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def halved_kernel(dout, taps, dz, num_rows, columns, stride, CHANNELS: tl.constexpr,
                  HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
                  TOP: tl.constexpr, LEFT: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Read the gradient of four pixels, and write that of z."""
    across = tl.cdiv(columns, BN)
    row = tl.program_id(0) // across * BM + tl.arange(0, BM)
    column = tl.program_id(0) % across * BN + tl.arange(0, BN)
    is_row, is_column = row < num_rows, column < columns
    first = _locate_first_pixels(row, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, TOP, LEFT)
    at = (dout + first * stride)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, 4 * CHANNELS, BK):
        k = start + tl.arange(0, BK)
        is_term = k < 4 * CHANNELS
        pixels = at + _compute_tap_offsets(k, stride, CHANNELS, OUT_WIDTH)[None, :]
        gradient = tl.load(pixels, mask=is_row[:, None] & is_term[None, :], other=0.0)
        weights = taps + k[:, None] + column[None, :] * (4 * CHANNELS)
        weights = tl.load(weights, mask=is_term[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(gradient, weights, total, input_precision="ieee")
    at = dz + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, total.to(dz.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def weight_parts_kernel(dout, z, partials, num_rows, columns, rows_each, stride, CHANNELS: tl.constexpr,
                        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
                        TOP: tl.constexpr, LEFT: tl.constexpr,
                        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Write a program's part of the gradient of taps and, as a last row, of each tap's bias.

    Reads z and the gradient of its pixels.
    """
    tap = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    is_tap, is_column = tap < 4 * CHANNELS, column < columns
    pixels = dout + _compute_tap_offsets(tap, stride, CHANNELS, OUT_WIDTH)[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    # Sums over rows are a product with ones too: then the gradient need not be kept in registers for them.
    total_bias = tl.zeros((BM, 16), tl.float32)
    begin = tl.program_id(2) * rows_each
    end = tl.minimum(begin + rows_each, num_rows)
    for start in range(begin, end, BK):
        row = start + tl.arange(0, BK)
        # Not num_rows: rows from `end` on belong to another program.
        is_row = row < end
        first = _locate_first_pixels(row, HEIGHT, WIDTH, OUT_HEIGHT, OUT_WIDTH, TOP, LEFT)
        gradient = tl.load(pixels + (first * stride)[None, :], mask=is_tap[:, None] & is_row[None, :], other=0.0)
        at = z + row.to(tl.int64)[:, None] * columns + column[None, :]
        values = tl.load(at, mask=is_row[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(gradient, values, total, input_precision="ieee")
        # The bias' gradient as a product with 16 columns of ones (the smallest tile), divided by 16 below.
        total_bias = tl.dot(gradient, tl.full((BK, 16), 1.0, gradient.dtype), total_bias, input_precision="ieee")
    part = partials + tl.program_id(2).to(tl.int64) * (columns + 1) * (4 * CHANNELS)
    at = part + column[None, :] * (4 * CHANNELS) + tap[:, None]
    tl.store(at, total, mask=is_tap[:, None] & is_column[None, :])
    if tl.program_id(1) == 0:
        tl.store(part + columns * (4 * CHANNELS) + tap, tl.sum(total_bias, 1) / 16, mask=is_tap)


def double_into(half: Tensor, z: Tensor, taps: Tensor, bias: Tensor) -> None:
    """Write the transposed convolution of z to the centre of `half`, a slice of a map's channels, with zeros around
    it."""
    if half.shape[2:] != (2 * z.shape[2], 2 * z.shape[3]):
        half.zero_()
    num_rows, depth, width = z.numel() // z.shape[1], z.shape[1], taps.shape[1]
    blocks = choose_blocks(z, DOUBLED, width, depth)
    doubled_kernel[(triton.cdiv(num_rows, blocks.rows) * triton.cdiv(width, blocks.columns),)](
        z, taps, bias, half, num_rows, depth, get_row_stride(half), **get_sizes(half, z), **make_launch_options(blocks)
    )


def compute_doubling_gradient(dout: Tensor, z: Tensor, taps: Tensor) -> Tensor:
    """Return the gradient of z."""
    num_rows, columns, dz = z.numel() // z.shape[1], z.shape[1], allocate_like(z)
    blocks = choose_blocks(z, HALVED, columns, taps.shape[1])
    halved_kernel[(triton.cdiv(num_rows, blocks.rows) * triton.cdiv(columns, blocks.columns),)](
        dout, taps, dz, num_rows, columns, get_row_stride(dout), **get_sizes(dout, z), **make_launch_options(blocks)
    )
    return dz


def compute_tap_gradients(dout: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of taps, [channels in, 4C], and of the bias."""
    num_rows, columns, channels = z.numel() // z.shape[1], z.shape[1], dout.shape[1]
    blocks = choose_blocks(z, WEIGHTS, columns, num_rows)
    tiles = triton.cdiv(4 * channels, blocks.rows), triton.cdiv(columns, blocks.columns)
    parts = max(1, WEIGHT_PROGRAMS // (tiles[0] * tiles[1]))
    # Whole steps of the loop over rows, so that only the last part has a masked one.
    rows_each = triton.cdiv(num_rows, parts * blocks.depth) * blocks.depth
    num_parts = triton.cdiv(num_rows, rows_each)
    partials = z.new_empty((num_parts, columns + 1, 4 * channels), dtype=torch.float32)
    weight_parts_kernel[(*tiles, num_parts)](
        dout,
        z,
        partials,
        num_rows,
        columns,
        rows_each,
        get_row_stride(dout),
        **get_sizes(dout, z),
        **make_launch_options(blocks),
    )
    total = partials.sum(0)
    # The bias of a channel is added in all four taps.
    return total[:columns], total[columns].view(4, channels).sum(0)


def get_sizes(half: Tensor, z: Tensor) -> dict[str, int]:
    """Return channels, height and width of z and of the map it is upsampled into, and its top left corner there."""
    (height, width), (out_height, out_width) = z.shape[2:], half.shape[2:]
    # Centred; half a pixel to the top left if the difference is odd.
    top, left = (out_height - 2 * height) // 2, (out_width - 2 * width) // 2
    return {
        "CHANNELS": half.shape[1], "HEIGHT": height, "WIDTH": width, "OUT_HEIGHT": out_height, "OUT_WIDTH": out_width,
        "TOP": top, "LEFT": left,
    }  # fmt: skip


def choose_blocks(z: Tensor, most: UpsampleBlocks, columns: int, depth: int) -> UpsampleBlocks:
    """Return tile sizes for a product with this many columns and terms: powers of two, at least 16."""
    most = EXACT if z.dtype == torch.float32 else most
    columns, depth = (max(16, int(triton.next_power_of_2(size))) for size in (columns, depth))
    return most._replace(columns=min(columns, most.columns), depth=min(depth, most.depth))


def make_launch_options(blocks: UpsampleBlocks) -> dict[str, int]:
    """Return tile sizes and launch options as keyword arguments of a kernel."""
    rows, columns, depth, warps, stages = blocks
    return {"BM": rows, "BN": columns, "BK": depth, "num_warps": warps, "num_stages": stages}
