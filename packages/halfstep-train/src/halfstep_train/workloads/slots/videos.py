"""Sets of videos: the interface that reads frames and masks by index, and its implementation for tar shards.

Clips are cut from a `Videos` (data.py); folders of frames and video files are in video_layouts.py. Opening a set reads
every header, so that a problem with one video is reported by name before training; with `data.on_bad_file: skip` such
videos are left out and counted.

The headers of a webdataset shard are read once. After that, each file of a sample is an offset and a size, so any
sample can be read by its index, in any order and by any process. Reading tars as a stream, as webdataset does, cannot
do that: a sample then depends on the worker that happens to read its shard, and a resumed run sees other samples.
"""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from halfstep.errors import DataError, format_count, summarise_error
from halfstep_train.data.files import Array, BadFiles, list_some

VIDEO_PART, MASK_PARTS = "video.npy", ("segmentations.npy", "segmentation.npy", "masks.npy")
WRITE_VIDEO = "write NAME.video.npy with uint8 frames (T, H, W, 3)"
NO_OBJECT = 0
"""The label of background or unlabelled pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """Facts about one video, known without reading a frame."""

    name: str
    num_frames: int
    size: tuple[int, int]
    """Height and width."""
    has_masks: bool = False


class Videos(Protocol):
    """A set of videos."""

    @property
    def videos(self) -> Sequence[Video]: ...

    @property
    def labels_background(self) -> bool:
        """True if label 0 is an annotated background, not just unlabelled pixels."""
        ...

    def read_frames(self, index: int, first: int, count: int) -> Array:
        """Return frames (count, H, W, 3) uint8."""
        ...

    def read_masks(self, index: int, first: int, count: int) -> Array:
        """Return labels (count, H, W) uint8: 0 is background, every other number an object, the same in all frames."""
        ...

    def files(self) -> Sequence[Path]: ...


class ShardVideos:
    """Videos in tar shards: `.video.npy` (T, H, W, 3) and optionally `.segmentations.npy` (T, H, W[, 1])."""

    def __init__(self, root: Path, patterns: str | Sequence[str], *, bad_files: BadFiles) -> None:
        self._paths = find_shards(root, patterns, bad_files=bad_files)
        self._videos: list[Video] = []
        self._arrays: list[tuple[StoredArray, StoredArray | None]] = []
        for path in self._paths:
            for sample in index_shard(path, bad_files=bad_files):
                try:
                    self._add(path, sample)
                except DataError as error:
                    bad_files.report(error)
        if not self._videos:
            named = list_some([patterns] if isinstance(patterns, str) else patterns)
            raise DataError(f"no video is in {named} below {root}", why=describe_left_out(bad_files), fix=WRITE_VIDEO)

    def _add(self, path: Path, sample: ShardSample) -> None:
        """Add one video after checking its headers; raise DataError if it cannot be used."""
        where = f"sample {sample.name} of {path}"
        if VIDEO_PART not in sample.parts:
            has_masks = any(part in sample.parts for part in MASK_PARTS)
            raise DataError(
                f"{where} has {'masks but no' if has_masks else 'no'} {VIDEO_PART}",
                why=f"its files are {', '.join(sample.parts)}",
                fix=f"{WRITE_VIDEO}, or data.on_bad_file=skip",
            )
        frames = read_array_header(sample.parts[VIDEO_PART], f"{sample.name}.{VIDEO_PART}")
        if len(frames.shape) != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
            raise DataError(
                f"{where}: frames are {frames.dtype} {frames.shape}",
                fix="save uint8 (T, H, W, 3), or data.on_bad_file=skip",
            )
        part = next((sample.parts[name] for name in MASK_PARTS if name in sample.parts), None)
        masks = None if part is None else read_array_header(part, f"{sample.name}'s masks")
        if masks is not None:
            _check_masks(masks, frames.shape, where)
        self._arrays.append((frames, masks))
        self._videos.append(
            Video(
                name=f"{path.name}/{sample.name}",
                num_frames=frames.shape[0],
                size=(frames.shape[1], frames.shape[2]),
                has_masks=masks is not None,
            )
        )

    @property
    def videos(self) -> Sequence[Video]:
        return self._videos

    @property
    def labels_background(self) -> bool:
        """False for masks with one plane per object (YTVIS), which leave pixels unlabelled."""
        return not any(masks is not None and masks.shape[3:] not in ((), (1,)) for _, masks in self._arrays)

    def read_frames(self, index: int, first: int, count: int) -> Array:
        return self._arrays[index][0].read_rows(first, count)

    def read_masks(self, index: int, first: int, count: int) -> Array:
        stored = self._arrays[index][1]
        assert stored is not None, "masks were requested of a video without any"
        rows = stored.read_rows(first, count)
        # Either one mask per object (YTVIS) or one label per pixel.
        if rows.ndim == 4 and rows.shape[3] > 1:
            return merge_planes(rows, self._videos[index].name)
        return renumber_labels(rows.reshape(rows.shape[:3]), self._videos[index].name)

    def files(self) -> Sequence[Path]:
        return self._paths


def _check_masks(masks: StoredArray, frames: tuple[int, ...], where: str) -> None:
    """Raise DataError if the masks of a video do not fit its frames."""
    if len(masks.shape) not in (3, 4) or masks.shape[:3] != frames[:3] or masks.dtype.kind not in "uib":
        raise DataError(
            f"{where}: masks are {masks.dtype} {masks.shape}, its frames {frames}",
            why="masks hold one object number per pixel of each frame",
            fix=f"save integers of shape {(*frames[:3], 1)}, or data.on_bad_file=skip",
        )


def renumber_labels(labels: Array, name: str) -> Array:
    """Return labels as uint8. Labels above 255 are renumbered; 0 stays 0."""
    if labels.dtype == np.uint8 or (labels.min() >= NO_OBJECT and labels.max() < 256):
        return labels.astype(np.uint8, copy=False)
    # Append 0 so that it always exists and gets a number, even if no pixel has it.
    values, numbered = np.unique(np.append(NO_OBJECT, labels), return_inverse=True)
    numbered = numbered[1:] - int(np.searchsorted(values, NO_OBJECT))
    if values[0] < NO_OBJECT or len(values) > 256:
        raise DataError(
            f"the masks of {name} hold {len(values)} labels from {values[0]} to {values[-1]}",
            fix="0 for background, at most 255 objects",
        )
    return numbered.reshape(labels.shape).astype(np.uint8)


def merge_planes(planes: Array, name: str) -> Array:
    """Merge one mask per object (T, H, W, objects) into one label per pixel (T, H, W); 0 where there is no object."""
    is_there = planes != 0
    if bool((is_there.sum(-1, dtype=np.int32) > 1).any()):
        raise DataError(
            f"objects overlap in the masks of {name}",
            why="FG-ARI and mBO need one object per pixel",
            fix="write its segmentations.npy again, with one object at each pixel",
        )
    return np.where(is_there.any(-1), is_there.argmax(-1) + 1, NO_OBJECT).astype(np.uint8)


def describe_left_out(bad_files: BadFiles) -> str:
    """Describe the files that were left out; empty if there are none."""
    return f"{len(bad_files.skipped)} left out: {bad_files.skipped[0].what}" if bad_files.skipped else ""


BRACES = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"(\d+)\.\.(\d+)")
MAX_SHARDS = 100_000
"""Limit of expanded names: more than any data set has, so the pattern must be wrong."""


def expand_braces(pattern: str) -> list[str]:
    """Expand `{000000..000002}` and `{a,b}` as a shell does; several braces give all combinations."""
    parts = BRACES.split(pattern)
    choices = [
        _expand_choices(part, pattern) if index % 2 else [part] for index, part in enumerate(parts)
    ]  # odd: braces
    if np.prod([len(choice) for choice in choices], dtype=float) > MAX_SHARDS:
        raise DataError(f"{pattern} expands to more than {MAX_SHARDS:,} shards", fix="check the numbers in its braces")
    return ["".join(combination) for combination in itertools.product(*choices)]


def _expand_choices(inner: str, pattern: str) -> list[str]:
    """Return the alternatives of one pair of braces."""
    if "," in inner:
        return inner.split(",")
    found = RANGE.fullmatch(inner)
    if found is None:
        raise DataError(
            f"{{{inner}}} in {pattern} is neither a range nor a list", fix="write {000000..000304} or {a,b}"
        )
    first, last = int(found[1]), int(found[2])
    if not first <= last <= first + MAX_SHARDS:
        raise DataError(f"{{{inner}}} in {pattern} runs from {first} to {last}", fix="write the smaller number first")
    width = len(found[1]) if found[1].startswith("0") else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]


def find_shards(root: Path, patterns: str | Sequence[str], *, bad_files: BadFiles) -> list[Path]:
    """Return the shards that patterns name below `root`, in order. Names without `*` must exist."""
    found: list[Path] = []
    missing: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        for name in expand_braces(pattern):
            here = sorted(root.glob(name)) if "*" in name else [root / name]
            present = [path for path in here if path.is_file()]
            missing += [] if present else [name]
            found += present
    if not found:
        raise DataError(
            f"no shard of {patterns} is in {root}",
            fix="set data.dir (--data-dir DIR) to the folder that the patterns are relative to",
        )
    if missing:
        bad_files.report(
            DataError(
                f"{format_count(len(missing), 'shard')} of {patterns} are missing in {root}: {list_some(missing)}",
                why=f"{len(found)} are there",
                fix="download them, narrow the pattern, or continue without them: data.on_bad_file=skip",
            )
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """A range of bytes in a file."""

    path: Path
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSample:
    """One sample: its name in the shard, and the byte ranges of its files by extension (`video.npy`)."""

    name: str
    parts: dict[str, ByteRange]


def index_shard(path: Path, *, bad_files: BadFiles) -> list[ShardSample]:
    """Return the samples of one shard in order. Files with the same name up to the first dot form one sample."""
    samples: dict[str, dict[str, ByteRange]] = {}
    try:
        for name, location in _iterate_members(path):
            folder, _, file = name.rpartition("/")
            key, _, ending = file.partition(".")
            if not key:  # hidden files: .DS_Store, ._video.npy
                continue
            parts = samples.setdefault(f"{folder}/{key}" if folder else key, {})
            if ending.lower() in parts:
                bad_files.report(_make_twice_error(path, name))
            parts[ending.lower()] = location
    except (tarfile.TarError, OSError, EOFError) as error:
        if samples:
            samples.popitem()  # the last one is truncated, or may lack files
        bad_files.report(_make_damaged_error(path, error))
    return [ShardSample(name=name, parts=parts) for name, parts in samples.items()]


def _iterate_members(path: Path) -> Iterator[tuple[str, ByteRange]]:
    """Yield the name and byte range of each file in a tar; raise ReadError if the tar is incomplete."""
    with tarfile.open(path, "r:") as shard:
        for member in shard:
            if member.isreg():
                yield member.name, ByteRange(path=path, offset=member.offset_data, size=member.size)
        # tarfile treats anything that is not a header as the end, also in a truncated or damaged file. A complete file
        # has an end marker there: a block of zeros.
        assert shard.fileobj is not None
        shard.fileobj.seek(shard.offset)
        if shard.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"neither a file header nor an end marker at byte {shard.offset:,}")


def _make_twice_error(path: Path, name: str) -> DataError:
    return DataError(
        f"{path} holds {name} twice",
        why="one of them would never be read",
        fix="give each sample a different name, or use the last one: data.on_bad_file=skip",
    )


def _make_damaged_error(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} is not a complete tar file",
        why=f"{error}; compressed tars (.tar.gz) cannot be read by offset" if _is_packed(path) else str(error),
        fix="decompress it to .tar" if _is_packed(path) else "download it again, or data.on_bad_file=skip",
    )


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4)[:2] in (b"\x1f\x8b", b"BZ") or path.suffix in (".gz", ".xz", ".zst", ".tgz")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """A `.npy` file inside another file. Its header has been read; rows are read on demand."""

    location: ByteRange
    data_offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read_rows(self, first: int, count: int) -> Array:
        """Read `count` rows from `first` on, and no other byte of the file."""
        row_bytes = int(np.prod(self.shape[1:])) * self.dtype.itemsize
        with self.location.path.open("rb") as file:
            file.seek(self.data_offset + first * row_bytes)
            content = file.read(count * row_bytes)
        if len(content) < count * row_bytes:
            raise DataError(f"{self.location.path} ends in the middle of a sample", fix="download it again")
        return np.frombuffer(content, dtype=self.dtype).reshape(count, *self.shape[1:])


def read_array_header(location: ByteRange, name: str) -> StoredArray:
    """Read the header of an array in a shard; `name` is for error messages."""
    try:
        with location.path.open("rb") as file:
            file.seek(location.offset)
            # np.load would read the whole array; only its header is needed.
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            start = file.tell()
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(
            f"{name} in {location.path} is not a .npy array",
            why=summarise_error(error),
            fix="write it again with numpy.save, or leave bad samples out: data.on_bad_file=skip",
        ) from error
    if dtype.hasobject or is_fortran:
        what = (
            "Python objects, which only unpickling could read"
            if dtype.hasobject
            else "columns, not rows (Fortran order)"
        )
        raise DataError(
            f"{name} in {location.path} holds {what}", fix="save a plain array: np.save(f, np.ascontiguousarray(a))"
        )
    needed = start - location.offset + int(np.prod(shape)) * dtype.itemsize
    if needed > location.size:
        raise DataError(
            f"{name} in {location.path} is truncated: {location.size:,} of {needed:,} bytes",
            fix="download the shard again, or leave bad samples out: data.on_bad_file=skip",
        )
    return StoredArray(location=location, data_offset=start, shape=tuple(shape), dtype=dtype)
