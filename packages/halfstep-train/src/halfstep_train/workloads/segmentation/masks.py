"""Convert masks to class maps and back, by a table of the gray value or colour of each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.errors import DataError
from halfstep_train.data.files import ARRAY_ENDINGS, Array, list_images, list_some, load_array
from halfstep_train.data.images import move_channels_last, open_image

MaskValue = int | tuple[int, int, int]

IGNORED = 255
"""Class of pixels that count neither in the loss nor in the metrics; the largest uint8."""
FOREGROUND = 255
"""Mask value of objects whose masks are separate files in a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskTable:
    """The gray value or RGB colour of each class, in order, and the value of pixels to ignore."""

    values: tuple[MaskValue, ...]
    ignored: MaskValue | None = None

    @property
    def is_colour(self) -> bool:
        """True if any class is an RGB colour."""
        return any(isinstance(value, tuple) for value in (*self.values, self.ignored))

    def to_classes(self, mask: Array, path: Path) -> Array:
        """Return the class map (uint8) of a mask; raise DataError for values that are not in the table."""
        # A colour mask is encoded as colours even if the classes are gray values.
        colour = self.is_colour or mask.ndim == 3
        codes = _encode(mask, colour=colour)
        known = [*self.values, *([] if self.ignored is None else [self.ignored])]
        known_codes = np.array([_encode(np.array([[value]]), colour=colour).item() for value in known])
        # Look up all pixels by binary search in the sorted codes.
        order = np.argsort(known_codes)
        found = order[np.searchsorted(known_codes, codes, sorter=order).clip(max=len(known) - 1)]
        wrong = known_codes[found] != codes
        if wrong.any():
            unknown = [_decode_value(int(code), colour=colour) for code in np.unique(codes[wrong])]
            raise DataError(
                f"{path} has the unknown mask value {list_some(unknown)}",
                why=f"the classes are {list_some(self.values, 8)}",
                fix="correct the mask, or name the value to ignore",
            )
        return np.where(found == len(self.values), IGNORED, found).astype(np.uint8)

    def to_mask(self, classes: Array) -> Array:
        """Convert a class map to a mask with the original values: (H, W) uint8 or uint16, or (H, W, 3) uint8."""
        if self.is_colour:
            return np.array([to_colour(value) for value in self.values], dtype=np.uint8)[classes]
        values = np.array(self.values)
        return values.astype(np.uint8 if values.max() < 256 else np.uint16)[classes]


def parse_table(values: Sequence[Any], *, ignored: Any = None) -> MaskTable:
    """Make a table from plain lists, as in JSON or a config."""
    parsed = [tuple(value) if isinstance(value, list) else value for value in (*values, ignored)]
    return MaskTable(values=tuple(parsed[:-1]), ignored=parsed[-1])


def list_mask_files(path: Path) -> list[Path]:
    """Return the files of a mask: the file itself, or all files of a folder with one file per object."""
    return list_images(path) if path.is_dir() else [path]


def read_mask(path: Path) -> Array:
    """Read a mask: (H, W) integers, or (H, W, 3) uint8 if the channels differ. Palette images give their indices.

    A folder holds one file per object, all of one class: its mask is 255 where any file is not 0.
    """
    if path.is_dir():
        shown = [np.atleast_3d(read_mask(file)).any(axis=2) for file in list_mask_files(path)]
        return np.where(np.any(shown, axis=0), FOREGROUND, 0).astype(np.uint8)
    if path.suffix.lower() in ARRAY_ENDINGS:
        array = move_channels_last(load_array(path), path)
    else:
        with open_image(path) as image:
            # Gray values and palette indices are used as they are; other modes (CMYK, ...) become RGB.
            direct = image.mode in ("1", "L", "P", "LA", "PA", "RGB", "RGBA", "F") or image.mode[0] == "I"
            array = np.asarray(image if direct else image.convert("RGB"))
        array = array[..., None] if array.ndim == 2 else array
    if array.shape[2] in (3, 4):
        colour = np.asarray(array[..., :3])
        is_gray = (colour == colour[..., :1]).all()
        return colour[..., 0] if is_gray else colour
    return _to_integers(np.asarray(array[..., 0]), path)


def read_values(path: Path) -> list[MaskValue]:
    """Return the distinct values of one mask, sorted."""
    mask = read_mask(path)
    colour = mask.ndim == 3
    if mask.dtype == np.uint8 and not colour:
        found = np.flatnonzero(np.bincount(mask.ravel()))  # many times faster than np.unique, which sorts
    else:
        found = np.unique(_encode(mask, colour=colour))
    if len(found) > 2 and path.suffix.lower() in (".jpg", ".jpeg"):
        raise DataError(
            f"{path} has {len(found)} different values",
            why="JPEG is lossy: it blurs the classes at every edge",
            fix="save masks as PNG",
        )
    return [_decode_value(int(code), colour=colour) for code in found]


def make_table(values: Iterable[MaskValue], *, ignored: MaskValue | None = None) -> MaskTable:
    """Return the table of all values of a data set, sorted. If some are colours, gray values become colours too."""
    seen = set(values)
    if any(isinstance(value, tuple) for value in seen):
        seen = {to_colour(value) for value in seen}
        ignored = None if ignored is None else to_colour(ignored)
    classes = sorted(seen - {ignored}, key=lambda value: value if isinstance(value, tuple) else (value,))
    if len(classes) >= IGNORED:
        raise DataError(
            f"the masks have {len(classes)} different values: {list_some(classes)}",
            why="these cannot be classes; lossy compression or smooth edges produce such values",
            fix="save masks as PNG with one value per class",
        )
    return MaskTable(values=tuple(classes), ignored=ignored)


def to_colour(value: MaskValue) -> tuple[int, int, int]:
    """Return the RGB colour of a mask value; gray values have three equal channels."""
    return value if isinstance(value, tuple) else (value, value, value)


def resize_mask(mask: Array, size: tuple[int, int]) -> Array:
    """Resize a mask or class map by nearest neighbour: values cannot be interpolated."""
    sides = zip(size, mask.shape[:2], strict=True)
    rows, columns = (((np.arange(new) + 0.5) * (old / new)).astype(np.int64) for new, old in sides)
    return mask if mask.shape[:2] == size else mask[rows][:, columns]


def _to_integers(array: Array, path: Path) -> Array:
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        if not (np.isfinite(array).all() and (array == array.round()).all()):
            raise DataError(f"{path} has fractions or NaN", why="mask values name classes, so they must be integers")
        return array.astype(np.int64)
    return array


def _encode(mask: Array, *, colour: bool) -> Array:
    """Return one integer per pixel: 24-bit RGB with `colour`, otherwise the gray value."""
    wide = mask.astype(np.int64)
    if mask.ndim == 3:
        return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]
    return wide * 0x010101 if colour else wide


def _decode_value(code: int, *, colour: bool) -> MaskValue:
    return (code >> 16 & 255, code >> 8 & 255, code & 255) if colour else code
