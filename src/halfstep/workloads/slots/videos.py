"""Sets of videos: frames and masks by number, wherever they lie.

`Videos` is what samples of clips are cut from (clips.py). Shards of arrays are here; folders of frames and single files
(gif, mp4) have files of their own. Opening a set looks at every header, so that what is wrong with one video is said
before training, with its name; with `data.on_bad_file: skip` such videos are left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from halfstep.data.files import BadFiles, some_of
from halfstep.errors import DataError
from halfstep.workloads.slots.shards import ShardSample, StoredArray, find_shards, index_shard, stored_array

Array = np.ndarray[Any, Any]

VIDEO_PART, MASK_PARTS = "video.npy", ("segmentations.npy", "segmentation.npy", "masks.npy")
WRITE_VIDEO = "write NAME.video.npy with uint8 frames (T, H, W, 3)"
NO_OBJECT = 0
"""The label of background, or of pixels that nobody labelled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """What is known of one video without reading a frame."""

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
        """Whether label 0 is a background that somebody labelled, not merely pixels without a label."""
        ...

    def frames(self, index: int, first: int, count: int) -> Array:
        """(count, H, W, 3) uint8."""
        ...

    def masks(self, index: int, first: int, count: int) -> Array:
        """(count, H, W) uint8: 0 is background, every other number an object, the same in all frames."""
        ...

    def files(self) -> Sequence[Path]: ...


class ShardVideos:
    """`.video.npy` (T, H, W, 3) and, where there are masks, `.segmentations.npy` (T, H, W[, 1]) in tar shards."""

    def __init__(self, root: Path, patterns: str | Sequence[str], *, bad_files: BadFiles) -> None:
        self._paths = find_shards(root, patterns, bad_files=bad_files)
        self._videos: list[Video] = []
        self._arrays: list[tuple[StoredArray, StoredArray | None]] = []
        for path in self._paths:
            for sample in index_shard(path, bad_files=bad_files):
                try:
                    self._take(path, sample)
                except DataError as error:
                    bad_files.report(error)
        if not self._videos:
            named = some_of([patterns] if isinstance(patterns, str) else patterns)
            raise DataError(f"no video is in {named} below {root}", why=what_was_left_out(bad_files), fix=WRITE_VIDEO)

    def _take(self, path: Path, sample: ShardSample) -> None:
        where = f"sample {sample.name} of {path}"
        if VIDEO_PART not in sample.parts:
            has_masks = any(part in sample.parts for part in MASK_PARTS)
            raise DataError(
                f"{where} has {'masks but no' if has_masks else 'no'} {VIDEO_PART}",
                why=f"its parts are {', '.join(sample.parts)}",
                fix=f"{WRITE_VIDEO}, or data.on_bad_file=skip",
            )
        frames = stored_array(sample.parts[VIDEO_PART], f"{sample.name}.{VIDEO_PART}")
        if len(frames.shape) != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8:
            raise DataError(
                f"{where}: frames are {frames.dtype} {frames.shape}", fix="uint8 (T, H, W, 3), or data.on_bad_file=skip"
            )
        part = next((sample.parts[name] for name in MASK_PARTS if name in sample.parts), None)
        masks = None if part is None else stored_array(part, f"{sample.name}'s masks")
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
        """Masks with a plane for each object (YTVIS) leave pixels without a label."""
        return not any(masks is not None and masks.shape[3:] not in ((), (1,)) for _, masks in self._arrays)

    def frames(self, index: int, first: int, count: int) -> Array:
        return self._arrays[index][0].rows(first, count)

    def masks(self, index: int, first: int, count: int) -> Array:
        stored = self._arrays[index][1]
        assert stored is not None, "a video without masks was asked for them"
        rows = stored.rows(first, count)
        if rows.ndim == 4 and rows.shape[3] > 1:
            return from_planes(rows, self._videos[index].name)
        return small_labels(rows.reshape(rows.shape[:3]), self._videos[index].name)

    def files(self) -> Sequence[Path]:
        return self._paths


def _check_masks(masks: StoredArray, frames: tuple[int, ...], where: str) -> None:
    if len(masks.shape) not in (3, 4) or masks.shape[:3] != frames[:3] or masks.dtype.kind not in "uib":
        raise DataError(
            f"{where}: masks are {masks.dtype} {masks.shape}, its frames {frames}",
            why="masks hold one object's number for each pixel of each frame",
            fix=f"integers {(*frames[:3], 1)}, or data.on_bad_file=skip",
        )


def small_labels(labels: Array, name: str) -> Array:
    """Labels as bytes; wider numbers are counted again, 0 stays 0."""
    if labels.dtype == np.uint8 or (labels.min() >= NO_OBJECT and labels.max() < 256):
        return labels.astype(np.uint8, copy=False)
    values, numbered = np.unique(np.append(NO_OBJECT, labels), return_inverse=True)
    numbered = numbered[1:] - int(np.searchsorted(values, NO_OBJECT))
    if values[0] < NO_OBJECT or len(values) > 256:
        raise DataError(
            f"the masks of {name} hold {len(values)} labels from {values[0]} to {values[-1]}",
            fix="0 for background, at most 255 objects",
        )
    return numbered.reshape(labels.shape).astype(np.uint8)


def from_planes(planes: Array, name: str) -> Array:
    """One label a pixel (T, H, W) from a plane for each object (T, H, W, objects); 0 where there is none."""
    is_there = planes != 0
    if bool((is_there.sum(-1, dtype=np.int32) > 1).any()):
        raise DataError(
            f"objects overlap in the masks of {name}",
            why="in FG-ARI and mBO a pixel has one object",
            fix="write its segmentations.npy again, with one object at each pixel",
        )
    return np.where(is_there.any(-1), is_there.argmax(-1) + 1, NO_OBJECT).astype(np.uint8)


def what_was_left_out(bad_files: BadFiles) -> str:
    """Why there may be less than is expected; nothing where all was taken."""
    return f"{len(bad_files.skipped)} left out: {bad_files.skipped[0].what}" if bad_files.skipped else ""
