"""The Gluon kernel behind `kernels.row_convolution`: a 3×3 convolution on Hopper's tensor cores, row after row.

A program walks down a strip of an image. A row of it comes from memory three times (shifted by a pixel to the left, as
it is, and to the right) and is multiplied with all nine taps at once: it ends the row above, continues its own and
begins the row below. So a pixel is fetched three times and not nine, and the taps stay in shared memory all along.
What lies outside of the image arrives as zeros, as the padding it is.

Tiles are [PIXELS, CHANNELS]: PIXELS pixels of one row with all CHANNELS, the rows of a product on the tensor cores; a
tap is [CHANNELS, CHANNELS]. Shared memory holds the nine taps, three shifted tiles of each of STAGES rows, and one tile
on its way out. Registers hold three sums [PIXELS, CHANNELS]: `done`, the row that ended a step ago, `above`, which the
row in hand ends, and `here`, which it continues. Products are begun for all three, then `done` is written and summed
while they run.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfstep.kernels.layout import CHANNELS, PIXELS

STAGES, WARPS = 2, 8
VARYING = ["num_rows_each", "height", "width", "num_strips"]

# Triton 3.9 has new names for these, and refuses the old ones.
_copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _fetch_row(image, tiles, arrived, stage, n, row, column, is_wanted):
    """The row's tile, shifted by -1, 0 and 1 pixels."""
    mbarrier.expect(arrived.index(stage), 3 * image.block_type.nbytes, is_wanted)
    for shift in gl.static_range(3):
        _copy_in(
            image, [n, row, column - 1 + shift, 0], arrived.index(stage), tiles.index(3 * stage + shift), is_wanted
        )


@gluon.jit
def _times_taps(
    tiles, taps, stage, tap_row: gl.constexpr, total,
    IS_FIRST: gl.constexpr, IS_GRADIENT: gl.constexpr, PIXELS: gl.constexpr, CHANNELS: gl.constexpr,
):  # fmt: skip
    """total + the row's three tiles times a row of taps, begun and not waited for."""
    for shift in gl.static_range(3):
        tap = taps.index(3 * tap_row + shift).reshape([CHANNELS, CHANNELS])
        if not IS_GRADIENT:
            tap = tap.permute([1, 0])
        tile = tiles.index(3 * stage + shift).reshape([PIXELS, CHANNELS])
        total = warpgroup_mma(tile, tap, total, use_acc=(shift > 0) or (not IS_FIRST), is_async=True)
    return total


@gluon.jit
def _write_row(out, staged, values, n, row, column, PIXELS: gl.constexpr, CHANNELS: gl.constexpr):
    tma.store_wait(0)
    staged.reshape([PIXELS, CHANNELS]).store(values.to(out.dtype))
    fence_async_shared()
    _copy_out(out, [n, row, column, 0], staged)


@gluon.jit
def _paired(values, PIXELS: gl.constexpr, CHANNELS: gl.constexpr):
    """Sums of a thread's own two pixels: half the registers for a sum, and nothing to exchange."""
    return gl.sum(values.reshape([PIXELS // 16, 2, 8, CHANNELS]), axis=1)


@gluon.jit
def _with_statistics(first, second, value, middle, is_inside, PIXELS: gl.constexpr, CHANNELS: gl.constexpr):
    deviation = gl.where(is_inside, value - middle[None, :], 0.0)
    squares = deviation * deviation
    return first + _paired(deviation, PIXELS, CHANNELS), second + _paired(squares, PIXELS, CHANNELS)


@gluon.jit
def _with_gradient(first, second, g, y, a, b, is_inside, PIXELS: gl.constexpr, CHANNELS: gl.constexpr):
    g = gl.where(is_inside, g, 0.0)
    g = gl.where(y * a + b <= 0, 0.0, g)
    return first + _paired(g, PIXELS, CHANNELS), second + _paired(g * y, PIXELS, CHANNELS)


@gluon.jit
def _taken(raw, held, arrived, parity, n, next_row, column, is_wanted, layout: gl.constexpr,
           PIXELS: gl.constexpr, CHANNELS: gl.constexpr):  # fmt: skip
    """The raw row that has come; the next one is sent for."""
    mbarrier.wait(arrived, parity)
    y = held.reshape([PIXELS, CHANNELS]).load(layout).to(gl.float32)
    mbarrier.expect(arrived, raw.block_type.nbytes, is_wanted)
    _copy_in(raw, [n, next_row, column, 0], arrived, held, is_wanted)
    return y


@gluon.jit
def _over_pixels(pairs, layout: gl.constexpr):
    """Sums of all pixels, [channels], from those of threads."""
    return gl.convert_layout(gl.sum(gl.sum(pairs, 0), 0), gl.SliceLayout(0, layout))


@gluon.jit
def _own_part(parts, columns, NUM_SUMS: gl.constexpr, CHANNELS: gl.constexpr):
    part = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
    return parts + part * NUM_SUMS * CHANNELS + columns


@gluon.jit
def _store_gradient_sums(parts, total, of_products, mean, columns, CHANNELS: gl.constexpr):
    to = _own_part(parts, columns, 2, CHANNELS)
    gl.store(to, total)
    gl.store(to + CHANNELS, of_products - total * gl.load(mean + columns))


@gluon.jit
def _store_statistics(parts, total, of_products, middle, count, columns, CHANNELS: gl.constexpr):
    to = _own_part(parts, columns, 4, CHANNELS)
    gl.store(to, total)
    gl.store(to + CHANNELS, of_products)
    gl.store(to + 2 * CHANNELS, middle)
    gl.store(to + 3 * CHANNELS, count)


@gluon.jit
def _load_taps(weights, taps, arrived, IS_GRADIENT: gl.constexpr):
    """All nine; turned around for a gradient."""
    mbarrier.expect(arrived, 9 * weights.block_type.nbytes)
    for tap in gl.static_range(9):
        if IS_GRADIENT:
            _copy_in(weights, [0, 8 - tap, 0], arrived, taps.index(tap))
        else:
            _copy_in(weights, [0, tap, 0], arrived, taps.index(tap))


@gluon.jit
def _walk_down(
    image, weights, out, raw, mean, scale, offset, parts,
    num_rows_each, height, width, num_strips,
    IS_GRADIENT: gl.constexpr, PIXELS: gl.constexpr, CHANNELS: gl.constexpr, STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out = image * weights, and this program's part of sums over out's pixels.

    Forward: Σ d and Σ d², d = out - the mean of the program's first row, then that mean and the count. Of out as it was
    rounded: a channel that hardly varies is normalised to what its rounding left.
    IS_GRADIENT: weights are turned around, as for the gradient of a convolution's input, and the sums are Σ g and
    Σ g·(raw - mean), g = out where raw·scale + offset > 0, not yet rounded. The mean is subtracted from the sum and not
    from each value: registers are short, and a half format has only 8 to 11 bits to lose to it.
    """
    WEIGHTS: gl.constexpr = STAGES
    RAW: gl.constexpr = STAGES + 1
    n, column = gl.program_id(0) // num_strips, gl.program_id(0) % num_strips * PIXELS
    first_row = gl.program_id(1) * num_rows_each
    num_rows = gl.minimum(height - first_row, num_rows_each)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, CHANNELS, 16]
    )
    taps = gl.allocate_shared_memory(weights.dtype, [9, CHANNELS, 1, CHANNELS], weights.layout)
    tiles = gl.allocate_shared_memory(image.dtype, [3 * STAGES, 1, 1, PIXELS, CHANNELS], image.layout)
    staged = gl.allocate_shared_memory(out.dtype, [1, 1, PIXELS, CHANNELS], out.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(STAGES + 2):
        mbarrier.init(arrived.index(index), count=1)
    _load_taps(weights, taps, arrived.index(WEIGHTS), IS_GRADIENT)
    for index in gl.static_range(STAGES):
        _fetch_row(image, tiles, arrived, index, n, first_row - 1 + index, column, index < num_rows + 2)
    if IS_GRADIENT:
        held = gl.allocate_shared_memory(raw.dtype, [1, 1, PIXELS, CHANNELS], raw.layout)
        mbarrier.expect(arrived.index(RAW), raw.block_type.nbytes)
        _copy_in(raw, [n, first_row, column, 0], arrived.index(RAW), held)
    zeros = gl.zeros([PIXELS, CHANNELS], gl.float32, layout)
    num_inside = gl.minimum(width - column, PIXELS)
    is_inside = (gl.arange(0, PIXELS, gl.SliceLayout(1, layout)) < num_inside)[:, None]
    columns = gl.arange(0, CHANNELS, gl.SliceLayout(0, layout))
    nothing = gl.zeros([CHANNELS], gl.float32, gl.SliceLayout(0, layout))
    middle = nothing
    if IS_GRADIENT:
        a, b = gl.load(scale + columns)[None, :], gl.load(offset + columns)[None, :]
    first, second = _paired(zeros, PIXELS, CHANNELS), _paired(zeros, PIXELS, CHANNELS)
    done, above, here = zeros, zeros, zeros
    mbarrier.wait(arrived.index(WEIGHTS), 0)
    for step in range(num_rows + 3):
        stage = step % STAGES
        if step < num_rows + 2:
            mbarrier.wait(arrived.index(stage), step // STAGES & 1)
        # The last step has nothing left to multiply; what it computes from old tiles is thrown away.
        ending = _times_taps(tiles, taps, stage, 2, above, False, IS_GRADIENT, PIXELS, CHANNELS)
        going_on = _times_taps(tiles, taps, stage, 1, here, False, IS_GRADIENT, PIXELS, CHANNELS)
        beginning = _times_taps(tiles, taps, stage, 0, zeros, True, IS_GRADIENT, PIXELS, CHANNELS)
        # While these products run, the row that ended a step ago is written and summed.
        if step >= 3:
            row = first_row + step - 3
            _write_row(out, staged, done, n, row, column, PIXELS, CHANNELS)
            if IS_GRADIENT:
                y = _taken(
                    raw, held, arrived.index(RAW), step - 3 & 1, n, row + 1, column, step < num_rows + 2,
                    layout, PIXELS, CHANNELS,
                )  # fmt: skip
                first, second = _with_gradient(first, second, done, y, a, b, is_inside, PIXELS, CHANNELS)
            else:
                value = staged.reshape([PIXELS, CHANNELS]).load(layout).to(gl.float32)
                if step == 3:
                    middle = gl.sum(gl.where(is_inside, value, 0.0), axis=0) / num_inside
                first, second = _with_statistics(first, second, value, middle, is_inside, PIXELS, CHANNELS)
        done, above, here = warpgroup_mma_wait(0, deps=[ending, going_on, beginning])
        next_row = first_row - 1 + step + STAGES
        _fetch_row(image, tiles, arrived, stage, n, next_row, column, step + STAGES < num_rows + 2)
    tma.store_wait(0)
    total, of_products = _over_pixels(first, layout), _over_pixels(second, layout)
    if IS_GRADIENT:
        _store_gradient_sums(parts, total, of_products, mean, columns, CHANNELS)
    else:
        _store_statistics(parts, total, of_products, middle, nothing + num_rows * num_inside, columns, CHANNELS)


@gluon.jit(do_not_specialize=VARYING)
def row_forward_kernel(
    image, weights, out, parts, num_rows_each, height, width, num_strips,
    PIXELS: gl.constexpr, CHANNELS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    _walk_down(
        image, weights, out, out, parts, parts, parts, parts, num_rows_each, height, width, num_strips,
        False, PIXELS, CHANNELS, STAGES, num_warps,
    )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def row_gradient_kernel(
    image, weights, out, raw, mean, scale, offset, parts, num_rows_each, height, width, num_strips,
    PIXELS: gl.constexpr, CHANNELS: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    _walk_down(
        image, weights, out, raw, mean, scale, offset, parts, num_rows_each, height, width, num_strips,
        True, PIXELS, CHANNELS, STAGES, num_warps,
    )  # fmt: skip


CONSTANTS = {"PIXELS": PIXELS, "CHANNELS": CHANNELS, "STAGES": STAGES, "num_warps": WARPS}


def convolve(z: Tensor, w: Tensor, y: Tensor, num_rows_each: int) -> Tensor:
    """y = z * w; gives the parts of its statistics, [parts, 4, channels]."""
    grid, parts, sizes = _division(y, num_rows_each, num_sums=4)
    row_forward_kernel[grid](_map_of(z), _taps_of(w), _map_of(y), parts, *sizes, **CONSTANTS)
    return parts


def input_gradient(
    dy: Tensor, w: Tensor, dz: Tensor, y: Tensor, vectors: tuple[Tensor, Tensor, Tensor], num_rows_each: int
) -> Tensor:
    """dz, of z = relu(y·scale + offset), which w was convolved with to a map of gradient dy.

    Gives parts of Σ g and Σ g·(y - mean), [parts, 2, channels], g = dz where ReLU let the value through. `vectors` are
    mean, scale and offset.
    """
    grid, parts, sizes = _division(dz, num_rows_each, num_sums=2)
    maps = _map_of(dy), _taps_of(w), _map_of(dz), _map_of(y)
    row_gradient_kernel[grid](*maps, *vectors, parts, *sizes, **CONSTANTS)
    return parts


def _division(out: Tensor, num_rows_each: int, *, num_sums: int) -> tuple[tuple[int, int], Tensor, tuple[int, ...]]:
    """A program for each strip and some of its rows, memory for its sums, and the sizes that kernels ask for."""
    n, _, height, width = out.shape
    num_strips = triton.cdiv(width, PIXELS)
    grid = (n * num_strips, triton.cdiv(height, num_rows_each))
    parts = torch.empty(grid[0] * grid[1], num_sums, CHANNELS, dtype=torch.float32, device=out.device)
    return grid, parts, (num_rows_each, height, width, num_strips)


def _map_of(x: Tensor) -> TensorDescriptor:
    """Tiles of a channels_last map."""
    pixels = x.permute(0, 2, 3, 1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    return TensorDescriptor(pixels, list(pixels.shape), list(pixels.stride()), [1, 1, PIXELS, CHANNELS], layout)


def _taps_of(w: Tensor) -> TensorDescriptor:
    """Single taps of a channels_last 3×3 weight, [channels out, 9, channels in]."""
    taps = w.permute(0, 2, 3, 1).flatten(1, 2)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(taps, list(taps.shape), list(taps.stride()), [CHANNELS, 1, CHANNELS], layout)
