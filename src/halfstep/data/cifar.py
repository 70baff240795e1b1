"""CIFAR-10 in its binary version: `data_batch_1.bin` ... `data_batch_5.bin`, `test_batch.bin`, `batches.meta.txt`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from halfstep.data.stored_images import StoredImages
from halfstep.errors import DataError

SIDE = 32
ROW_BYTES = 1 + 3 * SIDE * SIDE
"""A label, then the red, green and blue planes."""
FOLDER = "cifar-10-batches-bin"
NAMES_FILE = "batches.meta.txt"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def cifar_folder(root: Path) -> Path | None:
    """The folder with the binary batches, at `root` or in the one its archive makes; None where there is none."""
    return next((folder for folder in (root, root / FOLDER) if any(folder.glob("data_batch_*.bin"))), None)


def read_cifar(folder: Path) -> tuple[tuple[str, ...], StoredImages, StoredImages]:
    """Class names, training images and test images."""
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not test.is_file():
        raise DataError(f"no test_batch.bin in {folder}", fix="unpack the whole archive: cifar-10-binary.tar.gz")
    return _class_names(folder), _images(train), _images([test])


def _images(paths: list[Path]) -> StoredImages:
    rows = np.concatenate([_rows(path) for path in paths])
    labels = torch.from_numpy(rows[:, 0].astype(np.int64))
    planes = rows[:, 1:].reshape(-1, 3, SIDE, SIDE)
    pixels = torch.from_numpy(np.ascontiguousarray(planes.transpose(0, 2, 3, 1)))
    return StoredImages(pixels=pixels, sizes=np.full((len(rows), 2), SIDE), labels=labels)


def _rows(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = np.fromfile(path, dtype=np.uint8)
    if values.size == 0 or values.size % ROW_BYTES:
        raise DataError(
            f"{path} has {values.size:,} bytes, no multiple of {ROW_BYTES}",
            why="it is cut short, or not a binary batch",
            fix="download it again",
        )
    rows = values.reshape(-1, ROW_BYTES)
    if rows[:, 0].max() >= len(CLASSES):
        raise DataError(f"{path} has a label of {rows[:, 0].max()}", why=f"there are {len(CLASSES)} classes")
    return rows


def _class_names(folder: Path) -> tuple[str, ...]:
    path = folder / NAMES_FILE
    names = tuple(path.read_text().split()) if path.is_file() else ()
    return names if len(names) == len(CLASSES) else CLASSES
