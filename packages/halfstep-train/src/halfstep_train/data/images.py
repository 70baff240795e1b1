"""Read image files, in two forms.

`read_image` returns (H, W, C) arrays of any bit depth and channel count, for segmentation, radio maps and videos:
uint8, or float32 where 8 bits would lose something. The scale follows from the file's type or, for plain floats, from
the whole data set; never from one image's brightest pixel, which would lift a nearly black image into noise.

`open_image_file` gives upright 8-bit RGB, for classification and diffusion. A JPEG can be decoded at a half, a quarter
or an eighth of its size for a fraction of the time, so callers pass how many pixels they need.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

from halfstep.errors import DataError, format_count
from halfstep_train.data.files import ARRAY_ENDINGS, UNREADABLE, Array, list_some, load_array, make_unreadable_error

Kind = Literal["uint8", "uint16", "raw"]
"""raw: floats and wide integers, whose scale depends on the whole data set."""

COLOUR_CHANNELS = (1, 3, 4)
SIXTEEN_BIT_MODES = ("I;16", "I;16B", "I;16L", "I;16N")
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R 601, as Pillow converts


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """The facts in an image's header, read without decoding pixels."""

    size: tuple[int, int]
    """Height and width."""
    channels: int
    """1 for gray, 3 for colour (ignoring transparency), or an array's own count."""
    kind: Kind


def read_image_facts(path: Path) -> ImageFacts:
    """Return size, channels and kind of an image or mask file."""
    if path.suffix.lower() in ARRAY_ENDINGS:
        array = move_channels_last(load_array(path), path)
        channels = 3 if array.shape[2] == 4 else array.shape[2]
        return ImageFacts(size=(array.shape[0], array.shape[1]), channels=channels, kind=_classify_array(array))
    with open_image(path) as image:
        channels = 1 if image.mode[0] in "1LIF" and image.mode != "LAB" else 3
        return ImageFacts(size=(image.height, image.width), channels=channels, kind=_classify_image(image))


@contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image file with Pillow; an error while opening or decoding it becomes one that names the file."""
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE as error:
        raise make_unreadable_error(path, error) from error


def read_image(path: Path, *, channels: int, raw_scale: float | None = None) -> Array:
    """Decode to (H, W, channels): uint8 in 0..255, or float32: 16-bit values over 65535, raw ones over `raw_scale`."""
    array, kind = _decode(path)
    if kind == "uint16":  # 8 bits would lose half of them
        array = array.astype(np.float32) / 65535
    elif kind == "raw":
        values = _require_finite(array, path)
        if raw_scale is None:
            raise DataError(
                f"{path} contains {array.dtype} pixels, and their value range is unknown",
                why="unlike 8 and 16 bits, this type does not define which value is white",
                fix="save it with 8 or 16 bits; for U-Net, train with data.scale=<value of white>",
            )
        array = values / np.float32(raw_scale)
    return _convert_channels(array, channels, path)


def to_bytes(pixels: Array) -> Array:
    """Convert floats in 0..1 to uint8 in 0..255; uint8 stays as it is."""
    return pixels if pixels.dtype == np.uint8 else (pixels * 255).round().clip(0, 255).astype(np.uint8)


# --- the scale of raw images ---
# A divisor for all files of a set. It follows from what is typical: one hot pixel, an overshoot of interpolation or one
# odd file must not change how every other image is read. Such values are named, and kept as they are.

USUAL = 0.999
"""Share of a file's values considered typical; the rest may be outliers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRange:
    """Magnitudes of one raw image's values; zeros do not count, since they are 0 at any scale."""

    usual: float
    largest: float
    is_signed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RawScale:
    """The divisor for the raw images of a data set, and why."""

    scale: float
    usual: float
    """The typical file's largest usual value."""
    limit: float
    """Larger values are outliers."""


def measure_raw_range(path: Path) -> RawRange:
    """Measure a raw image, to choose the data set's scale."""
    array = _require_finite(_decode(path)[0], path)
    values = array[array != 0]
    if not values.size:
        return RawRange(usual=0.0, largest=0.0, is_signed=False)
    sizes = np.abs(values)
    # Rounded away from the ends: of a small image, too, one pixel alone decides nothing.
    return RawRange(
        usual=float(np.quantile(sizes, USUAL, method="lower")),
        largest=float(sizes.max()),
        is_signed=bool(np.quantile(values, 1 - USUAL, method="higher") < 0),
    )


def choose_scale(ranges: Iterable[RawRange]) -> RawScale:
    """Choose the scale of a data set by its median file.

    Negative values: normalised data, kept unchanged. About 0..1, overshoots included: unchanged. Up to 255: bytes
    stored as floats. Otherwise the largest value that is not an outlier becomes 1.
    """
    seen = [one for one in ranges if one.largest]
    if not seen:
        return RawScale(scale=1.0, usual=0.0, limit=1.0)
    usual = median_high(one.usual for one in seen)
    far = 10 * usual
    if median_high(one.is_signed for one in seen):
        return RawScale(scale=1.0, usual=usual, limit=far)
    if usual <= 2:  # bytes of which 99.9 % are at most 2 would be black
        return RawScale(scale=1.0, usual=usual, limit=1.0 if usual <= 1 else far)
    if usual <= 255:
        return RawScale(scale=255.0, usual=usual, limit=255.0)
    largest = max((one.largest for one in seen if one.largest <= far), default=usual)
    return RawScale(scale=largest, usual=usual, limit=far)


def describe_outliers(ranges: Mapping[Path, RawRange], limit: float) -> list[str]:
    """Return a note naming the files with values beyond `limit`."""
    beyond = [path for path, one in ranges.items() if one.largest > limit]
    if not beyond:
        return []
    largest = max(one.largest for one in ranges.values())
    return [
        f"outlying values (beyond {limit:g}, magnitudes up to {largest:g}) in "
        f"{format_count(len(beyond), 'float image')}: "
        f"{list_some(path.name for path in beyond)}; they stay as they are and do not change the scale (data.scale)"
    ]


def _require_finite(array: Array, path: Path) -> Array:
    """Return raw values as float32; raise for NaN and infinity."""
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes infinite and is counted
        array = array.astype(np.float32)
    num_bad = array.size - int(np.isfinite(array).sum())
    if num_bad:
        raise DataError(
            f"{path} has NaN, infinity or numbers beyond the range of fp32 ({format_count(num_bad, 'value')})",
            why="a single one makes the loss of the whole batch NaN",
            fix="repair the file, or leave bad files out: data.on_bad_file=skip",
        )
    return array


def resize_image(image: Array, size: tuple[int, int]) -> Array:
    """Resize bicubically, with antialiasing when shrinking; floats stay inside their range."""
    if image.shape[:2] == size:
        return image
    # Plane by plane: Pillow resizes floats and more than four channels only as single planes.
    planes = [
        np.asarray(Image.fromarray(np.ascontiguousarray(image[..., c])).resize(size[::-1], Image.Resampling.BICUBIC))
        for c in range(image.shape[2])
    ]
    resized = np.stack(planes, axis=-1)
    # Bicubic overshoots at edges; Pillow clips bytes itself.
    return resized if image.dtype == np.uint8 else resized.clip(image.min(), image.max())


def move_channels_last(array: Array, path: Path) -> Array:
    """Return an array file's (H, W), (H, W, C) or (C, H, W) as (H, W, C)."""
    if array.ndim == 2:
        return array[..., None]
    if array.ndim == 3 and array.shape[0] in COLOUR_CHANNELS and array.shape[2] not in COLOUR_CHANNELS:
        return np.moveaxis(array, 0, -1)
    if array.ndim != 3:
        raise DataError(f"{path} has shape {array.shape}", why="an image is (H, W), (H, W, C) or (C, H, W)")
    return array


def _decode(path: Path) -> tuple[Array, Kind]:
    if path.suffix.lower() in ARRAY_ENDINGS:
        array = move_channels_last(load_array(path), path)
        kind = _classify_array(array)
        return (array * np.uint8(255) if array.dtype == np.bool_ else array), kind
    with open_image(path) as image:
        kind = _classify_image(image)
        is_plain = kind != "uint8" or image.mode in ("L", "RGB", "RGBA")
        array = np.asarray(image if is_plain else image.convert(_choose_plain_mode(image)))
    return (array[..., None] if array.ndim == 2 else array), kind


def _classify_array(array: Array) -> Kind:
    if array.dtype in (np.uint8, np.bool_):
        return "uint8"
    return "uint16" if array.dtype == np.uint16 else "raw"


def _classify_image(image: Image.Image) -> Kind:
    # Older Pillow opens 16-bit PNGs as 32-bit integers; PNG itself has nothing wider than 16.
    if image.mode in SIXTEEN_BIT_MODES or (image.mode == "I" and image.format == "PNG"):
        return "uint16"
    return "raw" if image.mode in ("I", "F") else "uint8"


def _choose_plain_mode(image: Image.Image) -> str:
    if image.mode == "P":
        return "RGBA" if "transparency" in image.info else "RGB"
    return {"1": "L", "LA": "L", "La": "L"}.get(image.mode, "RGB")


def _convert_channels(array: Array, channels: int, path: Path) -> Array:
    have = array.shape[2]
    if have == 4 and channels in (1, 3):  # drop transparency
        array, have = array[..., :3], 3
    if have == 1 and channels in (3, 4):
        return np.repeat(array, channels, axis=2)
    if have == 3 and channels == 1:
        gray = array.astype(np.float32) @ LUMA
        return (gray.round().astype(np.uint8) if array.dtype == np.uint8 else gray)[..., None]
    if have == channels:
        return array
    raise DataError(
        f"{path} has {have} channels, but the model takes {channels}",
        why="only gray, RGB and RGBA can be converted",
        fix=f"data.channels={have}, or use files with the same channels",
    )


ORIENTATION = 0x0112
"""EXIF tag; values 5 to 8 rotate the image by a quarter turn."""
JPEG_REDUCTIONS = (8, 4, 2)


class ImageFile:
    """An open image file: `size` is known at once, `to_rgb` decodes the pixels."""

    def __init__(self, path: Path, image: Image.Image) -> None:
        self.path, self._image = path, image
        # Reading EXIF of a PNG decodes the whole image; cameras write JPEG.
        self._orientation = image.getexif().get(ORIENTATION, 1) if image.format in ("JPEG", "MPO", "WEBP") else 1
        width, height = image.size
        self.size = (height, width) if self._orientation >= 5 else (width, height)
        """Width and height as the image is meant to be seen."""

    def close(self) -> None:
        """Release file and pixels."""
        self._image.close()

    def to_rgb(self, *, reduction: float = 1.0) -> Image.Image:
        """Return all pixels, upright, up to `reduction` times smaller if the file can be decoded so."""
        try:
            # The decoder skips high frequencies: a reduced decode costs a fraction and is antialiased.
            factor = next((k for k in JPEG_REDUCTIONS if k <= reduction), 1)
            if factor > 1 and self._image.format == "JPEG":
                self._image.draft(None, (self._image.width // factor, self._image.height // factor))
            upright = ImageOps.exif_transpose(self._image) if self._orientation != 1 else self._image
            return _to_rgb(upright)
        except UNREADABLE as error:
            raise make_unreadable_error(self.path, error) from error


@contextmanager
def open_image_file(path: Path) -> Iterator[ImageFile]:
    """Read the header of an image file; raise an error with its name if it is not an image or too large to be safe."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of images of half the size that it refuses as too large for the memory.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
    except UNREADABLE as error:
        raise make_unreadable_error(path, error) from error
    with image:
        if image.mode in ("I", "F") and image.format != "PNG":
            raise make_unreadable_error(
                path, ValueError(f"32-bit pixels (mode {image.mode}) have no defined white level")
            )
        yield ImageFile(path, image)


def check_image_file(path: Path) -> None:
    """Decode every pixel at the smallest scale: only that finds every broken file."""
    with open_image_file(path) as file:
        file.to_rgb(reduction=math.inf)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in (*SIXTEEN_BIT_MODES, "I"):  # a PNG of 16 bits may open as I
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")
