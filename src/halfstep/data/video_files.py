"""Videos as single files: gif through Pillow; mp4, mov, avi, webm, mkv through PyAV or OpenCV where installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from halfstep.data.files import UNREADABLE, BadFiles, natural_key, unreadable
from halfstep.data.videos import Array, Video
from halfstep.errors import DataError

DECODED = (".mp4", ".mov", ".avi", ".webm", ".mkv", ".m4v")
VIDEO_ENDINGS = (".gif", *DECODED)
DECODERS = ("av", "cv2")


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
        except UNREADABLE as error:
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
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _decoded(path: Path) -> Iterator[Array]:
    found = next((name for name in DECODERS if importlib.util.find_spec(name)), None)
    if found is None:
        raise DataError(
            f"{path} needs a library that decodes video",
            why="neither PyAV (av) nor OpenCV (cv2) is installed",
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
