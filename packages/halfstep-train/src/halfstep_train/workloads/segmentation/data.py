"""Read pairs of images and masks: `imgs/<id>.<ext>` + `masks/<id>_mask.<ext>`, and other layouts.

The pairs are found and split, every file is scanned once for sizes, kinds and mask values, and samples are then read by
index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from halfstep.errors import DataError, make_printable, suggest_nearest
from halfstep_train.config.section import fill_from_settings
from halfstep_train.data.files import (
    ARRAY_ENDINGS,
    VALIDATION_NAMES,
    Array,
    BadFiles,
    list_images,
    list_some,
    load_array,
    make_natural_key,
    require_folder,
    split_off,
)
from halfstep_train.data.images import (
    ImageFacts,
    RawRange,
    measure_raw_range,
    move_channels_last,
    open_image,
    read_image,
    read_image_facts,
    resize_image,
    to_bytes,
)
from halfstep_train.data.layouts import ID, NamePattern, PairLayout, PairNames, find_layout
from halfstep_train.data.sample_cache import CACHE_BYTES, SampleCache
from halfstep_train.workloads.segmentation.config import UNetDataConfig

# --- masks ---


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
                fix="correct the mask, or set the value to ignore",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One image and its mask."""

    id: str
    image: Path
    mask: Path
    """A file, or a folder with one file per object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundPairs:
    """The pairs of a data folder, and facts that follow from its layout."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...]
    layout: str
    """The folders of the pairs, and the name of the data set if it is known."""
    ignored: int | None = None
    """The mask value of unlabelled pixels, if the layout has one."""
    has_background: bool = True


def find_pairs(data: UNetDataConfig, bad_files: BadFiles) -> FoundPairs:
    """Find the training and validation pairs at `data.dir`."""
    root = require_folder(data.dir)
    folder, found = find_layout(root, fill_from_settings(PairLayout, data))
    parts = [names for names in (found.train, found.val) if names]
    pairs = [_match_pairs(folder, names, bad_files, some_without_masks=found.some_without_masks) for names in parts]
    for path in _find_unpaired_masks(folder, parts, pairs):
        bad_files.report(_make_unpaired_error(path, f"an image {found.train.images}"))
    inside, has_lists = "" if folder == root else f" in {folder.relative_to(root)}/", data.train_list or data.val_list
    where = f"{found.name}{': ' if found.name else ''}{found.train}{inside}"
    if found.lists and not has_lists:
        lists = [str(folder / name) for name in found.lists]
        data = data.model_copy(update={"train_list": lists[0], "val_list": lists[1]})
        where += f"; split by {found.lists[0]} and {found.lists[1]}"
    elif found.val is None and not has_lists:
        where += _note_unused_list(folder)
    if found.val is None or has_lists:
        train, val = split_pairs([pair for part in pairs for pair in part], data)
    else:
        train, val = pairs
        where += f"; validation: {found.val}"
    return FoundPairs(train=train, val=val, layout=where, ignored=found.ignored, has_background=found.has_background)


def _note_unused_list(folder: Path) -> str:
    """Return a note about a validation list that the layout does not use."""
    path = next((path for name in VALIDATION_NAMES if (path := folder / f"{name}.txt").is_file()), None)
    return f"; {path.name} is not used: data.val_list={path} would split by it" if path else ""


def _match_pairs(root: Path, names: PairNames, bad_files: BadFiles, *, some_without_masks: bool) -> tuple[Pair, ...]:
    """Match the images of a split with their masks, in natural order; report images without a mask as bad files."""
    image_names, mask_names = NamePattern(names.images), [NamePattern(text) for text in names.masks]
    images = _find_one_each(root, image_names, "data.images")
    masks = [_find_one_each(root, pattern, "data.masks") for pattern in mask_names]
    for pattern, found in ((image_names, images), (mask_names[-1], any(masks))):
        if not found:
            folder = root / pattern.base
            raise DataError(
                f"no file in {folder} is called {pattern.text}",
                # Listing the images raises if there are none at all.
                why=f"it contains {list_some(path.name for path in list_images(folder))}",
                fix="check data.images and data.masks",
            )
    are_masks = set(masks[0].values())  # images and masks may be in the same folder
    pairs = []
    for name, image in images.items():
        # The first pattern that finds a mask wins. If both are in one folder, an image is not its own mask.
        mask = next((found[name] for found in masks if found.get(name, image) != image), None)
        if mask is not None:
            pairs.append(Pair(id=name, image=image, mask=mask))
        elif not (some_without_masks or image in are_masks):
            wanted = " or ".join(text.replace(ID, name) + ".*" for text in names.masks)
            bad_files.report(_make_unpaired_error(image, wanted))
    if not pairs:
        raise DataError(
            f"no image in {root / image_names.base} has a mask",
            fix="name them by patterns: data.images=imgs/{id}.png data.masks=masks/{id}_seg.png",
        )
    return tuple(pairs)


def _find_unpaired_masks(root: Path, parts: Sequence[PairNames], pairs: Sequence[Sequence[Pair]]) -> list[Path]:
    """Find masks without an image in any split. Splits may share a mask folder, and masks may be in the image
    folder."""
    is_used: dict[Path, bool] = {}
    for names, part in zip(parts, pairs, strict=True):
        ids = {pair.id for pair in part}
        for text in names.masks:
            for name, path in NamePattern(text).iterate(root):
                is_used[path] = is_used.get(path, False) or name in ids
    images = {pair.image for part in pairs for pair in part}
    return sorted(path for path, used in is_used.items() if not used and path not in images)


def split_pairs(pairs: Sequence[Pair], data: UNetDataConfig) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Split by lists if given, otherwise at random; the same pairs give the same split."""
    if data.train_list or data.val_list:
        return _split_by_lists(pairs, data)
    if data.val_fraction <= 0:
        return tuple(pairs), ()
    if len(pairs) < 2:
        raise DataError(
            f"only one image ({pairs[0].image}): nothing is left for validation",
            why="validating on training images would measure nothing",
            fix="add images, or train without validation: data.val_fraction=0",
        )
    train, val = split_off(pairs, data.val_fraction, seed=0)
    return tuple(train), tuple(val)


def _split_by_lists(pairs: Sequence[Pair], data: UNetDataConfig) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Split by one or both lists; without one of them, the other images form that split."""
    val = _read_list(pairs, data.val_list)
    train = _read_list(pairs, data.train_list)
    if data.val_list is None:
        val = tuple(pair for pair in pairs if pair not in train)
    if data.train_list is None:
        train = tuple(pair for pair in pairs if pair not in val)
    both = sorted({pair.id for pair in train} & {pair.id for pair in val}, key=make_natural_key)
    if both:
        raise DataError(
            f"images in both lists: {list_some(both)}", why="validating on training images would measure nothing"
        )
    if not train:
        raise DataError("the lists leave no image to train on", fix="check data.train_list and data.val_list")
    return train, val


def _read_list(pairs: Sequence[Pair], file: str | None) -> tuple[Pair, ...]:
    """Return the pairs that a text file lists, by file name or id."""
    if file is None:
        return ()
    path = Path(file)
    if not path.is_file():
        raise DataError(f"no list of ids at {path}", fix="give a text file with one id per line")
    by_name = {name: pair for pair in pairs for name in (pair.image.name, pair.image.stem, pair.id)}
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    wanted = dict.fromkeys(line for line in lines if line and not line.startswith("#"))
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise DataError(
            f"{path} lists {list_some(unknown)}, but there is no pair of that name",
            fix=suggest_nearest(unknown[0], by_name),
        )
    return tuple(dict.fromkeys(by_name[name] for name in wanted))


def _find_one_each(root: Path, names: NamePattern, key: str) -> dict[str, Path]:
    """Return the file of each id; raise DataError if an id has several extensions. `key` is the setting that
    chooses."""
    found: dict[str, Path] = {}
    in_order = sorted(names.iterate(root), key=lambda one: make_natural_key(one[1].relative_to(root).as_posix()))
    for name, path in in_order:
        if (first := found.setdefault(name, path)) != path:
            raise DataError(
                f"{first} and {path.name} have the same id {name}",
                why="halfstep cannot tell which one to use",
                fix=f"choose an extension: {key}={names.text}{first.suffix} (or {path.suffix})",
            )
    return found


def _make_unpaired_error(path: Path, wanted: str) -> DataError:
    return DataError(
        f"{path} has no partner",
        why=f"it needs {wanted}",
        fix="add it, name both by patterns (data.masks=masks/{id}_seg.png), or skip such files: data.on_bad_file=skip",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFormat:
    """The format of images, stored with a checkpoint so that later images are read as in training."""

    size: tuple[int, int]
    channels: int = 3
    is_float: bool = False
    """Whether some image has more than 8 bits; all images are then float32."""
    raw_scale: float | None = None
    """Divisor of float and 32-bit images; None if the training data has none."""


class SegmentationData:
    """Samples of pairs: `image` (C, H, W) uint8 or float32, `mask` (H, W) uint8. Cached in memory if all fit."""

    def __init__(
        self, pairs: Sequence[Pair], *, table: MaskTable, image: ImageFormat, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.pairs, self.table, self.image = tuple(pairs), table, image
        image_dtype = np.dtype(np.float32 if image.is_float else np.uint8)
        self._cache = SampleCache(
            len(self.pairs),
            fields={"image": ((image.channels, *image.size), image_dtype), "mask": (image.size, np.dtype(np.uint8))},
            limit_bytes=cache_bytes,
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """Return sample `index`. The key is not used: augmentation runs on the device."""
        pair = self.pairs[index]

        def read() -> dict[str, Array]:
            mask = resize_mask(read_mask(pair.mask), self.image.size)
            return {"image": read_planes(pair.image, self.image), "mask": self.table.to_classes(mask, pair.mask)}

        return self._cache.get_or_read(index, read)

    def name_of(self, index: int) -> str:
        """Return the file name of the image."""
        return make_printable(self.pairs[index].image.name)

    def files(self) -> Iterator[Path]:
        """Return all files of images and masks."""
        return (path for pair in self.pairs for path in (pair.image, *list_mask_files(pair.mask)))


def read_planes(path: Path, image: ImageFormat) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Read one image file as (C, H, W) in the format of the training data."""
    array = read_image(path, channels=image.channels, raw_scale=image.raw_scale)
    # All images must have the same dtype: bytes become floats in 0..1 if any image is float.
    if not image.is_float:
        array = to_bytes(array)
    elif array.dtype == np.uint8:
        array = array.astype(np.float32) / 255
    # A copy: Pillow's array is read-only.
    return np.array(np.moveaxis(resize_image(array, image.size), -1, 0), order="C")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """The result of scanning every file."""

    pairs: tuple[Pair, ...]
    sizes: tuple[tuple[int, int], ...]
    channels: int
    """Largest number of channels of any image; gray images are expanded to colour if there are any."""
    is_float: bool
    raw: dict[Path, RawRange]
    """Value ranges of images whose scale depends on the data set (float and 32-bit)."""


def scan_pairs(pairs: Sequence[Pair], *, bad_files: BadFiles) -> Scan:
    """Read all headers. If bad files are to be skipped, decode all pixels: only that finds every bad file."""
    found = bad_files.try_each(partial(_inspect, is_thorough=bad_files.mode == "skip"), pairs)
    bad_files.refuse_empty_split("training", len(pairs), len(found))
    raw_images = [pair.image for pair, facts in found if facts.kind == "raw"]
    return Scan(
        pairs=tuple(pair for pair, _ in found),
        sizes=tuple(facts.size for _, facts in found),
        channels=max(facts.channels for _, facts in found),
        is_float=any(facts.kind != "uint8" for _, facts in found),
        raw=dict(bad_files.try_each(measure_raw_range, raw_images)),
    )


def collect_values(pairs: Sequence[Pair], *, bad_files: BadFiles) -> set[MaskValue]:
    """Return all values that occur in the masks, which are all decoded; the run stores the result."""
    found = bad_files.try_each(read_values, [pair.mask for pair in pairs])
    return {value for _, values in found for value in values}


def _inspect(pair: Pair, *, is_thorough: bool) -> ImageFacts:
    """Return facts about an image; raise DataError if its mask has another size, or if `is_thorough` and one of them
    cannot be decoded."""
    # The files of a folder with one mask per object have one size.
    image, mask = read_image_facts(pair.image), read_image_facts(list_mask_files(pair.mask)[0])
    if image.size != mask.size:
        raise DataError(
            f"{pair.image} is {_format_size(image.size)}, but its mask {pair.mask.name} is {_format_size(mask.size)}",
            why="each pixel of the image needs a class",
            fix="export both at one size, or leave such pairs out: data.on_bad_file=skip",
        )
    if is_thorough:
        read_image(pair.image, channels=image.channels, raw_scale=1.0)
        read_values(pair.mask)
    return image


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[1]}×{size[0]} pixels"
