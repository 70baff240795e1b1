"""A video whose frames are read by index, and its implementation for tar shards.

Clips are cut from videos in data.py; folders of frames and video files are in video_layouts.py. Opening a video reads
its headers, so that a problem is reported by name before training; with `data.on_bad_file: skip` such videos are left
out and counted.

The headers of a webdataset shard are read once. After that, each file of a sample is an offset and a size, so any
sample can be read by its index, in any order and by any process. Reading tars as a stream, as webdataset does, cannot
do that: a sample then depends on the worker that happens to read its shard, and a resumed run sees other samples.
"""

from __future__ import annotations

import math
import re
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from halfstep.errors import DataError, format_count, summarise_error
from halfstep_train.data.files import Array, BadFiles, list_some

VIDEO_PART, MASK_PARTS = "video.npy", ("segmentations.npy", "segmentation.npy", "masks.npy")
NO_OBJECT = 0
"""The label of background or unlabelled pixels."""


@dataclass(frozen=True, kw_only=True)
class Video:
    """One video; its size and length are known without reading a frame."""

    name: str
    paths: tuple[Path, ...]
    """The files that it is read from."""
    num_frames: int
    size: tuple[int, int]
    """Height and width."""
    has_masks: bool = False
    labels_background: bool = True
    """True if label 0 is an annotated background, not just unlabelled pixels."""

    def read_frames(self, first: int, count: int) -> Array:
        """Return frames (count, H, W, 3) uint8."""
        raise NotImplementedError

    def read_masks(self, first: int, count: int) -> Array:
        """Return labels (count, H, W) uint8: 0 is background, every other number an object, the same in all frames."""
        raise NotImplementedError


Source = TypeVar("Source")


def open_each(
    open_one: Callable[[Source], Video | None], sources: Iterable[Source], where: str, bad_files: BadFiles
) -> list[Video]:
    """Open a video from each source that holds one; report those that cannot be used."""
    found = []
    for source in sources:
        try:
            video = open_one(source)
        except DataError as error:
            bad_files.report(error)
        else:
            found += [video] if video is not None else []
    if not found:
        raise DataError(
            f"no video is in {where}",
            why=describe_left_out(bad_files),
            fix="use one folder of images per video, tar shards that are not compressed, or .gif and .mp4 files",
        )
    return found


def describe_left_out(bad_files: BadFiles) -> str:
    """Describe the files that were left out; empty if there are none."""
    return f"{len(bad_files.skipped)} left out: {bad_files.skipped[0].what}" if bad_files.skipped else ""


@dataclass(frozen=True, kw_only=True)
class ShardVideo(Video):
    """A sample of a tar shard: `.video.npy` (T, H, W, 3) and optionally `.segmentations.npy` (T, H, W[, 1])."""

    frames: StoredArray
    masks: StoredArray | None

    def read_frames(self, first: int, count: int) -> Array:
        return self.frames.read_rows(first, count)

    def read_masks(self, first: int, count: int) -> Array:
        assert self.masks is not None, "masks were requested of a video without any"
        rows = self.masks.read_rows(first, count)
        # Either one mask per object (YTVIS) or one label per pixel.
        if not self.labels_background:
            return merge_planes(rows, self.name)
        return renumber_labels(rows.reshape(rows.shape[:3]), self.name)


def open_shards(root: Path, patterns: str | Sequence[str], bad_files: BadFiles) -> list[Video]:
    """Open the videos of all shards that the patterns name."""
    samples = (
        (path, name, parts)
        for path in find_shards(root, patterns, bad_files=bad_files)
        for name, parts in index_shard(path, bad_files=bad_files).items()
    )
    named = list_some([patterns] if isinstance(patterns, str) else patterns)
    return open_each(lambda sample: _open_sample(*sample), samples, f"{named} below {root}", bad_files)


def _open_sample(path: Path, name: str, parts: Mapping[str, tarfile.TarInfo]) -> Video:
    """Open one sample after checking its headers; raise DataError if it cannot be used."""
    where = f"sample {name} of {path}"
    if VIDEO_PART not in parts:
        has_masks = any(part in parts for part in MASK_PARTS)
        raise DataError(
            f"{where} has {'masks but no' if has_masks else 'no'} {VIDEO_PART}",
            why=f"its files are {', '.join(parts)}",
            fix="write NAME.video.npy with uint8 frames (T, H, W, 3), or data.on_bad_file=skip",
        )
    frames = read_array_header(path, parts[VIDEO_PART])
    if len(frames.shape) != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise DataError(
            f"{where}: frames are {frames.dtype} {frames.shape}",
            fix="save uint8 (T, H, W, 3), or data.on_bad_file=skip",
        )
    part = next((parts[part] for part in MASK_PARTS if part in parts), None)
    masks = None if part is None else read_array_header(path, part)
    if masks and (
        len(masks.shape) not in (3, 4) or masks.shape[:3] != frames.shape[:3] or masks.dtype.kind not in "uib"
    ):
        raise DataError(
            f"{where}: masks are {masks.dtype} {masks.shape}, its frames {frames.shape}",
            why="masks hold one object number per pixel of each frame",
            fix=f"save integers of shape {(*frames.shape[:3], 1)}, or data.on_bad_file=skip",
        )
    return ShardVideo(
        name=f"{path.name}/{name}",
        paths=(path,),
        num_frames=frames.shape[0],
        size=(frames.shape[1], frames.shape[2]),
        has_masks=masks is not None,
        # Masks with one plane per object (YTVIS) leave pixels unlabelled.
        labels_background=masks is None or masks.shape[3:] in ((), (1,)),
        frames=frames,
        masks=masks,
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
            f"the masks of {name} contain {len(values)} labels from {values[0]} to {values[-1]}",
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


def expand_braces(pattern: str) -> list[str]:
    """Expand `{000000..000002}` and `{a,b}` as a shell does; several braces give all combinations."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if found is None:
        return [pattern]
    first, last, names = found.groups()
    width = len(first) if names is None and first.startswith("0") else 0
    choices = names.split(",") if names else [f"{k:0{width}d}" for k in range(int(first), int(last) + 1)]
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [before + choice + rest for choice in choices for rest in expand_braces(after)]


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


def index_shard(path: Path, *, bad_files: BadFiles) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Return the files of a shard by sample and extension (`video.npy`), in order.

    Files with the same name up to the first dot form one sample."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                folder, _, file = member.name.rpartition("/")
                key, _, ending = file.partition(".")
                if member.isreg() and key:  # without a key: hidden files such as .DS_Store, ._video.npy
                    files = samples.setdefault(f"{folder}/{key}".lstrip("/"), {})
                    if ending.lower() in files:
                        raise tarfile.ReadError(f"it contains {member.name} twice")
                    files[ending.lower()] = member
            # tarfile treats anything that is not a header as the end, also in a truncated or damaged file. A complete
            # file has an end marker there: a block of zeros.
            assert shard.fileobj is not None
            shard.fileobj.seek(shard.offset)
            if shard.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"neither a file header nor an end marker at byte {shard.offset:,}")
    except (tarfile.TarError, OSError, EOFError) as error:
        if samples:
            samples.popitem()  # the last one is truncated, or may lack files
        bad_files.report(
            DataError(
                f"{path} is not a complete tar file",
                why=f"{error}; compressed tars (.tar.gz) cannot be read by offset",
                fix="decompress it to .tar if it is compressed, else download it again, or data.on_bad_file=skip",
            )
        )
    return samples


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArray:
    """A `.npy` file inside another file. Its header has been read; rows are read on demand."""

    path: Path
    offset: int
    """Position of the first row."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read_rows(self, first: int, count: int) -> Array:
        """Read `count` rows from `first` on, and no other byte of the file."""
        length = math.prod(self.shape[1:])
        start = self.offset + first * length * self.dtype.itemsize
        return np.fromfile(self.path, self.dtype, count * length, offset=start).reshape(count, *self.shape[1:])


def read_array_header(path: Path, member: tarfile.TarInfo) -> StoredArray:
    """Read the header of an array in a shard."""
    name = f"{member.name} in {path}"
    try:
        with path.open("rb") as file:
            file.seek(member.offset_data)
            # np.load would read the whole array; only its header is needed.
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(file)
            start = file.tell()
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(
            f"{name} is not a .npy array",
            why=summarise_error(error),
            fix="write it again with numpy.save, or leave bad samples out: data.on_bad_file=skip",
        ) from error
    if dtype.hasobject or is_fortran:
        what = "Python objects, which only unpickling could read" if dtype.hasobject else "columns (Fortran order)"
        raise DataError(f"{name} contains {what}", fix="save a plain array: np.save(f, np.ascontiguousarray(a))")
    needed = start - member.offset_data + math.prod(shape) * dtype.itemsize
    if needed > member.size:
        raise DataError(
            f"{name} is truncated: {member.size:,} of {needed:,} bytes",
            fix="download the shard again, or leave bad samples out: data.on_bad_file=skip",
        )
    return StoredArray(path=path, offset=start, shape=tuple(shape), dtype=dtype)
