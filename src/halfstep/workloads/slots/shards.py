"""Webdataset shards: tar files found by a brace pattern, and an index of where in them each sample's parts lie.

A shard is read once, header by header; from then on a part of a sample is an offset and a size, so that any sample can
be read by its index, in any order and by any process. Reading tars as a stream (webdataset) cannot do that: there a
sample depends on the worker that happens to read its shard, and a resumed run sees others.
"""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.data.files import BadFiles, some_of
from halfstep.errors import DataError, format_count, summarise_error

Array = np.ndarray[Any, Any]

BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MAX_SHARDS = 100_000
"""More names than any data set has shards: a slip in a pattern."""


def expand_braces(pattern: str) -> list[str]:
    """`{000000..000002}` and `{a,b}` as names, as a shell expands them; several in a pattern multiply."""
    parts = BRACES.split(pattern)
    choices = [_choices(part, pattern) if place % 2 else [part] for place, part in enumerate(parts)]
    if np.prod([len(choice) for choice in choices], dtype=float) > MAX_SHARDS:
        raise DataError(f"{pattern} means more than {MAX_SHARDS:,} shards", fix="check the numbers in its braces")
    return ["".join(words) for words in itertools.product(*choices)]


def _choices(inner: str, pattern: str) -> list[str]:
    if "," in inner:
        return inner.split(",")
    found = RANGE.fullmatch(inner)
    if found is None:
        raise DataError(
            f"{{{inner}}} in {pattern} is neither a range nor a list", fix="write {000000..000304} or {a,b}"
        )
    first, last = int(found[1]), int(found[2])
    if not first <= last <= first + MAX_SHARDS:
        raise DataError(f"{{{inner}}} in {pattern} runs from {first} to {last}", fix="the smaller number comes first")
    width = len(found[1]) if found[1].startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def find_shards(root: Path, patterns: str | Sequence[str], *, bad_files: BadFiles) -> list[Path]:
    """The shards of patterns below `root`, in order; a name with `*` is whatever is there, any other must be there."""
    found: list[Path] = []
    missing: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in expand_braces(pattern):
            here = sorted(root.glob(name)) if "*" in name else [root / name]
            present = [path for path in here if path.is_file()]
            missing += [] if present else [name]
            found += present
    if not found:
        raise DataError(f"no shard of {patterns} is in {root}", fix="--data-dir DIR (data.dir): patterns start there")
    if missing:
        bad_files.report(
            DataError(
                f"{format_count(len(missing), 'shard')} of {patterns} are not in {root}: {some_of(missing)}",
                why=f"{len(found)} are there",
                fix="download them, narrow the pattern, or go on without them: data.on_bad_file=skip",
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Bytes in a file."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSample:
    """One sample: its name in the shard, and where its parts are, by their endings (`video.npy`)."""

    name: str
    parts: dict[str, Place]


def index_shard(path: Path, *, bad_files: BadFiles) -> list[ShardSample]:
    """The samples of one shard in the order they stand in it: files of one name up to the first dot are one."""
    samples: dict[str, dict[str, Place]] = {}
    try:
        for name, place in _members(path):
            folder, _, file = name.rpartition("/")
            key, _, ending = file.partition(".")
            if not key:  # of a file system: .DS_Store, ._video.npy
                continue
            parts = samples.setdefault(f"{folder}/{key}" if folder else key, {})
            if ending.lower() in parts:
                bad_files.report(_twice(path, name))
            parts[ending.lower()] = place
    except (tarfile.TarError, OSError, EOFError) as error:
        if samples:
            samples.popitem()  # the last one is cut, or may lack parts
        bad_files.report(_damaged(path, error))
    return [ShardSample(name=name, parts=parts) for name, parts in samples.items()]


def _members(path: Path) -> Iterator[tuple[str, Place]]:
    with tarfile.open(path, "r:") as shard:
        for member in shard:
            if member.isreg():
                yield member.name, Place(path=path, offset=member.offset_data, size=member.size)
        # tarfile takes whatever is no header for the end: a cut, damage.
        assert shard.fileobj is not None
        shard.fileobj.seek(shard.offset)
        if shard.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"it does not go on at byte {shard.offset:,}, nor end there")


def _twice(path: Path, name: str) -> DataError:
    return DataError(
        f"{path} holds {name} twice",
        why="one of them would never be seen",
        fix="give each sample a name of its own, or take the last one: data.on_bad_file=skip",
    )


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is not a complete tar file",
        why=f"{error}; packed tars (.tar.gz) cannot be read by offset" if _is_packed(path) else str(error),
        fix="unpack it to .tar" if _is_packed(path) else "download it again, or data.on_bad_file=skip",
    )


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4)[:2] in (b"\x1f\x8b", b"BZ") or path.suffix in (".gz", ".xz", ".zst", ".tgz")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """A `.npy` file inside another one: its header was read, its rows are read as they are asked for."""

    place: Place
    data_offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def rows(self, first: int, count: int) -> Array:
        """Rows from `first` on, and no other byte of the file."""
        row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        with self.place.path.open("rb") as file:
            file.seek(self.data_offset + first * row_bytes)
            content = file.read(count * row_bytes)
        if len(content) < count * row_bytes:
            raise DataError(f"{self.place.path} ends in the middle of a sample", fix="download it again")
        return np.frombuffer(content, dtype=self.dtype).reshape(count, *self.shape[1:])


def stored_array(place: Place, name: str) -> StoredArray:
    """The header of an array in a shard; `name` stands in errors."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            start = file.tell()
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(
            f"{name} in {place.path} is not a .npy array",
            why=summarise_error(error),
            fix="write it again with numpy.save, or leave bad samples out: data.on_bad_file=skip",
        ) from error
    if dtype.hasobject or is_fortran:
        what = "Python objects, which only code could read" if dtype.hasobject else "columns, not rows (Fortran order)"
        raise DataError(
            f"{name} in {place.path} holds {what}", fix="save a plain array: np.save(f, np.ascontiguousarray(a))"
        )
    needed = start - place.offset + int(np.prod(shape)) * dtype.itemsize
    if needed > place.size:
        raise DataError(
            f"{name} in {place.path} is cut short: {place.size:,} of {needed:,} bytes",
            fix="download the shard again, or leave bad samples out: data.on_bad_file=skip",
        )
    return StoredArray(place=place, data_offset=start, shape=tuple(shape), dtype=dtype)
