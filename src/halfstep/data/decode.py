"""Picture files as 8-bit RGB: JPEG, PNG, WebP and whatever else Pillow reads, in any colour mode and orientation.

A JPEG can be decoded at a half, a quarter or an eighth of its size for a fraction of the time; who needs fewer
pixels than the file has says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from halfstep.data.files import UNREADABLE, unreadable
from halfstep.data.images import SIXTEEN_BIT_MODES
from halfstep.errors import DataError

ORIENTATION = 0x0112
"""The EXIF tag; values 5 to 8 turn the picture by a quarter."""
JPEG_REDUCTIONS = (8, 4, 2)
MAX_PIXELS = 178_956_970
"""Pillow's own limit of a decompression bomb: a file of a few kilobytes may claim gigabytes of pixels."""


class Picture:
    """An open picture file: `size` is known at once, pixels are decoded by `rgb`."""

    def __init__(self, path: Path, image: Image.Image) -> None:
        self.path, self._image = path, image
        # Reading EXIF of a PNG decodes the whole picture; cameras write JPEG.
        self._orientation = image.getexif().get(ORIENTATION, 1) if image.format in ("JPEG", "MPO", "WEBP") else 1
        width, height = image.size
        self.size = (height, width) if self._orientation >= 5 else (width, height)
        """Width and height as the picture is meant to be seen."""

    def close(self) -> None:
        """Let go of file and pixels."""
        self._image.close()

    def rgb(self, *, reduction: float = 1.0) -> Image.Image:
        """All pixels, upright; up to `reduction` times smaller where the file can be decoded so."""
        try:
            factor = next((k for k in JPEG_REDUCTIONS if k <= reduction), 1)
            if factor > 1 and self._image.format == "JPEG":
                self._image.draft(None, (self._image.width // factor, self._image.height // factor))
            upright = ImageOps.exif_transpose(self._image) if self._orientation != 1 else self._image
            return _to_rgb(upright)
        except UNREADABLE as error:
            raise unreadable(self.path, error) from error


@contextmanager
def open_picture(path: Path) -> Iterator[Picture]:
    """Read the header of a picture file; what is not a picture, or too large to be safe, is an error that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # half the limit below
            image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path} claims more than {MAX_PIXELS:,} pixels",
            why="decoding it could use up the memory of the machine",
            fix="shrink the picture, or leave such files out: data.on_bad_file=skip",
        ) from error
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    with image:
        if image.mode in ("I", "F") and image.format != "PNG":
            raise unreadable(path, ValueError(f"pixels of 32 bits (mode {image.mode}) have no defined brightness"))
        yield Picture(path, image)


def check_picture(path: Path) -> None:
    """Decode every pixel, at the smallest scale: only that finds every broken file."""
    with open_picture(path) as picture:
        picture.rgb(reduction=math.inf)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in (*SIXTEEN_BIT_MODES, "I"):  # a PNG of 16 bits may open as I
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")
