"""Files of precomputed data: packed images, latents and tokens. Written once, checked, and mapped into memory.

    "halfstep" and what it is, padded to one page | data | index (JSON) | length and SHA-256 of the index

The index comes last because it holds a CRC-32 of every block of the data. A file is written under a temporary name and
then renamed: either it is complete or it does not exist. A fingerprint of everything it was made from ties it to its
sources; a file that is stale or damaged is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from halfstep.disk import open_atomic_file, parse_json, take_turn
from halfstep.errors import DataError, summarise_error
from halfstep_train.data.files import Array

DATA_AT = 4096
"""One page, so that the mapping starts at the first byte of data."""
TRAILER = struct.Struct("<Q32s")
BLOCK_BYTES = 1 << 20
"""Bytes per CRC-32."""
VERIFIED_BYTES = 4 << 30
"""Most bytes that are checked on opening; of a larger file this many, evenly spread (about one second per GB)."""
CRC_THREADS = 4
ELSEWHERE = "choose a file elsewhere: data.cache_file=FILE"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFile:
    """An opened file."""

    path: Path
    index: dict[str, Any]
    """What the writer stored."""
    made_from: str
    """Fingerprint of its sources and settings; a cache with another one is stale."""
    crcs: list[int]

    @property
    def checksum(self) -> str:
        """Return a SHA-256 that is the same for the same data."""
        return hashlib.sha256(repr(self.crcs).encode()).hexdigest()

    def map(self, dtype: Any, shape: tuple[int, ...], *, start: int = 0) -> Array:
        """Map values of this type and shape into memory, from the byte `start` of the data on."""
        if 0 in shape:
            return np.empty(shape, dtype)
        # Copy on write: torch wants writable memory, and nothing writes to it.
        return np.memmap(self.path, dtype=dtype, mode="c", offset=DATA_AT + start, shape=shape)


class CacheWriter:
    """Receives the data of a file in order, and the `index` to store after it."""

    index: dict[str, Any]

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes = file, 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)

    def finish(self, made_from: str) -> None:
        self._file.flush()
        crcs = _compute_crcs(Path(self._file.name), self.num_bytes)
        stored = {"index": self.index, "made_from": made_from, "num_bytes": self.num_bytes, "crcs": crcs}
        text = json.dumps(stored).encode()
        self._file.write(text + TRAILER.pack(len(text), hashlib.sha256(text).digest()))


def open_or_write(
    path: Path,
    what: str,
    made_from: str,
    write: Callable[[CacheWriter], None],
    *,
    verify_bytes: int = VERIFIED_BYTES,
) -> tuple[CacheFile, bool]:
    """Open the cache at `path` if it is intact and was made from the same; otherwise write it. Return it, and
    whether it was written.

    `what` it is, such as `packed cache`, tells it apart from other caches. `write` writes the data and sets the index.
    """

    def open_matching() -> CacheFile | None:
        with suppress(DataError):
            found = open_cache(path, what, verify_bytes=verify_bytes)
            return found if found.made_from == made_from else None
        return None

    if found := open_matching():
        return found, False
    with take_turn(path):
        # Another process may have written the file while this one waited.
        if not (found := open_matching()):
            _write_cache(path, what, made_from, write)
            found = open_cache(path, what, verify_bytes=1)  # just written: its data need no check
    return found, True


def _write_cache(path: Path, what: str, made_from: str, write: Callable[[CacheWriter], None]) -> None:
    is_ours = path.name.startswith(".halfstep-") or _is_cache(path, what)  # by name also with a damaged start
    if path.exists() and not is_ours:
        raise DataError(
            f"{path} exists and is not a {what}",
            why="halfstep overwrites only its own caches",
            fix=f"{ELSEWHERE}, or delete it if you do not need it",
        )
    try:
        with open_atomic_file(path, follows_links=True) as hidden, hidden.open("wb") as file:
            file.write(_make_start(what).ljust(DATA_AT, b"\0"))
            writer = CacheWriter(file)
            write(writer)
            writer.finish(made_from)
    except OSError as error:  # a full disk, a quota, a missing folder
        raise DataError(
            f"cannot write the {what} {path}: {error.strerror or summarise_error(error)}",
            why="this attempt left nothing behind",
            fix=f"free some space there, or {ELSEWHERE}",
        ) from error


def _make_start(what: str) -> bytes:
    return f"halfstep {what} 1\n".encode()


def _is_cache(path: Path, what: str) -> bool:
    """True if a file starts as `_write_cache` writes it; it may be broken."""
    try:
        with path.open("rb") as file:
            return file.read(DATA_AT).startswith(_make_start(what))
    except OSError:
        return False


def open_cache(path: Path, what: str, *, verify_bytes: int = VERIFIED_BYTES) -> CacheFile:
    """Open a file after checking its index and, evenly spread, this many bytes of its data."""
    try:
        if not _is_cache(path, what):
            raise ValueError("its first bytes are not those of such a file")
        stored = _read_index(path)
        # Every block of a small file, evenly spread ones of a large file.
        step = max(1, -(-stored["num_bytes"] // verify_bytes))
        if _compute_crcs(path, stored["num_bytes"], step) != stored["crcs"][::step]:
            raise ValueError("its checksum does not match: it was modified, or the disk damaged it")
        return CacheFile(path=path, index=stored["index"], made_from=stored["made_from"], crcs=stored["crcs"])
    except (KeyError, OSError, struct.error, ValueError) as error:  # KeyError: of another version
        raise DataError(f"{path} is not a usable {what}", why=str(error), fix="delete it: it is rebuilt") from error


def fingerprint_files(root: Path, parts: Iterable[Iterable[Path]], settings: Mapping[str, Any]) -> str:
    """Hash settings and files; it changes if a file is added, removed, renamed, rewritten or moved between splits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for number, paths in enumerate(parts):
        for path in paths:
            status = path.stat() if path.exists() else path.lstat()  # a link that leads nowhere
            row = (number, path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns)
            digest.update(repr(row).encode())
    return digest.hexdigest()


def _read_index(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - TRAILER.size))
        index_bytes, digest = TRAILER.unpack(file.read(TRAILER.size))
        data_end = length - TRAILER.size - index_bytes
        if data_end < DATA_AT:
            raise ValueError("it is cut short")
        file.seek(data_end)
        text = file.read(index_bytes)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("the checksum of its index is wrong")
    stored: dict[str, Any] = parse_json(text)
    if data_end != DATA_AT + stored["num_bytes"]:
        raise ValueError(f"it has {data_end - DATA_AT:,} bytes of data, not the {stored['num_bytes']:,} of its index")
    return stored


def _compute_crcs(path: Path, num_bytes: int, step: int = 1) -> list[int]:
    """Return the CRC-32 of every `step`-th block of a file's data."""
    data: Any = np.memmap(path, dtype=np.uint8, mode="r", offset=DATA_AT, shape=(num_bytes,)) if num_bytes else b""
    starts = range(0, num_bytes, step * BLOCK_BYTES)
    with ThreadPoolExecutor(CRC_THREADS) as threads:  # zlib computes without the interpreter's lock
        return list(threads.map(lambda start: zlib.crc32(data[start : start + BLOCK_BYTES]), starts))
