"""Videos as folders of frames.

VIDEO/00000000_image.png   00000000_mask_00.png …   STEVE's: a file for each object and frame, 00 the background
VIDEO/frames/*.png         VIDEO/masks/*.png        labels in a picture of their own (also images, instances, …)
VIDEO/*.png                                          frames alone
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep.data.files import PICTURES, UNREADABLE, BadFiles, natural_key, refuse_missing, some_of, unreadable
from halfstep.data.images import image_facts, read_image
from halfstep.errors import DataError, format_count
from halfstep.workloads.slots.videos import Array, Video, small_labels

FRAME_FOLDERS = ("frames", "images", "imgs", "rgb", "JPEGImages")
MASK_FOLDERS = ("masks", "instances", "segmentations", "labels", "annotations", "Annotations")
STEVE_FRAME = re.compile(r"(\d+)_image$")
STEVE_MASK = re.compile(r"(\d+)_mask_(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameFolder:
    """The files of one video; each frame has one mask picture, or one for each object by its label, or none."""

    path: Path
    frames: tuple[Path, ...]
    masks: tuple[dict[int, Path] | Path, ...] = ()


class FrameFolders:
    """Every folder below `root` that holds frames, as a video."""

    labels_background = True

    def __init__(self, root: Path, *, bad_files: BadFiles) -> None:
        self._folders: list[FrameFolder] = []
        self._videos: list[Video] = []
        for path in sorted(_subfolders(root), key=lambda path: natural_key(path.name)):
            try:
                self._take(path, all_frames=bad_files.mode == "skip")
            except DataError as error:
                bad_files.report(error)
        if not self._folders:
            left_out = f"; {len(bad_files.skipped)} were left out" if bad_files.skipped else ""
            raise DataError(
                f"no video is in {root}",
                why=f"no folder in it holds frames{left_out}",
                fix="a folder of pictures for each video, tar shards, or .gif and .mp4 files",
            )

    def _take(self, path: Path, *, all_frames: bool) -> None:
        folder = frames_in(path)
        if folder is None:
            return
        sizes = {image_facts(frame).size: frame for frame in (folder.frames if all_frames else folder.frames[:1])}
        if len(sizes) > 1:
            raise _other_size(path, *list(sizes.items())[:2])
        self._folders.append(folder)
        size = next(iter(sizes))
        self._videos.append(
            Video(name=path.name, num_frames=len(folder.frames), size=size, has_masks=bool(folder.masks))
        )

    @property
    def videos(self) -> Sequence[Video]:
        return self._videos

    def frames(self, index: int, first: int, count: int) -> Array:
        folder, size = self._folders[index], self._videos[index].size
        read = []
        for path in folder.frames[first : first + count]:
            frame = read_image(path, channels=3)
            if frame.shape[:2] != size:
                raise _other_size(folder.path, (size, folder.frames[0]), (frame.shape[:2], path))
            read.append(frame if frame.dtype == np.uint8 else (frame * 255).round().clip(0, 255).astype(np.uint8))
        return np.stack(read)

    def masks(self, index: int, first: int, count: int) -> Array:
        folder, size = self._folders[index], self._videos[index].size
        wanted = folder.masks[first : first + count]
        labels = [_from_objects(mask, size) if isinstance(mask, dict) else _labels(mask, size) for mask in wanted]
        return small_labels(np.stack(labels), folder.path.name)

    def files(self) -> Sequence[Path]:
        return [path for folder in self._folders for path in folder.frames]


def is_mask(path: Path) -> bool:
    """Whether a picture is a mask of frames beside it, and no frame."""
    folder = path.parent
    has_frames = folder.name in MASK_FOLDERS and any((folder.parent / name).is_dir() for name in FRAME_FOLDERS)
    return has_frames or STEVE_MASK.match(path.stem) is not None


def _subfolders(root: Path) -> list[Path]:
    refuse_missing(root)
    return [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]


def frames_in(path: Path) -> FrameFolder | None:
    """What a folder holds as a video; None where there are no frames."""
    inner = next((path / name for name in FRAME_FOLDERS if (path / name).is_dir()), None)
    pictures = _pictures(inner or path)
    steve = {found[1]: file for file in pictures if (found := STEVE_FRAME.search(file.stem))}
    if steve and inner is None:
        return _steve_folder(path, steve, pictures)
    frames = tuple(pictures)
    masks = next((_pictures(path / name) for name in MASK_FOLDERS if inner and (path / name).is_dir()), [])
    if not frames:
        if inner or any((path / name).is_dir() for name in MASK_FOLDERS):
            raise DataError(f"{path} holds no frames", why="its pictures are masks alone" if masks else "")
        return None
    if masks and len(masks) != len(frames):
        raise DataError(
            f"{path} holds {format_count(len(frames), 'frame')} and {format_count(len(masks), 'mask')}",
            fix="one mask for each frame, or none at all",
        )
    return FrameFolder(path=path, frames=frames, masks=tuple(masks))


def _steve_folder(path: Path, frames: dict[str, Path], pictures: list[Path]) -> FrameFolder:
    objects: dict[str, dict[int, Path]] = {}
    for file in pictures:
        if found := STEVE_MASK.search(file.stem):
            objects.setdefault(found[1], {})[int(found[2])] = file
    without = [frames[number].name for number in frames if number not in objects]
    if objects and without:
        raise DataError(f"{path}: frames without a mask: {some_of(without)}", fix="masks for all frames, or for none")
    if alone := sorted(set(objects) - set(frames)):
        raise DataError(f"{path}: masks without a frame: {some_of(alone)}", fix="add NUMBER_image.png")
    return FrameFolder(
        path=path, frames=tuple(frames.values()), masks=tuple(objects[number] for number in frames) if objects else ()
    )


def _pictures(path: Path) -> list[Path]:
    found = [file for file in path.iterdir() if file.suffix.lower() in PICTURES and not file.name.startswith(".")]
    return sorted((file for file in found if file.suffix.lower() != ".gif"), key=lambda file: natural_key(file.name))


def _from_objects(objects: dict[int, Path], size: tuple[int, int]) -> Array:
    labels = np.zeros(size, dtype=np.int64)
    for number, path in objects.items():
        labels[_labels(path, size) > 0] = number
    return labels


def _labels(path: Path, size: tuple[int, int]) -> Array:
    try:
        with Image.open(path) as picture:
            values = np.asarray(picture)
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    if values.ndim == 3:  # colours: one number each, black stays 0
        values = values[..., :3].astype(np.int64) @ np.array([1, 256, 65536])
    if values.shape != size:
        found = f"{values.shape[1]}×{values.shape[0]}"
        raise DataError(f"{path} is {found}, its frame {size[1]}×{size[0]}", fix="masks as large as their frames")
    return values.astype(np.int64)


def _other_size(folder: Path, one: tuple[tuple[int, ...], Path], other: tuple[tuple[int, ...], Path]) -> DataError:
    (size, file), (other_size, other_file) = one, other
    return DataError(
        f"frames of {folder} differ in size: {file.name} is {size[1]}×{size[0]}, "
        f"{other_file.name} {other_size[1]}×{other_size[0]}",
        fix="frames of one size in a video, or leave bad videos out: data.on_bad_file=skip",
    )
