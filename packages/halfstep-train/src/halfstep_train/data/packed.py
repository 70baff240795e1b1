"""The packed cache: the decoded images of a folder, (N, S, S, 3) bytes, in one file (see cache_file.py).

A fingerprint of every file's name, size and time ties it to its folder. Packing uses threads, not processes: Pillow
decodes and resizes without the interpreter's lock, so nothing is sent between processes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from halfstep.disk import take_turn
from halfstep.errors import DataError
from halfstep_train.data.cache_file import VERIFIED_BYTES, is_cache, open_cache, write_cache
from halfstep_train.data.files import Array, BadFiles, OnBadFile
from halfstep_train.data.image_folder import ImageFolder, refuse_lost_classes
from halfstep_train.data.image_samples import REDUCING_GAP, StoredImages, crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.data.loader import read_ahead

PACKED = "packed cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackIndex:
    """Everything but the pixels: row i is the i-th image, training images first."""

    size: int
    num_train: int
    classes: tuple[str, ...]
    titles: dict[str, str]
    fingerprint: str
    names: tuple[str, ...]
    labels: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each original image."""
    left_out: tuple[str, ...]
    """Why each bad file is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """An opened cache."""

    path: Path
    index: PackIndex
    train: StoredImages
    val: StoredImages


def open_pack(path: Path, *, fingerprint: str = "", verify_bytes: int = VERIFIED_BYTES) -> Pack:
    """Map a packed cache after checking it; `fingerprint` is that of the folder it must belong to."""
    file = open_cache(path, PACKED, "pack the folder again: halfstep pack DIR", verify_bytes=verify_bytes)
    index = _parse_index(file.index)
    if fingerprint and index.fingerprint != fingerprint:
        raise DataError(
            f"{path} does not match the folder's current content",
            why="files or settings changed since it was packed",
            fix="pack it again: halfstep pack DIR",
        )
    pixels = file.map(np.uint8, (len(index.names), index.size, index.size, 3))
    sizes, labels, everything = np.array(index.sizes), torch.tensor(index.labels), torch.from_numpy(pixels)
    train, val = (
        StoredImages(pixels=everything[part], sizes=sizes[part], labels=labels[part], names=index.names[part])
        for part in (slice(index.num_train), slice(index.num_train, None))
    )
    return Pack(path=path, index=index, train=train, val=val)


def compute_fingerprint(root: Path, parts: Sequence[Sequence[Path]], settings: dict[str, Any]) -> str:
    """Hash settings and files; it changes if a file is added, removed, renamed, rewritten or moved between splits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for number, paths in enumerate(parts):
        for path in paths:
            status = path.stat() if path.exists() else path.lstat()  # a link that leads nowhere
            row = (number, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)
            digest.update(repr(row).encode())
    return digest.hexdigest()


def _parse_index(values: dict[str, Any]) -> PackIndex:
    values |= {name: tuple(values[name]) for name in ("classes", "names", "labels", "left_out")}
    return PackIndex(**values | {"sizes": tuple((w, h) for w, h in values["sizes"])})


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
    folder: ImageFolder, path: Path, settings: PackSettings, *, progress: OnProgress | None = None
) -> Pack:
    """Open the cache at `path` if it is complete and fits the folder; otherwise pack the folder again."""
    with take_turn(path):
        if path.is_file():
            try:
                return open_pack(path, fingerprint=fingerprint_folder(folder, settings))
            except DataError:
                pass  # stale or broken: made again, which the caller sees by its progress
        return pack(folder, path, settings, progress=progress)


def pack(folder: ImageFolder, path: Path, settings: PackSettings, *, progress: OnProgress | None = None) -> Pack:
    """Decode the whole folder into a cache file at `path`, replacing an older one."""
    paths, labels = folder.train.paths + folder.val.paths, folder.train.labels + folder.val.labels
    _refuse_foreign_file(path)
    mark = fingerprint_folder(folder, settings)
    bad_files = BadFiles(settings.on_bad_file)
    rows: list[tuple[int, tuple[int, int]]] = []
    num_train = 0
    with write_cache(path, PACKED, len(paths) * settings.size**2 * 3) as file:
        for done, (number, outcome) in enumerate(_decode_all(folder, settings), start=1):
            if isinstance(outcome, DataError):
                bad_files.report(outcome)
            else:
                pixels, size = outcome
                file.write(pixels.tobytes())
                rows.append((number, size))
                num_train += number < len(folder.train)
            if progress is not None:
                progress(done, len(paths))
        index = PackIndex(
            size=settings.size,
            num_train=num_train,
            classes=folder.classes,
            titles=dict(folder.titles),
            fingerprint=mark,
            names=tuple(paths[number].relative_to(folder.root).as_posix() for number, _ in rows),
            labels=tuple(labels[number] for number, _ in rows),
            sizes=tuple(size for _, size in rows),
            left_out=tuple(f"{error.what}: {error.why}" for error in bad_files.skipped),
        )
        refuse_lost_classes(index.classes, index.labels[:num_train], why="all of them were left out")
        bad_files.refuse_empty_validation(len(folder.val), len(rows) - num_train)
        file.index = asdict(index)
    return open_pack(path, verify_bytes=1)  # just written: checking every CRC again would read the whole file


def fingerprint_folder(folder: ImageFolder, settings: PackSettings) -> str:
    """Hash the folder's files and the settings that change what is stored."""
    stored: dict[str, object] = {"size": settings.size, "on_bad_file": settings.on_bad_file, "classes": folder.classes}
    if folder.has_table:  # else the folders' names are the labels
        stored["labels"] = (folder.train.labels, folder.val.labels)
    return compute_fingerprint(folder.root, (folder.train.paths, folder.val.paths), stored)


def _refuse_foreign_file(path: Path) -> None:
    if path.exists() and path.suffix != ".pack" and not is_cache(path, PACKED):
        raise DataError(
            f"{path} exists and is not a packed cache",
            why="halfstep overwrites only its own caches",
            fix="delete it, or name another file: data.cache_file=FILE (--out FILE)",
        )


def read_stretched(path: Path, size: int) -> tuple[Array, tuple[int, int]]:
    """Return a whole image at (size, size), and its true size."""
    with open_image_file(path) as file:
        image = file.to_rgb(reduction=min(file.size) / size)
        square = image.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)
        return np.asarray(square), file.size


def read_centre(path: Path, size: int) -> tuple[Array, tuple[int, int]]:
    """Return the centre square of an image at (size, size), and its true size."""
    with open_image_file(path) as file:
        return crop_centre(file, size, 1.0), file.size


def _decode_all(
    folder: ImageFolder, settings: PackSettings
) -> Iterator[tuple[int, tuple[Array, tuple[int, int]] | DataError]]:
    """Yield, in order, each image's pixels and original size, or the error of its file."""
    paths, num_train = folder.train.paths + folder.val.paths, len(folder.train)

    def read(number: int) -> tuple[Array, tuple[int, int]] | DataError:
        try:
            return (read_stretched if number < num_train else read_centre)(paths[number], settings.size)
        except DataError as error:
            return error

    workers = settings.workers or os.cpu_count() or 1
    yield from enumerate(read_ahead(read, range(len(paths)), num_threads=workers))
