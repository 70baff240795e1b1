"""3×3 convolutions on 64 channels, whose kernel of our own also sums what the BatchNorm next to them needs.

A U-Net's first level is where maps are largest and channels fewest: cuDNN fetches each pixel nine times there, and
BatchNorm reads the whole map once more for its sums. `row_convolution_gluon` says how the kernel does without. It is
made for Hopper's tensor cores (H100, H200) alone; everything else is left to cuDNN, and gives the same but for the
order of sums.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.kernels.layout import CHANNELS, PIXELS
from halfstep.kernels.normalise import Norm, dense_like

LEAST_FILLED = 0.85  # of a strip's pixels that must lie in the image: what lies beside it is multiplied in vain
LEAST_ROWS = 32  # for a program: each fetches two rows more than it writes, and multiplies three
MOST_IDLE = 1.25
"""Times what a full device would take: beyond it cuDNN is asked. (1.06 and 1.13 were measured, and gained.)"""
COMPARED_ROWS = 5  # of a program, when the kernel is held against torch: all its buffers are used twice
FORMATS = (torch.bfloat16, torch.float16)


def row_convolution_fits(x: Tensor, w: Tensor, stride: int, padding: int) -> bool:
    """Whether the kernel can convolve x, a map or a gradient, with w, and fills the device."""
    is_centred = w.shape == (CHANNELS, CHANNELS, 3, 3) and (stride, padding) == (1, 1)
    if not is_centred or not x.is_cuda or x.dtype not in FORMATS or w.dtype != x.dtype:
        return False
    if not _is_dense(x) or not _is_dense(w):
        return False
    return _rows_each_or_none(x) is not None and works_on(x.device, x.dtype)


def convolved_rows(z: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution of z with w, and parts of its statistics as `normalise.normalisation` takes them."""
    from halfstep.kernels.row_convolution_gluon import convolve

    y = dense_like(z)
    return y, convolve(z, w, y, _rows_each(z))


def row_gradient(dy: Tensor, w: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The gradient of z = relu(y·scale + offset), convolved with w before, and parts for `normalise.finished_sums`."""
    from halfstep.kernels.row_convolution_gluon import input_gradient

    dz = dense_like(dy)
    return dz, input_gradient(dy, w, dz, y, (norm.mean, norm.scale, norm.offset), _rows_each(dy))


@functools.cache
def rows_for_each(num_images: int, height: int, width: int, num_processors: int) -> int | None:
    """How many rows a program takes, so that all end together; None where the image would leave processors idle."""
    num_strips = -(-width // PIXELS)
    if width < LEAST_FILLED * num_strips * PIXELS or height < LEAST_ROWS:
        return None
    choices = {-(-height // pieces) for pieces in range(1, height // LEAST_ROWS + 1)}

    def duration(rows: int) -> int:
        num_programs = num_images * num_strips * -(-height // rows)
        return -(-num_programs // num_processors) * (rows + 3)

    best = min(choices, key=lambda rows: (duration(rows), -rows))
    ideal = num_images * num_strips * height / num_processors
    return best if duration(best) < MOST_IDLE * ideal else None


@functools.cache
def works_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel compiles there and agrees with torch: its language is young, and changes."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        with _unwatched():
            _compare_with_torch(device, dtype)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # says nothing of the kernel: asked again next time
    except Exception as error:  # whatever a compiler of another version may raise
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(str(error)) from error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"3x3 convolutions run in cuDNN, our kernel does not work here: {reason}", stacklevel=2)
        return False
    return True


@contextmanager
def _unwatched() -> Iterator[None]:
    """Without complaints about waiting for the device, which a comparison has to, once."""
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:  # setting it warns, and warnings may be errors
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _compare_with_torch(device: torch.device, dtype: torch.dtype) -> None:
    """Both kernels, on two strips and twice some rows, each with a rest."""
    from halfstep.kernels.row_convolution_gluon import convolve, input_gradient

    z, w, y, norm = _examples(device, dtype)
    out, pixels, over = dense_like(z), (0, 2, 3), (slice(None), None, None)
    mean, scale, offset = norm

    def agree(what: str, ours: Tensor, exact: Tensor) -> None:
        def told(text: str) -> str:
            return f"its {what} is wrong, {text}"

        torch.testing.assert_close(ours.double(), exact.double(), rtol=0.02, atol=0.02, msg=told)

    exact = F.conv2d(z.double(), w.double(), padding=1)
    deviations, squares, shift, count = convolve(z, w, out, COMPARED_ROWS).unbind(1)
    agree("convolution", out, exact)
    stored = out.double()
    agree("sum", (deviations + shift * count).sum(0), stored.sum(pixels))
    agree("sum of squares", (squares + 2 * deviations * shift + shift**2 * count).sum(0), stored.square().sum(pixels))
    exact = F.conv_transpose2d(z.double(), w.double(), padding=1)
    sums = input_gradient(z, w, out, y, (mean, scale, offset), COMPARED_ROWS).sum(0)
    g = torch.where(y * scale[over] + offset[over] > 0, exact, 0)
    agree("gradient", out, exact)
    agree("sum of gradients", sums[0], g.sum(pixels))
    agree("sum of products", sums[1], (g * (y - mean[over])).sum(pixels))


def _examples(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A map, weights, a raw map, and mean, scale and offset."""
    generator, map_shape = torch.Generator(device).manual_seed(0), (1, CHANNELS, 2 * COMPARED_ROWS - 1, PIXELS + 1)
    shapes = map_shape, (CHANNELS, CHANNELS, 3, 3), map_shape, (3, CHANNELS)
    z, w, y, norm = (
        torch.randn(shape, device=device, dtype=torch.float32, generator=generator) / 8 for shape in shapes
    )
    z, w, y = (value.to(dtype, memory_format=torch.channels_last) for value in (z, w, y))
    return z, w, y, norm


def _is_dense(x: Tensor) -> bool:
    """channels_last without gaps, where the device's copies can begin."""
    _, channels, height, width = x.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return x.stride() == strides and x.data_ptr() % 16 == 0


def _rows_each(x: Tensor) -> int:
    rows = _rows_each_or_none(x)
    assert rows is not None
    return rows


def _rows_each_or_none(x: Tensor) -> int | None:
    n, _, height, width = x.shape
    return rows_for_each(n, height, width, torch.cuda.get_device_properties(x.device).multi_processor_count)
