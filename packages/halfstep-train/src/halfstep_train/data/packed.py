"""The packed cache: the decoded images of a folder, (N, S, S, 3) bytes, in one file (see cache_file.py).

Packing uses threads, not processes: Pillow
decodes and resizes without the interpreter's lock, so nothing is sent between processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.cache_file import CacheFile, CacheWriter, fingerprint_files, open_or_write
from halfstep_train.data.files import Array, BadFiles, OnBadFile, return_errors
from halfstep_train.data.image_folder import ImageFolder, refuse_lost_classes
from halfstep_train.data.image_samples import REDUCING_GAP, StoredImages, crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.data.loader import read_ahead

PACKED = "packed cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """An opened cache."""

    classes: tuple[str, ...]
    titles: dict[str, str]
    train: StoredImages
    val: StoredImages
    left_out: tuple[str, ...]
    """Why each bad file is missing."""


def _map_images(file: CacheFile) -> Pack:
    index = file.index
    names, size, num_train = tuple(index["names"]), index["size"], index["num_train"]
    pixels = torch.from_numpy(file.map(np.uint8, (len(names), size, size, 3)))
    sizes, labels = np.array(index["sizes"]), torch.tensor(index["labels"])
    train, val = (
        StoredImages(pixels=pixels[part], sizes=sizes[part], labels=labels[part], names=names[part])
        for part in (slice(num_train), slice(num_train, None))
    )
    return Pack(
        classes=tuple(index["classes"]),
        titles=index["titles"],
        train=train,
        val=val,
        left_out=tuple(index["left_out"]),
    )


DEFAULT_SIZE = 256
"""Pixels per side: the 256 to which ImageNet's evaluation resizes; enough for most training at 224."""
OnProgress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """What is stored, and within which limits."""

    size: int = DEFAULT_SIZE
    on_bad_file: OnBadFile = "error"
    workers: int = 0
    """Decoding threads; 0: one per core."""


def choose_pack_path(root: Path, size: int) -> Path:
    """Return the default path: inside the folder, one file per size."""
    return root / f".halfstep-{size}.pack"


def open_or_pack(
    folder: ImageFolder,
    path: Path,
    settings: PackSettings,
    *,
    progress: OnProgress | None = None,
) -> Pack:
    """Open the cache at `path` if it is intact and fits the folder; otherwise pack the folder."""
    file, _ = open_or_write(
        path,
        PACKED,
        fingerprint_folder(folder, settings),
        lambda writer: _pack(folder, settings, writer, progress),
    )
    return _map_images(file)


def _pack(folder: ImageFolder, settings: PackSettings, file: CacheWriter, progress: OnProgress | None) -> None:
    """Decode the whole folder: row i is the i-th image that can be read, training images first."""
    paths, labels = folder.train.paths + folder.val.paths, folder.train.labels + folder.val.labels
    file.require_space(len(paths) * settings.size**2 * 3)
    bad_files = BadFiles(settings.on_bad_file)
    rows: list[tuple[int, tuple[int, int]]] = []

    def decode(number: int) -> tuple[Array, tuple[int, int]]:
        return _decode(paths[number], settings.size, is_whole=number < len(folder.train))

    workers = settings.workers or os.cpu_count() or 1
    for number, outcome in enumerate(read_ahead(return_errors(decode), range(len(paths)), num_threads=workers)):
        if isinstance(outcome, DataError):
            bad_files.report(outcome)
        else:
            file.write(outcome[0].tobytes())
            rows.append((number, outcome[1]))
        if progress is not None:
            progress(number + 1, len(paths))
    num_train = sum(number < len(folder.train) for number, _ in rows)
    file.index = {
        "size": settings.size,
        "num_train": num_train,
        "classes": folder.classes,
        "titles": dict(folder.titles),
        "names": [paths[number].relative_to(folder.root).as_posix() for number, _ in rows],
        "labels": [labels[number] for number, _ in rows],
        "sizes": [size for _, size in rows],
        "left_out": [f"{error.what}: {error.why}" for error in bad_files.skipped],
    }
    refuse_lost_classes(folder.classes, file.index["labels"][:num_train], why="all of them were left out")
    bad_files.refuse_empty_split("validation", len(folder.val), len(rows) - num_train)


def fingerprint_folder(folder: ImageFolder, settings: PackSettings) -> str:
    """Hash the folder's files and the settings that change what is stored."""
    stored: dict[str, object] = {"size": settings.size, "on_bad_file": settings.on_bad_file, "classes": folder.classes}
    if folder.has_table:  # else the folders' names are the labels
        stored["labels"] = (folder.train.labels, folder.val.labels)
    return fingerprint_files(folder.root, (folder.train.paths, folder.val.paths), stored)


def _decode(path: Path, size: int, *, is_whole: bool) -> tuple[Array, tuple[int, int]]:
    """Return an image as (size, size, 3), stretched if it is whole, else its centre square; and its original size."""
    with open_image_file(path) as file:
        if not is_whole:
            return crop_centre(file, size, 1.0), file.size
        image = file.to_rgb(reduction=min(file.size) / size)
        return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)), file.size
