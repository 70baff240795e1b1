"""The packed cache: decoded images of a folder in one file that is mapped into memory, never read as a whole.

    magic, padded to a page | pixels (N, S, S, 3) | index (JSON) | length and SHA-256 of the index

The index comes last because it holds a CRC of every image. A file is written under a temporary name, flushed, then
renamed: it exists whole or not at all. It is tied to the folder by a fingerprint of every file's name, size and time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from halfstep.data.crops import Array
from halfstep.data.stored_images import StoredImages
from halfstep.disk import parse_json
from halfstep.errors import DataError

MAGIC = b"halfstep pack 1\n"
PIXELS_AT = 4096
"""Of a page, so that the mapping starts at the first pixel."""
TRAILER = struct.Struct("<Q32s")
VERIFIED_BYTES = 4 << 30
"""Most bytes whose CRC is checked on opening; of a larger file that many, evenly spread (about a second a GB)."""
VERIFY_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PackIndex:
    """All but the pixels: row i is the i-th image, the training ones first."""

    size: int
    num_train: int
    classes: tuple[str, ...]
    titles: dict[str, str]
    fingerprint: str
    names: tuple[str, ...]
    labels: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each original."""
    checksums: tuple[int, ...]
    left_out: tuple[str, ...]
    """Why each bad file is not here."""

    @property
    def image_bytes(self) -> int:
        """Of one stored image."""
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
            f"{path} does not belong to the folder as it is now",
            why="files or settings changed since it was packed",
            fix="pack it again: halfstep pack DIR",
        )
    shape = (len(index.names), index.size, index.size, 3)
    # Copy on write: torch wants writable memory, and nobody writes.
    pixels: Array = np.memmap(path, dtype=np.uint8, mode="c", offset=PIXELS_AT, shape=shape)
    _verify(path, index, pixels, verify_bytes)
    sizes, labels, everything = np.array(index.sizes), torch.tensor(index.labels), torch.from_numpy(pixels)
    train, val = (
        StoredImages(pixels=everything[part], sizes=sizes[part], labels=labels[part], names=index.names[part])
        for part in (slice(index.num_train), slice(index.num_train, None))
    )
    return Pack(path=path, index=index, train=train, val=val)


def read_index(path: Path) -> PackIndex:
    """The checked index of a cache file, without its pixels."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _broken(path, "it does not start as one")
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - TRAILER.size))
            index_bytes, digest = TRAILER.unpack(file.read(TRAILER.size))
            pixels_end = length - TRAILER.size - index_bytes
            if pixels_end < PIXELS_AT:
                raise _broken(path, "it is cut short")
            file.seek(pixels_end)
            text = file.read(index_bytes)
    except (OSError, struct.error) as error:
        raise _broken(path, str(error)) from error
    if hashlib.sha256(text).digest() != digest:
        raise _broken(path, "the checksum of its index is wrong")
    index = _index_of(parse_json(text))
    if pixels_end != PIXELS_AT + len(index.names) * index.image_bytes:
        raise _broken(path, f"it holds {pixels_end - PIXELS_AT:,} bytes of pixels, not those of its index")
    return index


def is_pack(path: Path) -> bool:
    """Whether a file is a packed cache, be it a broken one: by its name, or by how it starts."""
    if not path.is_file() or path.suffix == ".pack":
        return path.is_file()
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def crc_of(image: Array) -> int:
    """The checksum of one image's bytes."""
    return zlib.crc32(image.data)


@contextmanager
def partial_file(path: Path, num_images: int, size: int) -> Iterator[tuple[Array, Path]]:
    """Room for the pixels under a temporary name, which goes whatever happens; one writer at a time."""
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


def finish(partial: Path, path: Path, pixels: Array, index: PackIndex) -> None:
    """Add the index, force all to the disk, and give the file its name."""
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


def fingerprint_of(root: Path, parts: Sequence[Sequence[Path]], settings: dict[str, Any]) -> str:
    """Changes when a file of the folder is added, removed, renamed, moved to another split or written, or a setting."""
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
        raise DataError(f"{path} is being packed by another process", fix="wait for it, then start again")


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        # Else a disk that fills up kills the process that writes to the mapping (SIGBUS) instead of an error here.
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    else:
        file.truncate(num_bytes)


def _verify(path: Path, index: PackIndex, pixels: Array, verify_bytes: int) -> None:
    stride = max(1, -(-pixels.nbytes // max(1, verify_bytes)))
    rows = range(0, len(pixels), stride)
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:  # zlib computes without the interpreter's lock
        for row, found in zip(rows, threads.map(lambda i: crc_of(pixels[i]), rows), strict=True):
            if found != index.checksums[row]:
                raise _broken(path, f"the pixels of {index.names[row]} are not those that were written")


def _index_of(values: dict[str, Any]) -> PackIndex:
    values |= {name: tuple(values[name]) for name in ("classes", "names", "labels", "checksums", "left_out")}
    return PackIndex(**values | {"sizes": tuple((w, h) for w, h in values["sizes"])})


def _broken(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a usable packed cache", why=why, fix="pack the folder again: halfstep pack DIR")
