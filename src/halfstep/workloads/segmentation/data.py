"""Segmentation samples from pairs of files: scanned once for sizes, kinds and mask values, then read by index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.data.cache import CACHE_BYTES, SampleCache
from halfstep.data.files import BadFiles, Item, Result, in_threads
from halfstep.data.images import ImageFacts, RawRange, image_facts, raw_range, read_image, resize_image
from halfstep.errors import DataError, make_printable
from halfstep.workloads.segmentation.masks import (
    MaskTable,
    MaskValue,
    mask_facts,
    mask_files,
    read_mask,
    resize_mask,
    values_in,
)
from halfstep.workloads.segmentation.pairs import Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFormat:
    """What every image becomes: stored with a checkpoint, so that a later image is treated as the training ones."""

    size: tuple[int, int]
    channels: int = 3
    is_float: bool = False
    """Some image has more than 8 bits, so all travel as float32."""
    raw_scale: float | None = None
    """What floats and wide integers are divided by; None where the training data held none."""


class SegmentationData:
    """Pairs as samples: `image` (C, H, W) uint8 or float32, `mask` (H, W) uint8; kept in RAM where all fit."""

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
        """Sample `index`; the key (seed, epoch, index) is not needed, since augmentation runs on the device."""
        arrays = self._cache.get(index)
        if arrays is None:
            pair = self.pairs[index]
            arrays = {"image": read_planes(pair.image, self.image), "mask": self._read_classes(pair)}
            self._cache.put(index, arrays)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def name_of(self, index: int) -> str:
        """The image's file name; its mask is named after it."""
        return make_printable(self.pairs[index].image.name)

    def files(self) -> Iterator[Path]:
        """Every image with its mask."""
        return (path for pair in self.pairs for path in (pair.image, *mask_files(pair.mask)))

    def _read_classes(self, pair: Pair) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return self.table.classes_of(resize_mask(read_mask(pair.mask), self.image.size), pair.mask)


def read_planes(path: Path, image: ImageFormat) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One image file as (C, H, W) in the format of the training data."""
    array = read_image(path, channels=image.channels, raw_scale=image.raw_scale)
    if image.is_float and array.dtype == np.uint8:
        array = array.astype(np.float32) / 255
    elif not image.is_float and array.dtype != np.uint8:
        array = (array * 255).round().clip(0, 255).astype(np.uint8)
    return np.array(np.moveaxis(resize_image(array, image.size), -1, 0), order="C")  # a copy: Pillow's is read-only


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What a look at every file found."""

    pairs: tuple[Pair, ...]
    sizes: tuple[tuple[int, int], ...]
    channels: int
    """The most that any image has: gray ones join colour ones."""
    is_float: bool
    raw: dict[Path, RawRange]
    """The images whose scale the data set decides."""


def scan_pairs(pairs: Sequence[Pair], *, bad_files: BadFiles) -> Scan:
    """Read every header; where bad files are to be left out, every pixel, since only that finds them all."""
    inspect = _inspect_fully if bad_files.mode == "skip" else _inspect
    found = [(pair, facts) for pair, facts in _for_each(inspect, pairs, bad_files) if facts is not None]
    if not found:
        raise DataError("no usable pair of image and mask is left", why=f"{len(bad_files.skipped)} were left out")
    raw_images = [pair.image for pair, facts in found if facts.kind == "raw"]
    ranges = _for_each(raw_range, raw_images, bad_files)
    return Scan(
        pairs=tuple(pair for pair, _ in found),
        sizes=tuple(facts.size for _, facts in found),
        channels=max(facts.channels for _, facts in found),
        is_float=any(facts.kind != "uint8" for _, facts in found),
        raw={path: limits for path, limits in ranges if limits is not None},
    )


def discover_values(pairs: Sequence[Pair], *, bad_files: BadFiles) -> set[MaskValue]:
    """The mask values of all pairs. Every mask is decoded; a run's store keeps the table for later."""
    found = _for_each(values_in, [pair.mask for pair in pairs], bad_files)
    return {value for _, values in found for value in values or ()}


def _inspect(pair: Pair) -> ImageFacts:
    image, mask = image_facts(pair.image), mask_facts(pair.mask)
    if image.size != mask.size:
        raise DataError(
            f"{pair.image} is {_text(image.size)}, its mask {pair.mask.name} is {_text(mask.size)}",
            why="each pixel of the image needs its class",
            fix="export both at one size, or leave such pairs out: data.on_bad_file=skip",
        )
    return image


def _inspect_fully(pair: Pair) -> ImageFacts:
    facts = _inspect(pair)
    read_image(pair.image, channels=facts.channels, raw_scale=1.0)
    values_in(pair.mask)
    return facts


def _for_each(
    work: Callable[[Item], Result], items: Sequence[Item], bad_files: BadFiles
) -> list[tuple[Item, Result | None]]:
    """`work` on every item in threads, errors reported in the items' order."""
    results: list[tuple[Item, Result | None]] = []
    for item, outcome in zip(items, in_threads(work, items), strict=True):
        if isinstance(outcome, DataError):
            bad_files.report(outcome)
        results.append((item, None if isinstance(outcome, DataError) else outcome))
    return results


def _text(size: tuple[int, int]) -> str:
    return f"{size[1]}×{size[0]} pixels"
