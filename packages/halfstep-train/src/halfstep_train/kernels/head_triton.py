"""Triton kernels of a U-Net's head: normalise, ReLU and the 1×1 convolution to a few logits in one pass over the map.

The normalised map is never written. A tile is [rows, all channels]: a logit is a sum over all channels of a pixel, so
one program computes all of it. Classes are few, so they are unrolled: each has a row of weights [1, channels] and a
column of gradients [rows, 1] in registers, and a product over them is a sum of outer products; a matmul's tile would be
mostly empty. Scale, offset and weights are loaded once per program, which is why a program processes many tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep_train.kernels.normalise_triton import GradientSums, Norm, allocate_like, combine_partials


class HeadBlocks(NamedTuple):
    """Sizes of a tile and of its parts, and the largest number of programs."""

    values: int
    warps: int
    programs: int


LOGITS = HeadBlocks(4096, warps=8, programs=8 * 132)
GRADIENT = HeadBlocks(1024, warps=2, programs=24 * 132)
SUMS = HeadBlocks(2048, warps=8, programs=2 * 132)
"""Eight or sixteen values per thread, in loads of 16 bytes; few programs for sums, since each leaves a part of them."""
SUM_LOADS = 8  # how many loads of the logits' gradient the parts of a tile have together


@triton.jit
def _locate_tile(tile, pixels, ROWS: tl.constexpr):
    """Return a tile's image and its first pixel there: no tile crosses images, so that no pixel index needs a
    division."""
    in_image = tl.cdiv(pixels, ROWS)
    return (tile // in_image).to(tl.int64), tile % in_image * ROWS


@triton.jit
def _compute_offsets(image, start, pixels, channels, columns, ROWS: tl.constexpr):
    """Return the offsets of a tile in the map: 64 bits for its start, 32 bits within it."""
    return (image * pixels + start) * channels + (tl.arange(0, ROWS)[:, None] * channels + columns[None, :])


@triton.jit
def _load_weights(weight, channels, columns, is_channel, CLASSES):
    """Load the weights of each class, in fp32."""
    weights = ()
    for k in tl.static_range(CLASSES):
        w = tl.load(weight + k * channels + columns, mask=is_channel, other=0.0).to(tl.float32)
        weights = weights + (w[None, :],)  # noqa: RUF005 - Triton unpacks no tuples
    return weights


@triton.jit
def _load_logit_gradients(dlogits, image, start, is_row, n_stride, k_stride, w_stride, CLASSES, ROWS):
    """Load the gradient of each class's logits, in fp32."""
    at = dlogits + image * n_stride + start.to(tl.int64) * w_stride + tl.arange(0, ROWS) * w_stride
    gradients = ()
    for k in tl.static_range(CLASSES):
        gradient = tl.load(at + k * k_stride, mask=is_row, other=0.0).to(tl.float32)
        gradients = gradients + (gradient[:, None],)  # noqa: RUF005
    return gradients


@triton.jit
def _sum_products(gradients, weights, CLASSES: tl.constexpr):
    """Return the gradient of the normalised map: a sum of outer products over classes."""
    total = gradients[0] * weights[0]
    for k in tl.static_range(1, CLASSES):
        total += gradients[k] * weights[k]
    return total


@triton.jit
def _make_zeros(CLASSES, ROWS, COLS):
    """Return a zero tile for each class."""
    zeros = ()
    for _ in tl.static_range(CLASSES):
        zeros = zeros + (tl.zeros((ROWS, COLS), tl.float32),)  # noqa: RUF005
    return zeros


@triton.jit
def _add_products(sums, gradients, values, CLASSES):
    """Add each class's gradient, and its product with values, to their sums."""
    new = ()
    for k in tl.static_range(CLASSES):
        new = new + (sums[k] + gradients[k] * values,)  # noqa: RUF005
    return new


@triton.jit
def _load_parts(y, dlogits, tile, pixels, channels, columns, is_channel, n_stride, k_stride, w_stride,
                CLASSES, PARTS, ROWS):  # fmt: skip
    """Load values and logit gradients of all parts before using the first, to keep enough loads in flight."""
    image, first = _locate_tile(tile, pixels, PARTS * ROWS)
    values, gradients = (), ()
    for part in tl.static_range(PARTS):
        start = first + part * ROWS
        is_row = start + tl.arange(0, ROWS) < pixels
        at = y + _compute_offsets(image, start, pixels, channels, columns, ROWS)
        values = values + (tl.load(at, mask=is_row[:, None] & is_channel[None, :], other=0.0),)  # noqa: RUF005
        of_part = _load_logit_gradients(dlogits, image, start, is_row, n_stride, k_stride, w_stride, CLASSES, ROWS)
        gradients = gradients + (of_part,)  # noqa: RUF005
    return values, gradients


@triton.jit
def logits_kernel(y, scale, offset, weight, bias, out, num_tiles, pixels, channels,
                  CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y and write logits."""
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a = tl.load(scale + columns, mask=is_channel, other=0.0)[None, :]
    b = tl.load(offset + columns, mask=is_channel, other=0.0)[None, :]
    weights = _load_weights(weight, channels, columns, is_channel, CLASSES)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        image, start = _locate_tile(tile, pixels, ROWS)
        is_row = start + tl.arange(0, ROWS) < pixels
        inside = is_row[:, None] & is_channel[None, :]
        z = tl.load(y + _compute_offsets(image, start, pixels, channels, columns, ROWS), mask=inside, other=0.0)
        z = z.to(tl.float32) * a + b
        z = tl.where(z <= 0, 0.0, z)  # `maximum` would turn NaN into 0
        at = out + ((image * pixels + start) * CLASSES + tl.arange(0, ROWS) * CLASSES)
        for k in tl.static_range(CLASSES):
            # The sum over channels is within the tile, since it holds all channels of a pixel.
            logit = tl.sum(z * weights[k], 1) + tl.load(bias + k).to(tl.float32)
            tl.store(at + k, logit.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def head_sums_kernel(y, dlogits, mean, scale, offset, weight, partials, bias_partials, num_tiles, pixels, channels,
                     n_stride, k_stride, w_stride,
                     CLASSES: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y and the logits' gradient; write each program's sums of g, of g * (y - mean) and of dlogits * z.

    All of them follow from two sums per class, of dlogit and of dlogit * (y - mean), over values that pass ReLU.
    """
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a = tl.load(scale + columns, mask=is_channel, other=0.0)[None, :]
    b = tl.load(offset + columns, mask=is_channel, other=0.0)[None, :]
    mu = tl.load(mean + columns, mask=is_channel, other=0.0)[None, :]
    # [rows, channels] and not [channels]: added up over rows once at the end, not across threads in each tile.
    sums = _make_zeros(CLASSES, ROWS, COLS)
    sums_x = _make_zeros(CLASSES, ROWS, COLS)
    sums_all = _make_zeros(CLASSES, ROWS, 1)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        values, gradients = _load_parts(
            y, dlogits, tile, pixels, channels, columns, is_channel, n_stride, k_stride, w_stride,
            CLASSES, PARTS, ROWS)  # fmt: skip
        for part in tl.static_range(PARTS):
            value = values[part].to(tl.float32)
            # ReLU is recomputed from y. NaN <= 0 is false: NaN passes, as in forward.
            is_through = tl.where(value * a + b <= 0, 0.0, 1.0)
            sums = _add_products(sums, gradients[part], is_through, CLASSES)
            sums_x = _add_products(sums_x, gradients[part], is_through * (value - mu), CLASSES)
            sums_all = _add_products(sums_all, gradients[part], 1.0, CLASSES)
    # Loaded again without the row dimension: from here on, all are vectors of channels.
    a, b = tl.load(scale + columns, mask=is_channel, other=0.0), tl.load(offset + columns, mask=is_channel, other=0.0)
    # z = a·y + b = a·(y - mean) + middle, so Σ dlogit·z = a·Σ dlogit·(y - mean) + middle·Σ dlogit.
    middle = a * tl.load(mean + columns, mask=is_channel, other=0.0) + b
    at = partials + tl.program_id(0) * (2 + CLASSES) * channels + columns
    sum_g, sum_gx = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    for k in tl.static_range(CLASSES):
        w = tl.load(weight + k * channels + columns, mask=is_channel, other=0.0).to(tl.float32)
        total, total_x = tl.sum(sums[k], 0), tl.sum(sums_x[k], 0)
        sum_g += w * total
        sum_gx += w * total_x
        tl.store(at + (2 + k) * channels, a * total_x + middle * total, mask=is_channel)
        tl.store(bias_partials + tl.program_id(0) * CLASSES + k, tl.sum(tl.sum(sums_all[k], 1), 0))
    tl.store(at, sum_g, mask=is_channel)
    tl.store(at + channels, sum_gx, mask=is_channel)


@triton.jit
def head_gradient_kernel(y, dlogits, mean, inverse, scale, offset, weight, sum_g, sum_gx, out, num_tiles, num_values,
                         pixels, channels, n_stride, k_stride, w_stride,
                         CLASSES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Read y and the logits' gradient, and write the gradient of y."""
    columns = tl.arange(0, COLS)
    is_channel = columns < channels
    a, b = tl.load(scale + columns, mask=is_channel, other=0.0), tl.load(offset + columns, mask=is_channel, other=0.0)
    slope = tl.load(inverse + columns, mask=is_channel, other=0.0)
    # The gradient of BatchNorm, a·(g - Σg/n - (y - mean)·inverse²·Σgx/n), is a·g + (y·slope + level). Slope and level
    # are per channel, so they are computed once per program.
    slope = -a * slope * slope * tl.load(sum_gx + columns, mask=is_channel, other=0.0) / num_values
    level = -a * tl.load(sum_g + columns, mask=is_channel, other=0.0) / num_values
    level -= slope * tl.load(mean + columns, mask=is_channel, other=0.0)
    weights = _load_weights(weight, channels, columns, is_channel, CLASSES)
    a, b, slope, level = a[None, :], b[None, :], slope[None, :], level[None, :]
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        image, start = _locate_tile(tile, pixels, ROWS)
        is_row = start + tl.arange(0, ROWS) < pixels
        inside = is_row[:, None] & is_channel[None, :]
        at = _compute_offsets(image, start, pixels, channels, columns, ROWS)
        value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        gradients = _load_logit_gradients(dlogits, image, start, is_row, n_stride, k_stride, w_stride, CLASSES, ROWS)
        g = tl.where(value * a + b <= 0, 0.0, _sum_products(gradients, weights, CLASSES))
        dy = a * g + (value * slope + level)
        tl.store(out + at, dy.to(out.dtype.element_ty), mask=inside)


class HeadTiles(NamedTuple):
    """The tiling: programs, each of which processes tiles of an image's rows with all channels."""

    num_tiles: int
    pixels: int
    grid: tuple[int]
    options: dict[str, int]


def cut_head_tiles(y: Tensor, blocks: HeadBlocks, parts: int = 1) -> HeadTiles:
    """Return the tiling for this map."""
    n, channels, height, width = y.shape
    # All channels in one tile. tl.arange needs a power of two; columns beyond the channels are masked.
    columns = int(triton.next_power_of_2(channels))
    rows = max(blocks.values // columns, 1)
    num_tiles = n * triton.cdiv(height * width, rows * parts)
    options = {"ROWS": rows, "COLS": columns, "num_warps": blocks.warps}
    return HeadTiles(num_tiles, height * width, (min(num_tiles, blocks.programs),), options)


def get_strides(dlogits: Tensor) -> tuple[int, int, int]:
    """Return the strides between images, classes and pixels."""
    n_stride, k_stride, h_stride, w_stride = dlogits.stride()
    assert dlogits.shape[2] == 1 or h_stride == dlogits.shape[3] * w_stride, "lines of pixels must follow each other"
    return n_stride, k_stride, w_stride


def compute_logits(y: Tensor, norm: Norm, weight: Tensor, bias: Tensor) -> Tensor:
    """Return relu(y normalised) times the kernel [classes, channels], plus the bias."""
    n, channels, height, width = y.shape
    classes, tiles = len(weight), cut_head_tiles(y, LOGITS)
    out = torch.empty((n, classes, height, width), dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
    logits_kernel[tiles.grid](
        *(y, norm.scale, norm.offset, weight, bias, out, tiles.num_tiles, tiles.pixels, channels),
        CLASSES=classes,
        **tiles.options,
    )
    return out


def sum_head_gradients(y: Tensor, dlogits: Tensor, norm: Norm, weight: Tensor) -> tuple[GradientSums, Tensor, Tensor]:
    """Return the sums that BatchNorm's gradient needs, and the gradients of kernel and bias."""
    channels, classes = y.shape[1], len(weight)
    parts = max(SUM_LOADS // classes, 1)
    tiles = cut_head_tiles(y, SUMS, parts)
    partials = y.new_empty((*tiles.grid, 2 + classes, channels), dtype=torch.float32)
    bias_partials = y.new_empty((*tiles.grid, classes), dtype=torch.float32)
    head_sums_kernel[tiles.grid](
        *(y, dlogits, norm.mean, norm.scale, norm.offset, weight, partials, bias_partials),
        *(tiles.num_tiles, tiles.pixels, channels, *get_strides(dlogits)),
        CLASSES=classes,
        PARTS=parts,
        **tiles.options,
    )
    total = combine_partials(partials)
    return (
        GradientSums(total[0], total[1], total[1] * norm.inverse),
        total[2:],
        combine_partials(bias_partials[:, None])[0],
    )


def compute_head_gradient(y: Tensor, dlogits: Tensor, norm: Norm, weight: Tensor, sums: GradientSums) -> Tensor:
    """Return the gradient of y."""
    channels, tiles, out = y.shape[1], cut_head_tiles(y, GRADIENT), allocate_like(y)
    head_gradient_kernel[tiles.grid](
        *(y, dlogits, norm.mean, norm.inverse, norm.scale, norm.offset, weight, sums.g, sums.gx, out),
        *(tiles.num_tiles, y.numel() // channels, tiles.pixels, channels, *get_strides(dlogits)),
        CLASSES=len(weight),
        **tiles.options,
    )
    return out
