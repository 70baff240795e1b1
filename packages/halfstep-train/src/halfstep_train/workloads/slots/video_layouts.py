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
from halfstep_train.workloads.slots.videos import ShardVideos, Video, Videos, describe_left_out, renumber_labels

DECODED = (".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v")
VIDEO_ENDINGS = (".gif", *DECODED)
DECODERS = ("av", "cv2")
UNDECODABLE = (*UNREADABLE, IndexError)
"""Pillow raises IndexError for a truncated gif, PyAV for a file without a video stream."""
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class VideoFiles:
    """A set of video files, which have no masks."""

    labels_background = True

    def __init__(self, paths: Sequence[Path], *, bad_files: BadFiles) -> None:
        self._paths: list[Path] = []
        self._videos: list[Video] = []
        for path in paths:
            try:
                count, size = read_video_facts(path)
            except DataError as error:
                bad_files.report(error)
                continue
            self._paths.append(path)
            self._videos.append(Video(name=path.name, num_frames=count, size=size))

    @property
    def videos(self) -> Sequence[Video]:
        return self._videos

    def read_frames(self, index: int, first: int, count: int) -> Array:
        return read_frames(self._paths[index], first, count)

    def read_masks(self, index: int, first: int, count: int) -> Array:
        raise AssertionError("video files have no masks")

    def files(self) -> Sequence[Path]:
        return self._paths


def read_video_facts(path: Path) -> tuple[int, tuple[int, int]]:
    """Return the number of frames and their (height, width). Frames are counted: a container's metadata is often
    wrong."""
    if path.suffix.lower() == ".gif":
        try:
            with Image.open(path) as picture:
                return int(getattr(picture, "n_frames", 1)), (picture.height, picture.width)
        except UNDECODABLE as error:
            raise make_unreadable_error(path, error) from error
    count, size = 0, (0, 0)
    for frame in _iterate_frames(path):
        count, size = count + 1, (frame.shape[0], frame.shape[1])
    if count == 0:
        raise DataError(f"{path} holds no frame", fix="replace the file, or data.on_bad_file=skip")
    return count, size


def read_frames(path: Path, first: int, count: int) -> Array:
    """Return frames from `first` on as (count, H, W, 3) uint8."""
    return np.stack(list(islice(_iterate_frames(path), first, first + count)))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSplit:
    """Videos of one split, as indices into a set."""

    videos: Videos
    members: tuple[int, ...]

    @property
    def have_masks(self) -> bool:
        return bool(self.members) and all(self.videos.videos[index].has_masks for index in self.members)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.videos.videos[index].name for index in self.members)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundVideos:
    """Both splits of a data folder, and how they were found."""

    train: VideoSplit
    val: VideoSplit | None
    layout: str


def find_videos(
    root: str | Path | None,
    *,
    train_shards: str | Sequence[str] = "",
    val_shards: str | Sequence[str] = "",
    val_videos: Sequence[str] = (),
    val_fraction: float = 0.1,
    bad_files: BadFiles,
) -> FoundVideos:
    """Find the videos of a folder and split them into training and validation."""
    root = require_folder(root)
    # Explicit patterns come first, then tars, split folders, and one set of videos.
    if train_shards:
        train = ShardVideos(root, train_shards, bad_files=bad_files)
        val = ShardVideos(root, val_shards, bad_files=bad_files) if val_shards else None
        if val is None:
            return _split_videos(train, val_videos, val_fraction, "shards", bad_files)
        return _use_both(train, val, "shards by pattern")
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return _find_in_tars(root, tars, val_videos, val_fraction, bad_files)
    val_folder = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and val_folder is not None:
        train_set, val_set = (open_videos(path, bad_files=bad_files) for path in (root / "train", val_folder))
        return _use_both(train_set, val_set, f"train/ and {val_folder.name}/")
    return _split_videos(
        open_videos(root, bad_files=bad_files), val_videos, val_fraction, "one set of videos", bad_files
    )


def open_videos(root: Path, *, bad_files: BadFiles) -> Videos:
    """Open every video of one folder: tars, files, or folders of frames."""
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return ShardVideos(root, tars, bad_files=bad_files)
    if files := list_files(root, VIDEO_ENDINGS):
        return VideoFiles(files, bad_files=bad_files)
    if packed := [path for path in sorted(root.rglob("*.t*")) if path.name.lower().endswith(PACKED)]:
        raise DataError(
            f"{packed[0]} is compressed", why="samples are read by their offset in the tar", fix="decompress it to .tar"
        )
    return FrameFolders(root, bad_files=bad_files)


def _find_in_tars(
    root: Path, tars: list[str], val_videos: Sequence[str], val_fraction: float, bad_files: BadFiles
) -> FoundVideos:
    """Split tars by `train` and `val` in their names, or split their videos."""
    train = [name for name in tars if "train" in Path(name).name.lower()]
    rest = [name for name in tars if name not in train]
    val = [name for name in rest if any(word in Path(name).name.lower() for word in VALIDATION_NAMES)]
    if train and val:
        train_set, val_set = (ShardVideos(root, names, bad_files=bad_files) for names in (train, val))
        return _use_both(train_set, val_set, "shards by name")
    return _split_videos(ShardVideos(root, tars, bad_files=bad_files), val_videos, val_fraction, "shards", bad_files)


def _use_both(train: Videos, val: Videos, layout: str) -> FoundVideos:
    return FoundVideos(train=_use_all(train), val=_use_all(val), layout=layout)


def _use_all(videos: Videos) -> VideoSplit:
    return VideoSplit(videos=videos, members=tuple(range(len(videos.videos))))


def _split_videos(
    videos: Videos, val_videos: Sequence[str], val_fraction: float, layout: str, bad_files: BadFiles
) -> FoundVideos:
    """Split a set by name patterns, or use its last videos for validation."""
    names = [video.name for video in videos.videos]
    if val_videos:
        held = [index for index, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in val_videos)]
        if len(held) in (0, len(names)):
            raise DataError(
                f"data.val_videos {', '.join(val_videos)} matches {len(held)} of {format_count(len(names), 'video')}",
                why=describe_left_out(bad_files),
                fix=f"choose among the videos: {list_some(names)}",
            )
        how = "data.val_videos"
    else:
        count = count_held_out(len(names), val_fraction)
        held, how = list(range(len(names) - count, len(names))), "the last videos in order"
    train = tuple(index for index in range(len(names)) if index not in set(held))
    val = VideoSplit(videos=videos, members=tuple(held)) if held else None
    kept = f"; validation: {how}" if held else "; no validation"
    return FoundVideos(train=VideoSplit(videos=videos, members=train), val=val, layout=layout + kept)


FRAME_ENDINGS = tuple(ending for ending in IMAGE_ENDINGS if ending != ".gif")  # a gif is a video
FRAME_FOLDERS = ("frames", "images", "imgs", "rgb", "JPEGImages")
MASK_FOLDERS = ("masks", "instances", "segmentations", "labels", "annotations", "Annotations")
STEVE_FRAME = re.compile(r"(\d+)_image$")
STEVE_MASK = re.compile(r"(\d+)_mask_(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameFolder:
    """The files of one video. Each frame has one mask image, one mask image per object (by label), or none."""

    path: Path
    frames: tuple[Path, ...]
    masks: tuple[dict[int, Path] | Path, ...] = ()


class FrameFolders:
    """A set of videos: every folder below `root` that holds frames."""

    labels_background = True

    def __init__(self, root: Path, *, bad_files: BadFiles) -> None:
        self._folders: list[FrameFolder] = []
        self._videos: list[Video] = []
        for path in list_folders(root):
            try:
                self._add(path, all_frames=bad_files.mode == "skip")
            except DataError as error:
                bad_files.report(error)
        if not self._folders:
            left_out = f"; {len(bad_files.skipped)} were left out" if bad_files.skipped else ""
            raise DataError(
                f"no video is in {root}",
                why=f"no folder in it holds frames{left_out}",
                fix="use one folder of images per video, tar shards, or .gif and .mp4 files",
            )

    def _add(self, path: Path, *, all_frames: bool) -> None:
        """Add the folder if it holds frames; with `all_frames`, check the size of every frame first."""
        folder = find_frames(path)
        if folder is None:
            return
        sizes = {read_image_facts(frame).size: frame for frame in (folder.frames if all_frames else folder.frames[:1])}
        if len(sizes) > 1:
            raise _make_size_error(path, *list(sizes.items())[:2])
        self._folders.append(folder)
        size = next(iter(sizes))
        self._videos.append(
            Video(name=path.name, num_frames=len(folder.frames), size=size, has_masks=bool(folder.masks))
        )

    @property
    def videos(self) -> Sequence[Video]:
        return self._videos

    def read_frames(self, index: int, first: int, count: int) -> Array:
        folder, size = self._folders[index], self._videos[index].size
        return read_frame_files(folder.frames[first : first + count], (size, folder.frames[0]))

    def read_masks(self, index: int, first: int, count: int) -> Array:
        folder, size = self._folders[index], self._videos[index].size
        wanted = folder.masks[first : first + count]
        labels = [_merge_objects(mask, size) if isinstance(mask, dict) else _read_labels(mask, size) for mask in wanted]
        return renumber_labels(np.stack(labels), folder.path.name)

    def files(self) -> Sequence[Path]:
        return [path for folder in self._folders for path in folder.frames]


def read_frame_files(paths: Sequence[Path], first: tuple[tuple[int, ...], Path] | None = None) -> Array:
    """Read the frames (T, H, W, 3) uint8 of one video. All must have the same size as `first`: (size, file), by default
    the first of `paths`."""
    frames = []
    for path in paths:
        frame = to_bytes(read_image(path, channels=3))
        size = (frame.shape[0], frame.shape[1])
        first = first or (size, path)
        if size != first[0]:
            raise _make_size_error(path.parent, first, (size, path))
        frames.append(frame)
    return np.stack(frames)


def is_mask(path: Path) -> bool:
    """True if an image is a mask that belongs to frames, by the names of file and folder."""
    folder = path.parent
    has_frames = folder.name in MASK_FOLDERS and any((folder.parent / name).is_dir() for name in FRAME_FOLDERS)
    return has_frames or STEVE_MASK.match(path.stem) is not None


def find_frames(path: Path) -> FrameFolder | None:
    """Return the frames and masks of a folder; None if it has no frames."""
    inner = next((path / name for name in FRAME_FOLDERS if (path / name).is_dir()), None)
    pictures = list_files(inner or path, FRAME_ENDINGS)
    steve = {found[1]: file for file in pictures if (found := STEVE_FRAME.search(file.stem))}
    if steve and inner is None:
        return _find_steve_frames(path, steve, pictures)
    frames = tuple(pictures)
    mask_folders = [path / name for name in MASK_FOLDERS if (path / name).is_dir()]
    masks = list_files(mask_folders[0], FRAME_ENDINGS) if inner and mask_folders else []
    if not frames:
        if inner or mask_folders:
            raise DataError(f"{path} holds no frames", why="its images are all masks" if masks else "")
        return None
    if masks and len(masks) != len(frames):
        raise DataError(
            f"{path} holds {format_count(len(frames), 'frame')} and {format_count(len(masks), 'mask')}",
            fix="add one mask per frame, or none at all",
        )
    return FrameFolder(path=path, frames=frames, masks=tuple(masks))


def _find_steve_frames(path: Path, frames: dict[str, Path], pictures: list[Path]) -> FrameFolder:
    """Match frames and masks of one video by their numbers."""
    objects: dict[str, dict[int, Path]] = {}
    for file in pictures:
        if found := STEVE_MASK.search(file.stem):
            objects.setdefault(found[1], {})[int(found[2])] = file
    without = [frames[number].name for number in frames if number not in objects]
    if objects and without:
        raise DataError(
            f"{path}: frames without a mask: {list_some(without)}", fix="add masks for all frames, or for none"
        )
    if alone := sorted(set(objects) - set(frames)):
        raise DataError(f"{path}: masks without a frame: {list_some(alone)}", fix="add NUMBER_image.png")
    return FrameFolder(
        path=path, frames=tuple(frames.values()), masks=tuple(objects[number] for number in frames) if objects else ()
    )


def _merge_objects(objects: dict[int, Path], size: tuple[int, int]) -> Array:
    """Merge one mask image per object into one label image."""
    labels = np.zeros(size, dtype=np.int64)
    for number, path in objects.items():
        labels[_read_labels(path, size) > 0] = number
    return labels


def _read_labels(path: Path, size: tuple[int, int]) -> Array:
    """Read a label image (H, W) as int64; colours become numbers."""
    with open_image(path) as image:
        values = np.asarray(image)
    if values.ndim == 3:  # one label per colour; black is 0
        values = values[..., :3].astype(np.int64) @ np.array([1, 256, 65536])
    if values.shape != size:
        found = f"{values.shape[1]}×{values.shape[0]}"
        raise DataError(
            f"{path} is {found}, but its frame is {size[1]}×{size[0]}", fix="make masks as large as their frames"
        )
    return values.astype(np.int64)


def _make_size_error(folder: Path, one: tuple[tuple[int, ...], Path], other: tuple[tuple[int, ...], Path]) -> DataError:
    (size, file), (other_size, other_file) = one, other
    return DataError(
        f"frames of {folder} differ in size: {file.name} is {size[1]}×{size[0]}, "
        f"{other_file.name} {other_size[1]}×{other_size[0]}",
        fix="resize all frames of a video to one size, or leave bad videos out: data.on_bad_file=skip",
    )
