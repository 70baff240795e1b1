"""Find the training and validation videos of a data folder, in every supported layout, and read their frames by index.

Shard patterns are used as given. Otherwise the folder holds tars with `train` and `val` in their names; folders
`train/` and `val/`; or one set of videos, of which the last ones in order are used for validation, as in STEVE. Videos
of a set are often cut from one recording, so a random split would validate on training data.

A video is a tar sample, a file (gif is read by Pillow; mp4, mov, avi, webm, mkv by PyAV, if installed), or a folder
of frames:

    VIDEO/00000000_image.png   00000000_mask_00.png …   STEVE: one mask file per object and frame, 00 is the background
    VIDEO/frames/*.png         VIDEO/masks/*.png        one label image per frame (also images/, instances/, …)
    VIDEO/*.png                                         frames without masks

Clips are cut from videos in data.py. Opening a video reads its headers, so that a problem is reported by name before
training; with `data.on_bad_file: skip` such videos are left out and counted.

The headers of a webdataset shard are read once. After that, each file of a sample is an offset and a size, so any
sample can be read by its index, in any order and by any process. Reading tars as a stream, as webdataset does, cannot
do that: a sample then depends on the worker that happens to read its shard, and a resumed run sees other samples.
"""

from __future__ import annotations

import math
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image, ImageSequence

from halfstep.errors import DataError, format_count, summarise_error
from halfstep_train.data.files import (
    IMAGE_ENDINGS,
    UNREADABLE,
    VALIDATION_NAMES,
    Array,
    BadFiles,
    count_held_out,
    import_optional,
    list_files,
    list_folders,
    list_some,
    make_unreadable_error,
    require_folder,
)
from halfstep_train.data.images import open_image, read_image, read_image_facts, to_bytes
from halfstep_train.workloads.slots.config import VideoDataConfig

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
    found = [video for _, video in bad_files.try_each(open_one, list(sources)) if video is not None]
    if not found:
        raise DataError(
            f"no video in {where}",
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
            f"{where}: masks are {masks.dtype} {masks.shape}, but its frames are {frames.shape}",
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
            f"no shard in {root} matches {patterns}",
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
        if dtype.hasobject or is_fortran:
            raise ValueError(f"it contains {'Python objects' if dtype.hasobject else 'columns (Fortran order)'}")
        needed = start - member.offset_data + math.prod(shape) * dtype.itemsize
        if needed > member.size:
            raise ValueError(f"it is truncated: {member.size:,} of {needed:,} bytes")
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise DataError(
            f"{name} is not a plain .npy array",
            why=summarise_error(error),
            fix="write it again: np.save(f, np.ascontiguousarray(a)), or leave it out: data.on_bad_file=skip",
        ) from error
    return StoredArray(path=path, offset=start, shape=tuple(shape), dtype=dtype)


# --- the layouts of a data folder ---


DECODED = (".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v")
VIDEO_ENDINGS = (".gif", *DECODED)
UNDECODABLE = (*UNREADABLE, IndexError)
"""Pillow raises IndexError for a truncated gif, PyAV for a file without a video stream."""


@dataclass(frozen=True, kw_only=True)
class VideoFile(Video):
    """A video file, which has no masks."""

    def read_frames(self, first: int, count: int) -> Array:
        return np.stack(list(islice(_iterate_frames(self.paths[0]), first, first + count)))


def open_video_file(path: Path) -> VideoFile:
    """Open a video file. Frames are counted: a container's metadata is often wrong."""
    count, size = 0, (0, 0)
    for frame in _iterate_frames(path):
        count, size = count + 1, (frame.shape[0], frame.shape[1])
    if count == 0:
        raise DataError(f"{path} contains no frame", fix="replace the file, or data.on_bad_file=skip")
    return VideoFile(name=path.name, paths=(path,), num_frames=count, size=size)


def _iterate_frames(path: Path) -> Iterator[Array]:
    """Yield all frames (H, W, 3) uint8; raise DataError if the file cannot be decoded."""
    try:
        if path.suffix.lower() == ".gif":
            with Image.open(path) as picture:
                for frame in ImageSequence.Iterator(picture):
                    yield np.asarray(frame.convert("RGB"))
        elif path.suffix.lower() not in DECODED:
            raise DataError(f"{path} is not a video", fix="give a video, a shard (.tar) or a folder of frames")
        else:
            av = import_optional("av", str(path), "pip install av, or save the frames as images: one folder per video")
            with av.open(str(path)) as container:
                for frame in container.decode(video=0):
                    yield frame.to_ndarray(format="rgb24")
    except UNDECODABLE as error:
        raise make_unreadable_error(path, error) from error


class FoundVideos(NamedTuple):
    """Both splits of a data folder, and how they were found."""

    train: list[Video]
    val: list[Video]
    layout: str


def find_videos(config: VideoDataConfig, bad_files: BadFiles) -> FoundVideos:
    """Find the videos of `config.dir` and split them into training and validation."""
    root = require_folder(config.dir)
    # Explicit patterns come first, then tars, split folders, and one set of videos.
    if config.train_shards:
        train = open_shards(root, config.train_shards, bad_files)
        if config.val_shards:
            return FoundVideos(train, open_shards(root, config.val_shards, bad_files), "shards by pattern")
        return _split_videos(train, config, "shards", bad_files)
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    train_tars = [name for name in tars if "train" in Path(name).name.lower()]
    val_tars = [
        name
        for name in tars
        if name not in train_tars and any(word in Path(name).name.lower() for word in VALIDATION_NAMES)
    ]
    if train_tars and val_tars:
        train, val = (open_shards(root, names, bad_files) for names in (train_tars, val_tars))
        return FoundVideos(train, val, "shards by name")
    if tars:
        return _split_videos(open_shards(root, tars, bad_files), config, "shards", bad_files)
    val_folder = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and val_folder is not None:
        train, val = (_open_folder(path, bad_files) for path in (root / "train", val_folder))
        return FoundVideos(train, val, f"train/ and {val_folder.name}/")
    return _split_videos(_open_folder(root, bad_files), config, "one set of videos", bad_files)


def _open_folder(root: Path, bad_files: BadFiles) -> list[Video]:
    """Open the video files of a folder or, if there are none, its folders of frames."""
    if files := list_files(root, VIDEO_ENDINGS):
        return open_each(open_video_file, files, str(root), bad_files)
    is_thorough = bad_files.mode == "skip"
    return open_each(lambda path: open_frames(path, every_size=is_thorough), list_folders(root), str(root), bad_files)


def _split_videos(videos: list[Video], config: VideoDataConfig, layout: str, bad_files: BadFiles) -> FoundVideos:
    """Split a set by name patterns, or use its last videos for validation."""
    names = [video.name for video in videos]
    how = "validation: data.val_videos"
    is_held = [any(fnmatchcase(name, pattern) for pattern in config.val_videos) for name in names]
    if not config.val_videos:
        count = count_held_out(len(names), config.val_fraction)
        how = "validation: the last videos in order" if count else "no validation"
        is_held = [index >= len(names) - count for index in range(len(names))]
    elif sum(is_held) in (0, len(names)):
        raise DataError(
            f"data.val_videos {', '.join(config.val_videos)} matches {sum(is_held)} of "
            f"{format_count(len(names), 'video')}",
            why=describe_left_out(bad_files),
            fix=f"choose among the videos: {list_some(names)}",
        )
    train = [video for video, held in zip(videos, is_held, strict=True) if not held]
    val = [video for video, held in zip(videos, is_held, strict=True) if held]
    return FoundVideos(train, val, f"{layout}; {how}")


FRAME_ENDINGS = tuple(ending for ending in IMAGE_ENDINGS if ending != ".gif")  # a gif is a video
FRAME_FOLDERS = ("frames", "images", "imgs", "rgb", "JPEGImages")
MASK_FOLDERS = ("masks", "instances", "segmentations", "labels", "annotations", "Annotations")
STEVE_FRAME = re.compile(r"(\d+)_image$")
STEVE_MASK = re.compile(r"(\d+)_mask_(\d+)$")


@dataclass(frozen=True, kw_only=True)
class FrameFolder(Video):
    """A folder of frames. Each has one mask image, one mask image per object (by label), or none."""

    masks: tuple[dict[int, Path] | Path, ...] = ()

    def read_frames(self, first: int, count: int) -> Array:
        return read_frame_files(self.paths[first : first + count], self.size)

    def read_masks(self, first: int, count: int) -> Array:
        labels = [self._read_mask(mask) for mask in self.masks[first : first + count]]
        return renumber_labels(np.stack(labels), self.name)

    def _read_mask(self, mask: dict[int, Path] | Path) -> Array:
        if isinstance(mask, Path):
            return _read_labels(mask, self.size)
        labels = np.zeros(self.size, dtype=np.int64)
        for number, path in mask.items():
            labels[_read_labels(path, self.size) > 0] = number
        return labels


def read_frame_files(paths: Sequence[Path], size: tuple[int, int] | None = None) -> Array:
    """Read the frames (T, H, W, 3) uint8 of one video, which all have the given size or that of the first one."""
    frames = [to_bytes(read_image(path, channels=3)) for path in paths]
    for path, frame in zip(paths, frames, strict=True):
        _check_size(path, frame.shape[:2], size or frames[0].shape[:2])
    return np.stack(frames)


def _read_labels(path: Path, size: tuple[int, int]) -> Array:
    """Read a label image (H, W) as int64; colours become numbers."""
    with open_image(path) as image:
        values = np.asarray(image)
    if values.ndim == 3:  # one label per colour; black is 0
        values = values[..., :3].astype(np.int64) @ np.array([1, 256, 65536])
    _check_size(path, values.shape, size)
    return values.astype(np.int64)


def _check_size(path: Path, found: tuple[int, ...], size: tuple[int, ...]) -> None:
    if found != size:
        raise DataError(
            f"{path} is {found[1]}×{found[0]}, but the first frame of its video is {size[1]}×{size[0]}",
            fix="resize all frames and masks of a video to one size, or leave bad videos out: data.on_bad_file=skip",
        )


def is_mask(path: Path) -> bool:
    """True if an image is a mask that belongs to frames, by the names of file and folder."""
    folder = path.parent
    has_frames = folder.name in MASK_FOLDERS and any((folder.parent / name).is_dir() for name in FRAME_FOLDERS)
    return has_frames or STEVE_MASK.match(path.stem) is not None


def open_frames(path: Path, *, every_size: bool) -> FrameFolder | None:
    """Open a folder of frames and masks, and check the size of every frame or only of those that are read later;
    return None if it is no video."""
    inner = next((path / name for name in FRAME_FOLDERS if (path / name).is_dir()), None)
    frames = list_files(inner or path, FRAME_ENDINGS)
    mask_folder = next((path / name for name in MASK_FOLDERS if (path / name).is_dir()), None)
    masks: Sequence[dict[int, Path] | Path] = list_files(mask_folder, FRAME_ENDINGS) if inner and mask_folder else []
    if inner is None and any(STEVE_FRAME.search(file.stem) for file in frames):
        frames, masks = _match_steve_frames(path, frames)
    if not frames and not inner and not mask_folder:
        return None
    if not frames or len(masks) not in (0, len(frames)):
        raise DataError(
            f"{path} contains {format_count(len(frames), 'frame')} and {format_count(len(masks), 'mask')}",
            fix="add one mask per frame, or none at all",
        )
    size = read_image_facts(frames[0]).size
    for frame in frames if every_size else ():
        _check_size(frame, read_image_facts(frame).size, size)
    return FrameFolder(
        name=path.name,
        paths=tuple(frames),
        num_frames=len(frames),
        size=size,
        has_masks=bool(masks),
        masks=tuple(masks),
    )


def _match_steve_frames(path: Path, files: list[Path]) -> tuple[list[Path], list[dict[int, Path]]]:
    """Match frames and masks of one video by their numbers."""
    frames = {found[1]: file for file in files if (found := STEVE_FRAME.search(file.stem))}
    masks: dict[str, dict[int, Path]] = {}
    for file in files:
        if found := STEVE_MASK.search(file.stem):
            masks.setdefault(found[1], {})[int(found[2])] = file
    if masks and (alone := sorted(masks.keys() ^ frames.keys())):
        raise DataError(
            f"{path}: frames without masks, or masks without a frame: {list_some(alone)}",
            fix="add NUMBER_image.png and masks for all frames, or leave out all masks",
        )
    return list(frames.values()), [masks[number] for number in frames] if masks else []
