"""Small images in binary files, as they are distributed: CIFAR-10; MNIST, Fashion-MNIST and their kin.

CIFAR-10: `data_batch_1.bin` ... `data_batch_5.bin`, `test_batch.bin`. MNIST: `train-images-idx3-ubyte`,
`t10k-labels-idx1-ubyte`, or `.gz`.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from halfstep.errors import DataError
from halfstep_train.data.files import Array
from halfstep_train.data.image_samples import StoredImages

SIDE = 32
ROW_BYTES = 1 + 3 * SIDE * SIDE
"""One label, then the red, green and blue planes."""
FOLDER = "cifar-10-batches-bin"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def find_cifar_folder(root: Path) -> Path | None:
    """Return the folder with the binary batches, `root` or the one its archive creates in it; None if there is none."""
    return next((folder for folder in (root, root / FOLDER) if any(folder.glob("data_batch_*.bin"))), None)


def read_cifar(folder: Path) -> tuple[tuple[str, ...], StoredImages, StoredImages]:
    """Return class names, training images and test images."""
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not test.is_file():
        raise DataError(f"no test_batch.bin in {folder}", fix="unpack the whole archive: cifar-10-binary.tar.gz")
    return CLASSES, _read_images(train), _read_images([test])


def _read_images(paths: list[Path]) -> StoredImages:
    rows = torch.from_numpy(np.concatenate([_read_rows(path) for path in paths]))
    # Stored images are channels last, so that a batch is one gather of whole pixels.
    pixels = rows[:, 1:].unflatten(1, (3, SIDE, SIDE)).permute(0, 2, 3, 1).contiguous()
    return StoredImages(pixels=pixels, sizes=np.full((len(rows), 2), SIDE), labels=rows[:, 0].long())


def _read_rows(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    values = np.fromfile(path, dtype=np.uint8)
    if values.size == 0 or values.size % ROW_BYTES:
        raise _make_broken_error(path, f"it has {values.size:,} bytes, not a multiple of {ROW_BYTES}")
    rows = values.reshape(-1, ROW_BYTES)
    if rows[:, 0].max() >= len(CLASSES):
        raise _make_broken_error(path, f"it has a label of {rows[:, 0].max()}, but there are {len(CLASSES)} classes")
    return rows


def _make_broken_error(path: Path, why: str) -> DataError:
    return DataError(f"cannot read {path}", why=why, fix="download it again")


FOLDERS = (".", "raw", "MNIST/raw", "FashionMNIST/raw", "KMNIST/raw")
"""Where torchvision puts the files, below the folder it was given."""
TRAIN, TEST = "train", "t10k"
BYTES = 8
"""The idx format's code for unsigned bytes."""


def find_idx_folder(root: Path) -> Path | None:
    """Return the folder with the idx files; None if there is none."""
    return next((root / name for name in FOLDERS if _find_idx_file(root / name, TRAIN, "images", 3) is not None), None)


def read_idx(folder: Path) -> tuple[tuple[str, ...], StoredImages, StoredImages]:
    """Return class names (the digits), training images and test images."""
    train, test = (_read_idx_images(folder, part) for part in (TRAIN, TEST))
    num_classes = int(train.labels.max()) + 1
    if int(test.labels.max()) >= num_classes:
        raise _make_broken_error(folder, f"test label {int(test.labels.max())}, but training has {num_classes} classes")
    return tuple(str(number) for number in range(num_classes)), train, test


def _read_idx_images(folder: Path, part: str) -> StoredImages:
    pixels, labels = (_read_idx_array(folder, part, kind, axes) for kind, axes in (("images", 3), ("labels", 1)))
    if len(pixels) != len(labels) or len(pixels) == 0:
        raise _make_broken_error(folder, f"it has {len(pixels)} {part} images and {len(labels)} labels")
    gray = torch.from_numpy(pixels).unsqueeze(-1)
    return StoredImages(
        pixels=gray.expand(-1, -1, -1, 3),  # no copy: each channel is the same memory
        sizes=np.full((len(pixels), 2), pixels.shape[1]),
        labels=torch.from_numpy(labels.astype(np.int64)),
    )


def _find_idx_file(folder: Path, part: str, kind: str, axes: int) -> Path | None:
    # Some mirrors write `train-images.idx3-ubyte`, with a dot.
    names = (f"{part}-{kind}{mark}idx{axes}-ubyte{end}" for mark in "-." for end in ("", ".gz"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_idx_array(folder: Path, part: str, kind: str, axes: int) -> Array:
    path = _find_idx_file(folder, part, kind, axes)
    if path is None:
        raise DataError(
            f"no {part}-{kind}-idx{axes}-ubyte in {folder}", fix="put all four files there, plain or as .gz"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _make_broken_error(path, str(error)) from error
    # The idx header: two zero bytes, the type code, the number of axes, then each length as a big-endian uint32.
    shape = np.frombuffer(content[4 : 4 + 4 * axes], dtype=">u4").astype(np.int64)
    if content[:4] != bytes([0, 0, BYTES, axes]) or len(content) != 4 + 4 * axes + int(shape.prod()):
        begin = f"it starts with {content[:4].hex()} and has {len(content):,} bytes"
        raise _make_broken_error(path, f"it is not an idx file of {axes} axes, or is truncated: {begin}")
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape).copy()
