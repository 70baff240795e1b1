"""Change a run's settings to evaluate another data folder: all of it, not only a held-out split.

If that folder has its own validation split, only the split is evaluated: the rest may have been trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import TRAIN_NAMES, VALIDATION_NAMES
from halfstep_train.data.image_folder import KAGGLE_TRAIN
from halfstep_train.workloads.classification.data import has_stored_images

Config = TypeVar("Config", bound=RunConfig)


def use_folder(config: Config, folder: Path, **values: Any) -> Config:
    """Return the settings with another data folder, and other `values` of the data section."""
    return config.replace(data={"dir": str(folder), **values})


def use_all_pictures(config: Config, folder: Path) -> Config:
    """Return settings that read all images of the folder, without a cache, which would be written into the folder."""
    fields = type(config.data).model_fields
    values: dict[str, Any] = {name: fields[name].default for name in ("cache", "cache_file") if name in fields}
    values |= {"dir": str(folder), "folders": ()}
    has_own_split = has_stored_images(folder) or any(folder.glob(KAGGLE_TRAIN))
    train, val = (
        next((name for name in names if (folder / name).is_dir()), "") for names in (TRAIN_NAMES, VALIDATION_NAMES)
    )
    if not has_own_split and not (train and val):
        # Use the folder for both splits: nothing is trained, but a workload cannot be built without training samples.
        whole = train or val or "."
        values["folders"] = (whole, whole)
    return config.replace(data=values)
