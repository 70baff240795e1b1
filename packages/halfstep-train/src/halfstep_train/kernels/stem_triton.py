"""The Triton kernels of a convolution of an image with few channels: matmuls on taps gathered from a padded copy.

The copy is padded with zeros and has four channels per pixel, in the map's format. So no tap needs a mask, a pixel is 8
bytes, and the taps of one kernel row are contiguous: 7 taps of 3 channels are 28 values, read as 32. Values beyond them
are multiplied by a weight of zero, or end in a part of the weight's gradient that is discarded.

Tiles of the forward product: taps [PIXELS, ROW_TAPS], one kernel row at a time, times weights [ROW_TAPS, OUT_CHANNELS],
summed in [PIXELS, OUT_CHANNELS]. It goes row by row because the taps of one row are contiguous and adjacent pixels
share most of them in the cache. Tiles of the weight's gradient: dy [PIXELS, OUT_CHANNELS] transposed times the taps of
all rows, [PIXELS, ALL_TAPS]. The result [OUT_CHANNELS, ALL_TAPS] is small and stays in registers, while the many pixels
stream past.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep_train.kernels.layout import PIXEL, PaddedImage, Windows, get_row_stride
from halfstep_train.kernels.normalise_triton import GradientSums, Norm


class StemBlocks(NamedTuple):
    """Pixels per tile, and pipeline stages: one reads through the L1 cache, more prefetch past it if windows are
    aligned."""

    pixels: int
    warps: int
    stages: int
    programs: int = 2 * 132
    """At most, where each leaves a part of a sum: so many per multiprocessor of an H200. More would lengthen the second
    sum, over programs."""


OUT_CHANNELS = 64
"""Channels of a tile: 128 bytes in a half format, one cache line per pixel; also the 64 rows of Hopper's matrix
units."""
PAD_PIXELS, PAD_WARPS = 512, 4
ARRANGE_VALUES, ARRANGE_WARPS = 1024, 4
FORWARD = StemBlocks(pixels=128, warps=4, stages=1)
FEW_TAPS = 64
GRADIENT_OF_FEW, GRADIENT_OF_MANY = StemBlocks(pixels=128, warps=4, stages=3), StemBlocks(pixels=64, warps=8, stages=2)
"""A program holds its part of the gradient in registers: 64 taps leave room for more pixels at once."""
GRADIENT_THROUGH_NORM = StemBlocks(pixels=128, warps=4, stages=1, programs=4 * 132)
"""The fastest of those tried on an H200, as all here."""
FINISH_VALUES, FINISH_PARTS, FINISH_WARPS = 64, 64, 4


@triton.jit
def _pad(
    image, padded, num_pixels, n_stride, c_stride, h_stride, w_stride,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    PADDED_HEIGHT: tl.constexpr, PADDED_WIDTH: tl.constexpr, PIXEL: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Read each value of the image once, and write `PIXEL` values per padded pixel."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.arange(0, PIXEL)[None, :]
    # Coordinates in the image; those in the padding are outside of it, and 0 is written for them.
    row, column = pixel // PADDED_WIDTH % PADDED_HEIGHT - PADDING, pixel % PADDED_WIDTH - PADDING
    inside = (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH) & (pixel < num_pixels)
    first = image + (pixel // (PADDED_WIDTH * PADDED_HEIGHT)).to(tl.int64) * n_stride
    values = (first + row * h_stride + column * w_stride)[:, None] + channel * c_stride
    value = tl.load(values, inside[:, None] & (channel < CHANNELS), 0.0)
    results = padded + pixel.to(tl.int64)[:, None] * PIXEL + channel
    tl.store(results, value.to(padded.dtype.element_ty), (pixel < num_pixels)[:, None])


@triton.jit
def _locate_tap(index, ROW_TAPS: tl.constexpr, PIXEL: tl.constexpr):
    """Return row, column and channel of the weight for an index into all rows of taps."""
    return index // ROW_TAPS, index % ROW_TAPS // PIXEL, index % PIXEL


@triton.jit
def _arrange(
    weight, arranged, o_stride, c_stride, h_stride, w_stride,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, KERNEL: tl.constexpr, ROW_TAPS: tl.constexpr, PIXEL: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Write the weight as a matrix [kernel rows · taps of a row, out channels], zero where there is no tap."""
    index = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    out = index % OUT
    row, column, channel = _locate_tap(index // OUT, ROW_TAPS, PIXEL)
    # A row of taps is longer than the kernel, and a pixel may have more channels than the image: weight 0.
    is_tap = (row < KERNEL) & (column < KERNEL) & (channel < CHANNELS)
    value = tl.load(weight + out * o_stride + channel * c_stride + row * h_stride + column * w_stride, is_tap, 0.0)
    tl.store(arranged + index, value.to(arranged.dtype.element_ty), row < KERNEL)


@triton.jit
def _locate_first_taps(
    padded, pixel,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    PADDED_HEIGHT: tl.constexpr, PADDED_WIDTH: tl.constexpr, PIXEL: tl.constexpr,
):  # fmt: skip
    """Return the offset of the first kernel row's taps for each pixel of the map."""
    row, column = pixel // COLUMNS % ROWS * STRIDE, pixel % COLUMNS * STRIDE
    first = padded + (pixel // (COLUMNS * ROWS)).to(tl.int64) * (PADDED_HEIGHT * PADDED_WIDTH * PIXEL)
    return first + row * (PADDED_WIDTH * PIXEL) + column * PIXEL


@triton.jit
def _convolve(
    padded, arranged, y, num_pixels,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    PADDED_HEIGHT: tl.constexpr, PADDED_WIDTH: tl.constexpr, PIXEL: tl.constexpr,
    OUT: tl.constexpr, KERNEL: tl.constexpr, ROW_TAPS: tl.constexpr,
    PIXELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write y = taps @ arranged, one kernel row after the other: gathers from the cache, writes each value once."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    out = tl.program_id(1) * OUT_CHANNELS + tl.arange(0, OUT_CHANNELS)[None, :]
    # Pixels past the end read the taps of the last one: loads need no mask, and the store has one.
    place = tl.minimum(pixel, num_pixels - 1)
    first = _locate_first_taps(padded, place, ROWS, COLUMNS, STRIDE, PADDED_HEIGHT, PADDED_WIDTH, PIXEL)
    tap = tl.arange(0, ROW_TAPS)
    total = tl.zeros([PIXELS, OUT_CHANNELS], tl.float32)
    for row in range(KERNEL):
        taps = tl.load(first[:, None] + (row * (PADDED_WIDTH * PIXEL) + tap)[None, :])
        weights = tl.load(arranged + (row * ROW_TAPS + tap)[:, None] * OUT + out, out < OUT, 0.0)
        # "ieee" concerns fp32 maps: their operands are not rounded to TF32.
        total = tl.dot(taps, weights, total, input_precision="ieee")
    results = y + pixel.to(tl.int64)[:, None] * OUT + out
    tl.store(results, total.to(y.dtype.element_ty), (pixel < num_pixels)[:, None] & (out < OUT))


@triton.jit
def _weight_gradient(
    padded, gradient, y, mean, inverse, scale, offset, sum_g, sum_gx, partials, num_pixels, num_tiles, g_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr,
    PADDED_HEIGHT: tl.constexpr, PADDED_WIDTH: tl.constexpr, PIXEL: tl.constexpr,
    OUT: tl.constexpr, KERNEL: tl.constexpr, ROW_TAPS: tl.constexpr, ALL_TAPS: tl.constexpr,
    IS_NORMALISED: tl.constexpr, IS_MASKED: tl.constexpr,
    PIXELS: tl.constexpr, OUT_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write this program's part of dyᵀ @ taps, over `num_tiles` adjacent tiles: reads dy, or g and y, once.

    If the map goes through a BatchNorm, its dy = scale·(g - Σg/n - (y - mean)·inverse²·Σgx/n) is computed here and
    rounded to the map's format as if it had been written.
    """
    out = tl.program_id(1) * OUT_CHANNELS + tl.arange(0, OUT_CHANNELS)
    is_out = (out < OUT)[None, :]
    if IS_NORMALISED:
        count = num_pixels.to(tl.float32)
        middle, gain = tl.load(mean + out, out < OUT, 0.0), tl.load(scale + out, out < OUT, 0.0)
        shift, mean_g = tl.load(offset + out, out < OUT, 0.0), tl.load(sum_g + out, out < OUT, 0.0) / count
        narrowness = tl.load(inverse + out, out < OUT, 0.0)
        slope = tl.load(sum_gx + out, out < OUT, 0.0) / count * narrowness * narrowness
    tap = tl.arange(0, ALL_TAPS)[None, :]
    # Distance of each tap from the first one of its pixel: contiguous within a kernel row.
    distance = tap // ROW_TAPS * (PADDED_WIDTH * PIXEL) + tap % ROW_TAPS
    total = tl.zeros([OUT_CHANNELS, ALL_TAPS], tl.float32)
    for tile in range(num_tiles):
        pixel = (tl.program_id(0) * num_tiles + tile) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < num_pixels)[:, None] & is_out
        # Pixels past the end read the taps of the last one. Their dy is 0, so they add nothing.
        place = tl.minimum(pixel, num_pixels - 1)
        first = _locate_first_taps(padded, place, ROWS, COLUMNS, STRIDE, PADDED_HEIGHT, PADDED_WIDTH, PIXEL)
        dy = tl.load(gradient + pixel.to(tl.int64)[:, None] * g_stride + out[None, :], inside, 0.0)
        taps = tl.load(first[:, None] + distance, tap < KERNEL * ROW_TAPS, 0.0)
        if IS_NORMALISED:
            value = tl.load(y + pixel.to(tl.int64)[:, None] * OUT + out[None, :], inside, 0.0).to(tl.float32)
            g = dy.to(tl.float32)
            if IS_MASKED:
                g = tl.where(value * gain + shift <= 0, 0.0, g)
            # Masked again: g = 0 and y = 0 of missing pixels would give a dy that is not 0.
            dy = tl.where(inside, gain * (g - mean_g - (value - middle) * slope), 0.0).to(dy.dtype)
        total = tl.dot(tl.trans(dy), taps, total, input_precision="ieee")
    part = partials + (tl.program_id(0) * OUT + out)[:, None] * ALL_TAPS + tap
    tl.store(part, total, (out < OUT)[:, None])


@triton.jit
def _finish(
    partials, gradient, num_parts, o_stride, c_stride, h_stride, w_stride,
    CHANNELS: tl.constexpr, OUT: tl.constexpr, KERNEL: tl.constexpr, ROW_TAPS: tl.constexpr, ALL_TAPS: tl.constexpr,
    PIXEL: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Write the weight's gradient in the weight's layout: Σ over parts, always in the same order."""
    index = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    out = index // ALL_TAPS
    row, column, channel = _locate_tap(index % ALL_TAPS, ROW_TAPS, PIXEL)
    is_tap = (out < OUT) & (row < KERNEL) & (column < KERNEL) & (channel < CHANNELS)
    total = tl.zeros([VALUES], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        values = partials + part * (OUT * ALL_TAPS) + index[None, :]
        total += tl.sum(tl.load(values, (part < num_parts) & is_tap[None, :], 0.0), 0)
    tl.store(gradient + out * o_stride + channel * c_stride + row * h_stride + column * w_stride, total, is_tap)


class ThroughNorm(NamedTuple):
    """The BatchNorm, and if `masked` the ReLU, that a gradient still has to pass through."""

    y: Tensor
    norm: Norm
    sums: GradientSums
    masked: bool


def pad_image(image: Tensor, kernel: int, stride: int, padding: int, dtype: torch.dtype) -> PaddedImage:
    """Return the image as `convolve_image` reads it, in the dtype of the map; its strides may be any."""
    n, channels, height, width = image.shape
    windows = Windows(height=height, width=width, kernel=kernel, stride=stride, padding=padding)
    shape = n, windows.padded_height, windows.padded_width, PIXEL
    values = torch.empty(shape, dtype=dtype, device=image.device)
    num_pixels = values.numel() // PIXEL
    _pad[(triton.cdiv(num_pixels, PAD_PIXELS),)](
        image, values, num_pixels, *image.stride(),
        CHANNELS=channels, HEIGHT=height, WIDTH=width, PADDING=padding,
        PADDED_HEIGHT=windows.padded_height, PADDED_WIDTH=windows.padded_width, PIXEL=PIXEL,
        PIXELS=PAD_PIXELS, num_warps=PAD_WARPS,
    )  # fmt: skip
    return PaddedImage(values=values, channels=channels, windows=windows)


def _arrange_weights(image: PaddedImage, weight: Tensor) -> Tensor:
    """Return the weight as the matrix that taps are multiplied with, in the image's dtype."""
    windows, out = image.windows, weight.shape[0]
    result = torch.empty(windows.kernel * windows.row_taps, out, dtype=image.values.dtype, device=weight.device)
    _arrange[(triton.cdiv(result.numel(), ARRANGE_VALUES),)](
        weight, result, *weight.stride(),
        CHANNELS=image.channels, OUT=out, KERNEL=windows.kernel, ROW_TAPS=windows.row_taps, PIXEL=PIXEL,
        VALUES=ARRANGE_VALUES, num_warps=ARRANGE_WARPS,
    )  # fmt: skip
    return result


def convolve_image(image: PaddedImage, weight: Tensor) -> Tensor:
    """Return the raw map, channels_last, in the padded image's dtype."""
    n, out, windows = len(image.values), len(weight), image.windows
    y = torch.empty(
        (n, out, windows.rows, windows.columns),
        dtype=image.values.dtype,
        device=weight.device,
        memory_format=torch.channels_last,
    )
    num_pixels, channels, weights = y.numel() // out, _choose_channel_block(out), _arrange_weights(image, weight)
    _convolve[(triton.cdiv(num_pixels, FORWARD.pixels), triton.cdiv(out, channels))](
        image.values, weights, y, num_pixels, **_make_constants(image), OUT=out,
        PIXELS=FORWARD.pixels, OUT_CHANNELS=channels, num_warps=FORWARD.warps, num_stages=FORWARD.stages,
    )  # fmt: skip
    return y


def compute_stem_gradient(image: PaddedImage, weight: Tensor, g: Tensor, through: ThroughNorm | None = None) -> Tensor:
    """Return the gradient of `weight`, in fp32 and with its layout, from dy, that of the raw map.

    Without dy, from its inputs `through` a BatchNorm (see `compute_raw_gradient`): dy is then never written."""
    partials, windows = _sum_gradient_parts(image, g, through), image.windows
    (num_parts, out, all_taps), gradient = partials.shape, torch.empty_like(weight, dtype=torch.float32)
    _finish[(triton.cdiv(out * all_taps, FINISH_VALUES),)](
        partials, gradient, num_parts, *gradient.stride(),
        CHANNELS=image.channels, OUT=out, KERNEL=windows.kernel, ROW_TAPS=windows.row_taps, ALL_TAPS=all_taps,
        PIXEL=PIXEL, VALUES=FINISH_VALUES, PARTS=FINISH_PARTS, num_warps=FINISH_WARPS,
    )  # fmt: skip
    return gradient


def _sum_gradient_parts(image: PaddedImage, g: Tensor, through: ThroughNorm | None) -> Tensor:
    """Return partial gradients of the weight, [parts, out channels, taps]."""
    num_pixels, out, windows = g.numel() // g.shape[1], g.shape[1], image.windows
    channels, all_taps = _choose_channel_block(out), triton.next_power_of_2(windows.kernel * windows.row_taps)
    of_few = GRADIENT_OF_FEW if through is None else GRADIENT_THROUGH_NORM
    blocks = of_few if all_taps <= FEW_TAPS else GRADIENT_OF_MANY
    num_tiles = triton.cdiv(num_pixels, blocks.pixels * blocks.programs)
    grid = triton.cdiv(num_pixels, blocks.pixels * num_tiles), triton.cdiv(out, channels)
    partials = torch.empty(grid[0], out, all_taps, dtype=torch.float32, device=g.device)
    # Without a norm the kernel reads none of these seven arguments.
    vectors = [g] * 7 if through is None else [through.y, *through.norm, through.sums.g, through.sums.gx]
    _weight_gradient[grid](
        image.values, g, *vectors, partials, num_pixels, num_tiles, get_row_stride(g), **_make_constants(image),
        OUT=out, ALL_TAPS=all_taps, IS_NORMALISED=through is not None, IS_MASKED=through is not None and through.masked,
        PIXELS=blocks.pixels, OUT_CHANNELS=channels, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return partials


def _make_constants(image: PaddedImage) -> dict[str, int]:
    windows = image.windows
    return {
        "ROWS": windows.rows, "COLUMNS": windows.columns, "STRIDE": windows.stride,
        "PADDED_HEIGHT": windows.padded_height, "PADDED_WIDTH": windows.padded_width, "PIXEL": PIXEL,
        "KERNEL": windows.kernel, "ROW_TAPS": windows.row_taps,
    }  # fmt: skip


def _choose_channel_block(out: int) -> int:
    return min(OUT_CHANNELS, int(triton.next_power_of_2(out)))
