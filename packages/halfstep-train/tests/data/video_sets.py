"""Tiny sets of videos in every layout that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfstep_train.workloads.slots.demo import write_shard

Array = np.ndarray[Any, Any]


def clip(number: int, *, frames: int = 6, side: tuple[int, int] = (8, 8)) -> tuple[Array, Array]:
    """Frames whose every pixel says which clip and frame it is, and masks with an object that moves."""
    video = np.zeros((frames, *side, 3), dtype=np.uint8)
    video[..., 0] = number
    video[..., 1] = np.arange(frames)[:, None, None]
    masks = np.zeros((frames, *side), dtype=np.uint8)
    for t in range(frames):
        masks[t, t % side[0]] = 1 + number % 3
    return video, masks


def shards(folder: Path, name: str, counts: tuple[int, ...], *, frames: int = 6, with_masks: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for shard, count in enumerate(counts):
        clips = [clip(number, frames=frames) for number in range(first, first + count)]
        write_shard(
            folder / f"{name}-{shard:06d}.tar",
            [(video, masks if with_masks else None) for video, masks in clips],
            first=first,
        )
        first += count


def steve_folder(root: Path, number: int, *, frames: int = 4) -> None:
    video, masks = clip(number, frames=frames)
    folder = root / f"{number:08d}"
    folder.mkdir(parents=True)
    for t in range(frames):
        Image.fromarray(video[t]).save(folder / f"{t:08d}_image.png")
        for label in (0, int(masks.max())):
            Image.fromarray((masks[t] == label).astype(np.uint8) * 255).save(folder / f"{t:08d}_mask_{label:02d}.png")


def frame_folder(root: Path, name: str, number: int, *, frames: int = 4) -> None:
    video, masks = clip(number, frames=frames)
    for part, pictures in (("frames", video), ("masks", masks)):
        (root / name / part).mkdir(parents=True)
        for t in range(frames):
            Image.fromarray(pictures[t]).save(root / name / part / f"{t:03d}.png")
