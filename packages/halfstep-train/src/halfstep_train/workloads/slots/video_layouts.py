"""Find the training and validation videos of a data folder, in every supported layout.

Shard patterns are used as given. Otherwise the folder holds tars with `train` and `val` in their names; folders
`train/` and `val/`; or one set of videos, of which the last ones in order are used for validation, as in STEVE. Videos
of a set are often cut from one recording, so a random split would validate on training data.

A video is a tar sample (videos.py), a file (gif is read by Pillow; mp4, mov, avi, webm, mkv by PyAV or OpenCV, if
installed), or a folder of frames:

    VIDEO/00000000_image.png   00000000_mask_00.png …   STEVE: one mask file per object and frame, 00 is the background
    VIDEO/frames/*.png         VIDEO/masks/*.png        one label image per frame (also images/, instances/, …)
    VIDEO/*.png                                         frames without masks
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageSequence

from halfstep.errors import DataError, format_count
from halfstep_train.data.files import (
    IMAGE_ENDINGS,
    UNREADABLE,
    VALIDATION_NAMES,
    Array,
    BadFiles,
    count_held_out,
    list_files,
    list_folders,
    list_some,
    make_unreadable_error,
    require_folder,
)
from halfstep_train.data.images import open_image, read_image, read_image_facts, to_bytes
from halfstep_train.workloads.slots.config import VideoDataConfig
from halfstep_train.workloads.slots.videos import Video, describe_left_out, open_each, open_shards, renumber_labels

DECODED = (".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v")
VIDEO_ENDINGS = (".gif", *DECODED)
DECODERS = ("av", "cv2")
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
        else:
            yield from _decode(path)
    except UNDECODABLE as error:
        raise make_unreadable_error(path, error) from error


def _decode(path: Path) -> Iterator[Array]:
    """Decode with PyAV or OpenCV, whichever is installed."""
    found = next((name for name in DECODERS if importlib.util.find_spec(name)), None)
    if found is None:
        raise DataError(
            f"{path} needs PyAV (pip install av) or OpenCV to be decoded",
            why="neither av nor cv2 is installed",
            fix="pip install av, or save the frames as images: one folder per video",
        )
    library = importlib.import_module(found)
    yield from _decode_by_pyav(library, path) if found == "av" else _decode_by_opencv(library, path)


def _decode_by_pyav(av, path: Path) -> Iterator[Array]:  # type: ignore[no-untyped-def]
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def _decode_by_opencv(cv2, path: Path) -> Iterator[Array]:  # type: ignore[no-untyped-def]
    capture = cv2.VideoCapture(str(path))
    try:
        while True:
            is_there, frame = capture.read()
            if not is_there:
                return
            yield np.ascontiguousarray(frame[..., ::-1])  # BGR to RGB
    finally:
        capture.release()


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
