"""Data of a classifier: open a data folder in any supported layout as training and validation samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from halfstep_train.config.section import fill_from_settings
from halfstep_train.data.binary_sets import find_cifar_folder, find_idx_folder, read_cifar, read_idx
from halfstep_train.data.files import BadFiles, list_some, require_folder
from halfstep_train.data.image_folder import FolderLayout, ImageFolder, check_images, find_images
from halfstep_train.data.image_samples import (
    EvaluationFiles,
    EvaluationImages,
    PackSettings,
    TrainingFiles,
    TrainingImages,
    choose_pack_path,
    open_or_pack,
)
from halfstep_train.data.loader import Samples
from halfstep_train.report.run_report import PackingBar
from halfstep_train.workloads.base.workload import OpenedData
from halfstep_train.workloads.classification.config import ImageDataConfig

PICTURE_SHARE, WHOLE = 0.875, 1.0
"""Share of the shorter side that validation shows: 224 of 256 pixels for image files, as in torchvision and guide 1;
everything for CIFAR, whose objects fill the 32 pixels."""


STORED = (
    ("CIFAR-10's binary batches", find_cifar_folder, read_cifar),
    ("MNIST's idx files", find_idx_folder, read_idx),
)
"""Data sets that are distributed as arrays with a test split: name, finder of the files, reader."""


def has_stored_images(root: Path) -> bool:
    """True if a folder holds a data set that is distributed as arrays, such as CIFAR-10."""
    return any(find(root) is not None for _, find, _ in STORED)


def open_image_data(
    config: ImageDataConfig, store: Mapping[str, Any] | None = None, *, quiet: bool = True
) -> OpenedData:
    """Open the data at `data.dir`: arrays such as CIFAR's, a packed cache if requested, or image files.

    The `store` of an earlier run fixes how validation crops images. Unless `quiet`, packing shows its progress.
    """
    root = require_folder(config.dir)
    for name, find, read in STORED:
        if (path := find(root)) is not None:
            classes, train_images, val_images = read(path)
            share = get_evaluation_share(config, store, usual=WHOLE)
            return OpenedData(
                train=TrainingImages(train_images, crop_area=config.augment.crop_area),
                val=EvaluationImages(val_images, size=get_evaluation_size(config), share=share),
                store=_make_store(classes, {}, share),
                about=(("layout", f"{name} in {path}; validation: its test split"),),
            )
    # `use_all_pictures` names the same folder for both splits to evaluate everything; classes must then be the run's.
    known = store["classes"] if store is not None and len(config.folders) == 2 and len(set(config.folders)) == 1 else ()
    folder = find_images(root, fill_from_settings(FolderLayout, config), known=known)
    return _open_folder(folder, config, get_evaluation_share(config, store), quiet=quiet)


def get_evaluation_size(config: ImageDataConfig) -> int:
    """Return the side of the images in validation, in pixels."""
    return config.eval_size or config.image_size


def get_evaluation_share(
    config: ImageDataConfig, store: Mapping[str, Any] | None, *, usual: float = PICTURE_SHARE
) -> float:
    """Return the share of the shorter side that evaluation shows: as set, as in the stored run, or the usual one."""
    return config.eval_crop_ratio or float((store or {}).get("eval_share", usual))


def _make_store(classes: Sequence[str], titles: Mapping[str, str], share: float) -> dict[str, Any]:
    """Return the meaning of the labels, and the share of the shorter side that validation shows."""
    return {"classes": list(classes), "titles": dict(titles), "eval_share": share}


def _open_folder(folder: ImageFolder, config: ImageDataConfig, share: float, *, quiet: bool) -> OpenedData:
    """Open the images of a folder from their files, or from a packed cache, which is written first if necessary."""
    area, size = config.augment.crop_area, get_evaluation_size(config)
    train: Samples
    val: Samples
    titles: Mapping[str, str]
    if config.is_packed:
        settings = fill_from_settings(PackSettings, config, size=config.cache_size, workers=config.num_workers)
        path = Path(config.cache_file) if config.cache_file else choose_pack_path(folder.root, config.cache_size)
        with nullcontext() if quiet else PackingBar(path) as progress:
            pack = open_or_pack(folder, path, settings, progress=progress)
        train, val = TrainingImages(pack.train, crop_area=area), EvaluationImages(pack.val, size=size, share=share)
        classes, titles = pack.classes, pack.titles
        notes = tuple(f"left out: {why}" for why in pack.left_out)
    else:
        bad_files = BadFiles(config.on_bad_file)
        folder = check_images(folder, bad_files=bad_files)
        train = TrainingFiles(folder.train, size=config.image_size, crop_area=area)
        val = EvaluationFiles(folder.val, size=size, share=share)
        classes, titles, notes = folder.classes, folder.titles, bad_files.notes
    labels = "labels of a metadata table" if folder.has_table else "class folders"
    return OpenedData(
        train=train,
        val=val,
        store=_make_store(classes, titles, share),
        about=(("layout", f"{labels}; validation: {folder.val_source}"),),
        notes=(*notes, *_note_unvalidated(folder)),
    )


def _note_unvalidated(folder: ImageFolder) -> list[str]:
    """Return a note about classes without validation images."""
    seen = set(folder.val.labels)
    missing = [name for number, name in enumerate(folder.classes) if number not in seen]
    if not (missing and seen):
        return []
    return [f"no validation image of {list_some(missing, 10)}: these classes are not evaluated"]
