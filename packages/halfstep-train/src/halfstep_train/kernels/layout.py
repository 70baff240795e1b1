"""The memory layout of maps, and the padded image that a first convolution reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


def get_row_stride(x: Tensor) -> int:
    """Return the number of values between adjacent pixels of a channels_last map, or of a slice of its channels."""
    n, c, height, width = x.shape
    # The stride of a dimension of size 1 is arbitrary: take the innermost dimension that is larger.
    stride = x.stride(3) if width > 1 else x.stride(2) if height > 1 else x.stride(0) if n > 1 else c
    dense = (height * width * stride, 1, width * stride, stride)
    is_rows = all(size == 1 or have == want for size, have, want in zip(x.shape, x.stride(), dense, strict=True))
    assert is_rows, f"not rows of channels: shape {tuple(x.shape)}, strides {x.stride()}"
    return stride


PIXEL = 4  # channels of a padded pixel: 8 bytes of a half format, the least that asynchronous copies move well


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of a square kernel on a padded image."""

    height: int
    width: int
    kernel: int
    stride: int
    padding: int

    @property
    def rows(self) -> int:
        """Return the height of the convolution's output."""
        return (self.height + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def columns(self) -> int:
        """Return the width of the convolution's output."""
        return (self.width + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def row_taps(self) -> int:
        """Return the values read for one kernel row: a power of two that matrix units support."""
        return max(16, 1 << (PIXEL * self.kernel - 1).bit_length())

    @property
    def padded_height(self) -> int:
        return self.height + 2 * self.padding

    @property
    def padded_width(self) -> int:
        """Return the width including what the last window reads; even, so that stride-2 windows are 16-byte aligned."""
        read = (self.columns - 1) * self.stride + self.row_taps // PIXEL
        needed = max(self.width + 2 * self.padding, read)
        return needed + needed % 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedImage:
    """An image padded with zeros, [N, padded_height, padded_width, PIXEL], and its original number of channels."""

    values: Tensor
    channels: int
    windows: Windows


# --- how maps, as rows × channels, are cut into tiles for the programs of a kernel ---


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile and grid sizes of a kernel, measured on a GPU."""

    values: int  # values of a tile: 8 per thread make a 16-byte access in a half format
    most_channels: int
    num_warps: int
    num_programs: int  # programs over a whole map, in multiples of an H200's 132 multiprocessors


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiling of rows × channels: `grid` programs, each of which processes tiles of `rows` × `channels`."""

    grid: tuple[int, int]
    rows: int
    channels: int
    num_warps: int

    @property
    def options(self) -> dict[str, int]:
        """Return the launch options common to all kernels."""
        return {"BR": self.rows, "BC": self.channels, "num_warps": self.num_warps}


def cut_tiles(num_rows: int, num_channels: int, tiling: Tiling) -> Tiles:
    """Return the tiling for a map of this size."""
    import triton  # imported here because Triton is optional: code that only reads layouts works without it

    channels = min(triton.next_power_of_2(num_channels), tiling.most_channels)
    rows, across = tiling.values // channels, triton.cdiv(num_channels, channels)
    # No more than num_programs in all: each program walks over several tiles of rows.
    down = min(triton.cdiv(num_rows, rows), max(1, tiling.num_programs // across))
    return Tiles((across, down), rows, channels, tiling.num_warps)


MOST_CLASSES, MOST_HEAD_CHANNELS = 8, 256
"""Limits of `Head` in unet_chain.py: it holds all channels of a pixel in registers and unrolls a loop over classes."""
