"""Files of precomputed data: packed images, latents and tokens. Written once, checked, and mapped into memory.

    "halfstep" and what it is, padded to one page | data | index (JSON) | length and SHA-256 of the index

The index comes last because it holds a CRC-32 of every block of the data. A file is written under a temporary name and
then renamed: either it is complete or it does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from halfstep.disk import open_atomic_file, parse_json
from halfstep.errors import DataError
from halfstep_train.data.files import Array, check_free_space, explain_full_disk

DATA_AT = 4096
"""One page, so that the mapping starts at the first byte of data."""
TRAILER = struct.Struct("<Q32s")
BLOCK_BYTES = 1 << 20
"""Bytes per CRC-32."""
VERIFIED_BYTES = 4 << 30
"""Most bytes that are checked on opening; of a larger file this many, evenly spread (about one second per GB)."""
VERIFY_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFile:
    """An opened file."""

    path: Path
    index: dict[str, Any]
    """What the writer stored."""
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
        self._file, self._rest, self.crcs, self.num_bytes = file, bytearray(), list[int](), 0

    def write(self, data: bytes) -> None:
        self._rest += data
        self.num_bytes += len(data)
        while len(self._rest) >= BLOCK_BYTES:
            self._write_block(BLOCK_BYTES)

    def _write_block(self, length: int) -> None:
        block = bytes(self._rest[:length])
        self._file.write(block)
        self.crcs.append(zlib.crc32(block))
        del self._rest[:length]

    def finish(self) -> None:
        if self._rest:
            self._write_block(len(self._rest))
        stored = {"index": self.index, "num_bytes": self.num_bytes, "block_bytes": BLOCK_BYTES, "crcs": self.crcs}
        text = json.dumps(stored).encode()
        self._file.write(text + TRAILER.pack(len(text), hashlib.sha256(text).digest()))


@contextmanager
def write_cache(path: Path, what: str, num_bytes: int) -> Iterator[CacheWriter]:
    """Yield a writer whose file appears at `path` when the block ends without an error.

    `what` it is, such as `packed cache`, tells it apart from other caches; `num_bytes` is an estimate.
    """
    with explain_full_disk(path, f"the {what}"):
        check_free_space(path, num_bytes, f"the {what}")
        with open_atomic_file(path, follows_links=True) as hidden, hidden.open("wb") as file:
            file.write(_make_start(what).ljust(DATA_AT, b"\0"))
            writer = CacheWriter(file)
            yield writer
            writer.finish()


def _make_start(what: str) -> bytes:
    return f"halfstep {what} 1\n".encode()


def is_cache(path: Path, what: str) -> bool:
    """True if a file starts as `write_cache` writes it; it may be broken."""
    try:
        with path.open("rb") as file:
            return file.read(DATA_AT).startswith(_make_start(what))
    except OSError:
        return False


def open_cache(path: Path, what: str, fix: str, *, verify_bytes: int = VERIFIED_BYTES) -> CacheFile:
    """Open a file after checking its index and, evenly spread, this many bytes of its data; errors have this fix."""
    try:
        if not is_cache(path, what):
            raise ValueError("its first bytes are not those of such a file")
        stored = _read_index(path)
        _verify(path, stored, verify_bytes)
        return CacheFile(path=path, index=stored["index"], crcs=stored["crcs"])
    except (OSError, struct.error, ValueError) as error:
        raise DataError(f"{path} is not a usable {what}", why=str(error), fix=fix) from error


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
        raise ValueError(f"it holds {data_end - DATA_AT:,} bytes of data, not the {stored['num_bytes']:,} of its index")
    return stored


def _verify(path: Path, stored: dict[str, Any], verify_bytes: int) -> None:
    num_bytes, block_bytes, crcs = stored["num_bytes"], stored["block_bytes"], stored["crcs"]
    data: Any = np.memmap(path, dtype=np.uint8, mode="r", offset=DATA_AT, shape=(num_bytes,)) if num_bytes else b""
    # Every block of a small file, evenly spread ones of a large file.
    blocks = range(0, len(crcs), max(1, -(-num_bytes // max(1, verify_bytes))))

    def compute_crc(block: int) -> int:
        return zlib.crc32(data[block * block_bytes : (block + 1) * block_bytes])

    with ThreadPoolExecutor(VERIFY_THREADS) as threads:  # zlib computes without the interpreter's lock
        for block, found in zip(blocks, threads.map(compute_crc, blocks), strict=True):
            if found != crcs[block]:
                raise ValueError("its checksum does not match: it was modified, or the disk damaged it")
