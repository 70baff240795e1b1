"""From a data folder to training and validation videos, whichever way they lie in it.

Patterns of shards are taken as given. Otherwise: tars whose names say `train` and `val`; folders `train/` and `val/`;
or one set of videos, of which the last ones in order are kept for validation, as STEVE splits. Videos of a set are
often cuts of one recording, so a random split would test on what was trained on.

A video may be one file: gif through Pillow; mp4, mov, avi, webm, mkv through PyAV or OpenCV where installed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from halfstep.data.files import UNREADABLE, VALIDATION_NAMES, BadFiles, natural_key, refuse_missing, some_of, unreadable
from halfstep.errors import DataError, format_count
from halfstep.workloads.slots.frame_folders import FrameFolders
from halfstep.workloads.slots.videos import Array, ShardVideos, Video, Videos, what_was_left_out

DECODED = (".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v")
VIDEO_ENDINGS = (".gif", *DECODED)
DECODERS = ("av", "cv2")
UNDECODABLE = (*UNREADABLE, IndexError)
"""IndexError: Pillow's for a gif that is cut short, PyAV's for a file without a video stream."""
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


class VideoFiles:
    """Files as videos; they bring no masks."""

    labels_background = True

    def __init__(self, paths: Sequence[Path], *, bad_files: BadFiles) -> None:
        self._paths: list[Path] = []
        self._videos: list[Video] = []
        for path in sorted(paths, key=lambda path: natural_key(path.name)):
            try:
                count, size = video_facts(path)
            except DataError as error:
                bad_files.report(error)
                continue
            self._paths.append(path)
            self._videos.append(Video(name=path.name, num_frames=count, size=size))

    @property
    def videos(self) -> Sequence[Video]:
        return self._videos

    def frames(self, index: int, first: int, count: int) -> Array:
        return read_frames(self._paths[index], first, count)

    def masks(self, index: int, first: int, count: int) -> Array:
        raise AssertionError("video files have no masks")

    def files(self) -> Sequence[Path]:
        return self._paths


def video_files(folder: Path) -> list[Path]:
    """The videos that lie in a folder as files."""
    return [path for path in folder.iterdir() if path.suffix.lower() in VIDEO_ENDINGS and not path.name.startswith(".")]


def video_facts(path: Path) -> tuple[int, tuple[int, int]]:
    """Frames, and height and width. A container's own count is often missing or wrong, so frames are counted."""
    if path.suffix.lower() == ".gif":
        try:
            with Image.open(path) as picture:
                return int(getattr(picture, "n_frames", 1)), (picture.height, picture.width)
        except UNDECODABLE as error:
            raise unreadable(path, error) from error
    count, size = 0, (0, 0)
    for frame in _frames_of(path):
        count, size = count + 1, (frame.shape[0], frame.shape[1])
    if count == 0:
        raise DataError(f"{path} holds no frame", fix="replace the file, or data.on_bad_file=skip")
    return count, size


def read_frames(path: Path, first: int, count: int) -> Array:
    """Frames from `first` on as (count, H, W, 3) uint8."""
    return np.stack(list(islice(_frames_of(path), first, first + count)))


def _frames_of(path: Path) -> Iterator[Array]:
    try:
        if path.suffix.lower() == ".gif":
            with Image.open(path) as picture:
                for frame in ImageSequence.Iterator(picture):
                    yield np.asarray(frame.convert("RGB"))
        else:
            yield from _decoded(path)
    except UNDECODABLE as error:
        raise unreadable(path, error) from error


def _decoded(path: Path) -> Iterator[Array]:
    found = next((name for name in DECODERS if importlib.util.find_spec(name)), None)
    if found is None:
        raise DataError(
            f"{path} needs PyAV (pip install av) or OpenCV to be decoded",
            why="neither av nor cv2 is installed",
            fix="pip install av, or save the frames as pictures: a folder for each video",
        )
    library = importlib.import_module(found)
    yield from _by_pyav(library, path) if found == "av" else _by_opencv(library, path)


def _by_pyav(av, path: Path) -> Iterator[Array]:  # type: ignore[no-untyped-def]
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24")


def _by_opencv(cv2, path: Path) -> Iterator[Array]:  # type: ignore[no-untyped-def]
    capture = cv2.VideoCapture(str(path))
    try:
        while True:
            is_there, frame = capture.read()
            if not is_there:
                return
            yield np.ascontiguousarray(frame[..., ::-1])
    finally:
        capture.release()


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoPart:
    """Some videos of a set."""

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
    """Both parts of a data folder, and how they were told apart."""

    train: VideoPart
    val: VideoPart | None
    layout: str


def find_videos(
    root: Path,
    *,
    train_shards: str | Sequence[str] = "",
    val_shards: str | Sequence[str] = "",
    val_videos: Sequence[str] = (),
    val_fraction: float = 0.1,
    bad_files: BadFiles,
) -> FoundVideos:
    """The videos of a folder."""
    if train_shards:
        train = ShardVideos(root, train_shards, bad_files=bad_files)
        val = ShardVideos(root, val_shards, bad_files=bad_files) if val_shards else None
        if val is None:
            return _split(train, val_videos, val_fraction, "shards", bad_files)
        return _two(train, val, "shards by pattern")
    refuse_missing(root)
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return _tars(root, tars, val_videos, val_fraction, bad_files)
    val_folder = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and val_folder is not None:
        train_set, val_set = (open_videos(path, bad_files=bad_files) for path in (root / "train", val_folder))
        return _two(train_set, val_set, f"train/ and {val_folder.name}/")
    return _split(open_videos(root, bad_files=bad_files), val_videos, val_fraction, "one set of videos", bad_files)


def open_videos(root: Path, *, bad_files: BadFiles) -> Videos:
    """Every video of one folder: tars, files, or folders of frames."""
    tars = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.tar"))]
    if tars:
        return ShardVideos(root, tars, bad_files=bad_files)
    if files := video_files(root):
        return VideoFiles(files, bad_files=bad_files)
    if packed := [path for path in sorted(root.rglob("*.t*")) if path.name.lower().endswith(PACKED)]:
        raise DataError(
            f"{packed[0]} is packed", why="samples are read by their offset in the tar", fix="unpack it to .tar"
        )
    return FrameFolders(root, bad_files=bad_files)


def _tars(
    root: Path, tars: list[str], val_videos: Sequence[str], val_fraction: float, bad_files: BadFiles
) -> FoundVideos:
    train = [name for name in tars if "train" in Path(name).name.lower()]
    rest = [name for name in tars if name not in train]
    val = [name for name in rest if any(word in Path(name).name.lower() for word in VALIDATION_NAMES)]
    if train and val:
        train_set, val_set = (ShardVideos(root, names, bad_files=bad_files) for names in (train, val))
        return _two(train_set, val_set, "shards by name")
    return _split(ShardVideos(root, tars, bad_files=bad_files), val_videos, val_fraction, "shards", bad_files)


def _two(train: Videos, val: Videos, layout: str) -> FoundVideos:
    return FoundVideos(train=_whole(train), val=_whole(val), layout=layout)


def _whole(videos: Videos) -> VideoPart:
    return VideoPart(videos=videos, members=tuple(range(len(videos.videos))))


def _split(
    videos: Videos, val_videos: Sequence[str], val_fraction: float, layout: str, bad_files: BadFiles
) -> FoundVideos:
    names = [video.name for video in videos.videos]
    if val_videos:
        held = [place for place, name in enumerate(names) if any(fnmatchcase(name, wish) for wish in val_videos)]
        if len(held) in (0, len(names)):
            raise DataError(
                f"data.val_videos {', '.join(val_videos)} fits {len(held)} of {format_count(len(names), 'video')}",
                why=what_was_left_out(bad_files),
                fix=f"the videos are {some_of(names)}",
            )
        how = "data.val_videos"
    else:
        count = min(len(names) - 1, max(1, round(val_fraction * len(names)))) if val_fraction else 0
        held, how = list(range(len(names) - count, len(names))), "the last videos in order"
    train = tuple(place for place in range(len(names)) if place not in set(held))
    val = VideoPart(videos=videos, members=tuple(held)) if held else None
    kept = f"; validation: {how}" if held else "; no validation"
    return FoundVideos(train=VideoPart(videos=videos, members=train), val=val, layout=layout + kept)
