"""The packed cache: decoded images of a folder in one file that is mapped into memory, never read as a whole.

    magic, padded to a page | pixels (N, S, S, 3) | index (JSON) | length and SHA-256 of the index

The index comes last because it holds a CRC of every image. A file is written under a temporary name, flushed, then
renamed: either it is complete or it does not exist. A fingerprint of every file's name, size and time ties it to its
folder. Packing uses threads, not processes: Pillow decodes and resizes without the interpreter's lock, straight into
the mapped file, so nothing is sent between processes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress, TaskID

from halfstep.disk import parse_json, take_turn
from halfstep.errors import DataError, format_count
from halfstep_train.data.files import Array, BadFiles, OnBadFile, check_free_space, explain_full_disk
from halfstep_train.data.image_folder import ImageFolder, refuse_lost_classes
from halfstep_train.data.image_samples import REDUCING_GAP, StoredImages, crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.data.loader import read_ahead

MAGIC = b"halfstep pack 1\n"
PIXELS_AT = 4096
"""One page, so that the mapping starts at the first pixel."""
TRAILER = struct.Struct("<Q32s")
VERIFIED_BYTES = 4 << 30
"""Most bytes whose CRC is checked on opening; of a larger file this many, evenly spread (about one second per GB)."""
VERIFY_THREADS = 4


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
    checksums: tuple[int, ...]
    left_out: tuple[str, ...]
    """Why each bad file is missing."""

    @property
    def image_bytes(self) -> int:
        """Return the size of one stored image in bytes."""
        return self.size * self.size * 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """An opened cache."""

    path: Path
    index: PackIndex
    train: StoredImages
    val: StoredImages


def open_pack(path: Path, *, fingerprint: str = "", verify_bytes: int = VERIFIED_BYTES) -> Pack:
    """Map a packed cache after checking it; `fingerprint` is that of the folder it must belong to."""
    index = read_index(path)
    if fingerprint and index.fingerprint != fingerprint:
        raise DataError(
            f"{path} does not match the folder's current content",
            why="files or settings changed since it was packed",
            fix="pack it again: halfstep pack DIR",
        )
    shape = (len(index.names), index.size, index.size, 3)
    # Copy on write: torch wants writable memory, and nothing writes to it.
    pixels: Array = np.memmap(path, dtype=np.uint8, mode="c", offset=PIXELS_AT, shape=shape)
    _verify(path, index, pixels, verify_bytes)
    sizes, labels, everything = np.array(index.sizes), torch.tensor(index.labels), torch.from_numpy(pixels)
    train, val = (
        StoredImages(pixels=everything[part], sizes=sizes[part], labels=labels[part], names=index.names[part])
        for part in (slice(index.num_train), slice(index.num_train, None))
    )
    return Pack(path=path, index=index, train=train, val=val)


def read_index(path: Path) -> PackIndex:
    """Return the checked index of a cache file, without its pixels."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _make_broken_error(path, "it does not start as one")
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - TRAILER.size))
            index_bytes, digest = TRAILER.unpack(file.read(TRAILER.size))
            pixels_end = length - TRAILER.size - index_bytes
            if pixels_end < PIXELS_AT:
                raise _make_broken_error(path, "it is cut short")
            file.seek(pixels_end)
            text = file.read(index_bytes)
    except (OSError, struct.error) as error:
        raise _make_broken_error(path, str(error)) from error
    if hashlib.sha256(text).digest() != digest:
        raise _make_broken_error(path, "the checksum of its index is wrong")
    index = _parse_index(parse_json(text))
    if pixels_end != PIXELS_AT + len(index.names) * index.image_bytes:
        raise _make_broken_error(path, f"it holds {pixels_end - PIXELS_AT:,} bytes of pixels, not those of its index")
    return index


def is_pack(path: Path) -> bool:
    """True if a file is a packed cache, possibly a broken one: by its extension or its first bytes."""
    if not path.is_file() or path.suffix == ".pack":
        return path.is_file()
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def compute_crc(image: Array) -> int:
    """Return the checksum of one image's bytes."""
    return zlib.crc32(image.data)


@contextmanager
def open_partial_file(path: Path, num_images: int, size: int) -> Iterator[tuple[Array, Path]]:
    """Yield room for the pixels under a temporary name that is removed in any case; one writer at a time."""
    partial = path.with_name(path.name + ".partial")
    # Not "w": another process may be writing it, which only the lock tells.
    with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        _lock(file, partial, path)
        try:
            file.truncate(0)
            file.write(MAGIC)
            file.flush()
            _reserve(file, PIXELS_AT + num_images * size * size * 3)
            yield (
                np.memmap(file, dtype=np.uint8, mode="r+", offset=PIXELS_AT, shape=(num_images, size, size, 3)),
                partial,
            )
        finally:
            partial.unlink(missing_ok=True)  # already renamed where all went well


def finish_file(partial: Path, path: Path, pixels: Array, index: PackIndex) -> None:
    """Append the index, flush everything to the disk and rename the file."""
    assert isinstance(pixels, np.memmap)
    pixels.flush()
    text = json.dumps(asdict(index)).encode()
    with partial.open("r+b") as file:
        file.seek(PIXELS_AT + len(index.names) * index.image_bytes)
        file.write(text + TRAILER.pack(len(text), hashlib.sha256(text).digest()))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def compute_fingerprint(root: Path, parts: Sequence[Sequence[Path]], settings: dict[str, Any]) -> str:
    """Hash settings and files; it changes if a file is added, removed, renamed, rewritten or moved between splits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for number, paths in enumerate(parts):
        for path in paths:
            status = path.stat() if path.exists() else path.lstat()  # a link that leads nowhere
            row = (number, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)
            digest.update(repr(row).encode())
    return digest.hexdigest()


def _lock(file: BinaryIO, partial: Path, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed between our opening and our lock: then this is the finished cache, and not ours to overwrite.
        is_ours = partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat())
    except OSError:
        is_ours = False
    if not is_ours:
        raise DataError(f"{path} is being packed by another process", fix="wait until it ends, then start again")


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        # Else a disk that fills up kills the process that writes to the mapping (SIGBUS) instead of an error here.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    else:
        file.truncate(num_bytes)


def _verify(path: Path, index: PackIndex, pixels: Array, verify_bytes: int) -> None:
    # Every image of a small file, evenly spread ones of a large file.
    stride = max(1, -(-pixels.nbytes // max(1, verify_bytes)))
    rows = range(0, len(pixels), stride)
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:  # zlib computes without the interpreter's lock
        for row, found in zip(rows, threads.map(lambda i: compute_crc(pixels[i]), rows), strict=True):
            if found != index.checksums[row]:
                raise _make_broken_error(path, f"the pixels of {index.names[row]} are not those that were written")


def _parse_index(values: dict[str, Any]) -> PackIndex:
    values |= {name: tuple(values[name]) for name in ("classes", "names", "labels", "checksums", "left_out")}
    return PackIndex(**values | {"sizes": tuple((w, h) for w, h in values["sizes"])})


def _make_broken_error(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a usable packed cache", why=why, fix="pack the folder again: halfstep pack DIR")


class PackingBar:
    """Progress bar that appears with the first progress report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None

    @property
    def was_shown(self) -> bool:
        """True if anything was packed."""
        return self._task is not None

    def __enter__(self) -> PackingBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.was_shown:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._task is None:
            self._bar.start()
            self._bar.console.print(
                f"packing {format_count(total, 'image')} into {self._path}", soft_wrap=True, markup=False
            )
            self._task = self._bar.add_task("packing", total=total)
        self._bar.update(self._task, completed=done)


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


def list_packed_sizes(root: Path) -> list[int]:
    """Return the sizes of the packs inside the folder."""
    parts = (path.name.removeprefix(".halfstep-").removesuffix(".pack") for path in root.glob(".halfstep-*.pack"))
    return sorted(int(part) for part in parts if part.isdecimal())


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
    check_room(path, len(paths), settings)
    mark = fingerprint_folder(folder, settings)
    bad_files = BadFiles(settings.on_bad_file)
    rows: list[tuple[int, tuple[int, int], int]] = []
    num_train = 0
    with (
        explain_full_disk(path, "the packed images"),
        open_partial_file(path, len(paths), settings.size) as (pixels, partial),
    ):
        # Images are decoded into the row of their number. Rows arrive in order, so a gap that a bad file leaves is
        # closed by moving later rows up; the unused rows at the end are cut off by finish_file.
        for done, (number, outcome) in enumerate(_decode_all(folder, settings, pixels), start=1):
            if isinstance(outcome, DataError):
                bad_files.report(outcome)
            else:
                size, row = outcome, len(rows)
                if row != number:
                    pixels[row] = pixels[number]
                rows.append((number, size, compute_crc(pixels[row])))
                num_train += number < len(folder.train)
            if progress is not None:
                progress(done, len(paths))
        index = PackIndex(
            size=settings.size,
            num_train=num_train,
            classes=folder.classes,
            titles=dict(folder.titles),
            fingerprint=mark,
            names=tuple(paths[number].relative_to(folder.root).as_posix() for number, _, _ in rows),
            labels=tuple(labels[number] for number, _, _ in rows),
            sizes=tuple(size for _, size, _ in rows),
            checksums=tuple(crc for _, _, crc in rows),
            left_out=tuple(f"{error.what}: {error.why}" for error in bad_files.skipped),
        )
        refuse_lost_classes(index.classes, index.labels[:num_train], why="all of them were left out")
        bad_files.refuse_empty_validation(len(folder.val), len(rows) - num_train)
        finish_file(partial, path, pixels, index)
    return open_pack(path, verify_bytes=1)  # just written: checking every CRC again would read the whole file


def fingerprint_folder(folder: ImageFolder, settings: PackSettings) -> str:
    """Hash the folder's files and the settings that change what is stored."""
    stored: dict[str, object] = {"size": settings.size, "on_bad_file": settings.on_bad_file, "classes": folder.classes}
    if folder.has_table:  # else the folders' names are the labels
        stored["labels"] = (folder.train.labels, folder.val.labels)
    return compute_fingerprint(folder.root, (folder.train.paths, folder.val.paths), stored)


def explain_stale(index: PackIndex, folder: ImageFolder, settings: PackSettings) -> str:
    """Explain why training on the folder would rebuild a cache with this index; empty if it would not."""
    if index.fingerprint == fingerprint_folder(folder, settings):
        return ""
    now = {path.relative_to(folder.root).as_posix() for path in folder.train.paths + folder.val.paths}
    gone = len(set(index.names) - now)
    if gone or len(now) != len(index.names) + len(index.left_out):
        new = len(now - set(index.names)) - len(index.left_out)
        return f"the folder changed since it was packed ({format_count(max(new, 0), 'image')} new, {gone:,} gone)"
    return (
        "an image changed or moved to another split since it was packed, or the settings differ "
        "(size, split, on-bad-file)"
    )


def check_room(path: Path, num_images: int, settings: PackSettings) -> None:
    """Raise before any work if a cache would overwrite another file or has no room."""
    needed = num_images * settings.size * settings.size * 3
    what = f"{format_count(num_images, 'image')} of {settings.size}×{settings.size} pixels"
    if path.exists() and not is_pack(path):
        raise DataError(
            f"{path} exists and is not a packed cache",
            why="halfstep overwrites only its own caches",
            fix="delete it, or name another file: data.cache_file=FILE (--out FILE)",
        )
    check_free_space(path, needed, what)


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
    folder: ImageFolder, settings: PackSettings, pixels: Array
) -> Iterator[tuple[int, tuple[int, int] | DataError]]:
    """Fill the rows of `pixels`; yield, in order, each row's original size or the error of its file."""
    paths, num_train = folder.train.paths + folder.val.paths, len(folder.train)

    def fill(number: int) -> tuple[int, int] | DataError:
        stored = read_stretched if number < num_train else read_centre
        try:
            pixels[number], size = stored(paths[number], settings.size)
        except DataError as error:
            return error
        return size

    workers = settings.workers or os.cpu_count() or 1
    yield from enumerate(read_ahead(fill, range(len(paths)), num_threads=workers))
