"""A stored run's settings for another data folder, of which everything is evaluated, not only a held-out part.

Where the folder has a validation part of its own, that part is taken: the rest may well have been trained on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from halfstep.config.schema import RunConfig
from halfstep.data.files import TRAIN_NAMES, VALIDATION_NAMES, BadFiles, some_of
from halfstep.data.image_folder import KAGGLE_TRAIN
from halfstep.data.layouts import PairLayout, holds_folders
from halfstep.data.masks import as_colour, table_of
from halfstep.data.segmentation import SegmentationData, discover_values
from halfstep.errors import DataError
from halfstep.workloads.classification.data import has_stored_images
from halfstep.workloads.workload import Workload

SHOWN_VALUES = 8
Config = TypeVar("Config", bound=RunConfig)


def any_folder(config: Config, folder: Path, **values: Any) -> Config:
    """The same settings with another folder, and other values beside it."""
    return config.changed(data={"dir": str(folder), **values})


def pairs_folder(config: Config, folder: Path) -> Config:
    """No split: `with_all_pairs` evaluates what would be trained on."""
    values: dict[str, Any] = {"dir": str(folder), "val_fraction": 0.0, "val_list": None, "train_list": None}
    named = (getattr(config.data, "val_images", ""), getattr(config.data, "val_masks", ""))
    if any(named) and not holds_folders(folder, PairLayout().names(*named)):
        values |= {"val_images": "", "val_masks": ""}  # those of the run's own folder
    return config.changed(data=values)


def with_all_pairs(workload: Workload) -> Workload:
    """Where the folder has no validation part, all its pairs; masks of another encoding are read as the run's."""
    samples = workload.val_samples if len(workload.val_samples) else workload.train_samples
    assert isinstance(samples, SegmentationData)
    samples, notes = _in_classes_of_the_run(samples)
    names = tuple(pair.image.name for pair in samples.pairs)
    return replace(workload, val_samples=samples, val_names=names, notes=(*workload.notes, *notes))


def _in_classes_of_the_run(samples: SegmentationData) -> tuple[SegmentationData, list[str]]:
    """Two values that are not the run's two are its classes in the same order (0 and 255 for 0 and 1)."""
    own = samples.table
    found = table_of(discover_values(samples.pairs, bad_files=BadFiles("error")), ignored=own.ignored)
    if {as_colour(value) for value in found.values} <= {as_colour(value) for value in own.values}:
        return samples, []
    theirs, ours = (some_of(table.values, SHOWN_VALUES) for table in (found, own))
    if not len(found.values) == len(own.values) == 2:
        raise DataError(
            f"these masks hold the values {theirs}, the run's classes are {ours}",
            why="which of them is which class cannot be told; only two values for two are taken in their order",
            fix=f"save the masks with the values of the run: {ours}",
        )
    mapped = SegmentationData(samples.pairs, table=found, image=samples.image)
    return mapped, [f"these masks hold {theirs} where the run's held {ours}: taken as the same classes, in this order"]


def pictures_folder(config: Config, folder: Path) -> Config:
    """All pictures of the folder; read as files, since a cache would be written into it."""
    fields = type(config.data).model_fields
    values: dict[str, Any] = {name: fields[name].default for name in ("cache", "cache_file") if name in fields}
    values |= {"dir": str(folder), "train_folder": "", "val_folder": ""}
    has_own_split = has_stored_images(folder) or any(folder.glob(KAGGLE_TRAIN))
    train, val = (_first(folder, names) for names in (TRAIN_NAMES, VALIDATION_NAMES))
    if not has_own_split and not (train and val):
        # The same folder twice: nothing is trained, but workloads want training samples.
        whole = train or val or "."
        values |= {"train_folder": whole, "val_folder": whole}
    return config.changed(data=values)


def _first(folder: Path, names: tuple[str, ...]) -> str:
    return next((name for name in names if (folder / name).is_dir()), "")
