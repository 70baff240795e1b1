"""What a folder of image and mask pairs decides about a run: its split, the value to ignore, the size of its images."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from statistics import median

from halfstep.data.files import BadFiles
from halfstep.data.layouts import PairLayout
from halfstep.data.masks import IGNORED, MaskValue
from halfstep.data.pairs import FoundPairs, Split, find_split
from halfstep.data.segmentation import Scan
from halfstep.errors import DataError
from halfstep.workloads.segmentation.config import UNetConfig

MANY_VALUES = 64
"""More classes than common data sets of masks have (Cityscapes 34, VOC 22): rather grey edges than classes."""


def find_data(config: UNetConfig, bad_files: BadFiles) -> FoundPairs:
    """The pairs at `data.dir`."""
    data = config.data
    if data.dir is None:
        raise DataError("no data folder", why="building U-Net's data needs data.dir", fix="--data-dir DIR")
    layout = PairLayout(**{name: getattr(data, name) for name in PairLayout.__dataclass_fields__})
    split = Split(
        val_fraction=data.val_fraction,
        seed=data.split_seed,
        train_list=Path(data.train_list) if data.train_list else None,
        val_list=Path(data.val_list) if data.val_list else None,
    )
    return find_split(Path(data.dir), layout=layout, split=split, bad_files=bad_files)


def ignored_value(config: UNetConfig, found: FoundPairs, seen: Collection[MaskValue]) -> tuple[MaskValue | None, str]:
    """The mask value that counts nowhere, and why where nobody asked for it."""
    asked = config.model.ignore_index
    if asked != "auto":
        return asked, ""
    numbers = sorted(value for value in seen if isinstance(value, int))
    if len(numbers) < len(seen) or not numbers or config.model.classes == len(numbers):
        return None, ""
    way_out = "model.ignore_index=null makes it a class"
    # A void value is the first or the last: with other classes than usual the same number may mean something.
    if found.ignored in (numbers[0], numbers[-1]):
        return found.ignored, f"{found.ignored}, which marks pixels without a label in this data set; {way_out}"
    *classes, last = numbers
    if last == IGNORED and 1 < len(classes) <= MANY_VALUES and classes == list(range(len(classes))):
        return last, f"{last}: beside the classes 0 to {classes[-1]} it marks pixels without a label; {way_out}"
    return None, ""


def scores_all_classes(config: UNetConfig, found: FoundPairs) -> bool:
    """Whether the data set has no background and nobody named one."""
    return not found.has_background and "background" not in config.model.model_fields_set


def image_side(config: UNetConfig, scan: Scan) -> tuple[int, str]:
    """The side of the images, and why where nobody asked for it: the usual one, less where the pictures have less."""
    usual = config.data.image_size
    if "image_size" in config.data.model_fields_set:
        return usual, ""
    height, width = (median(size[axis] for size in scan.sizes) for axis in (0, 1))
    step = 2**config.model.depth  # what the levels divide without a rest
    side = max(2 * step, -(-round(max(height, width)) // step) * step)
    pictures = f"the pictures have {width:g}×{height:g} pixels"
    if side >= usual:
        return usual, f"{usual}, the default; {pictures}"
    return side, f"{side}: {pictures}, and more would be blown up (data.image_size)"
