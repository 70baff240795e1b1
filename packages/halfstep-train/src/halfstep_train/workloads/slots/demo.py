"""Demo data: clips like MOVi's in webdataset shards, with textured shapes that move in front of a textured ground.

The camera is fixed, so the ground is the same in all clips of a set. All objects of a clip have the same colour but
different shapes and textures. Similar pixels therefore need not belong to the same object, but pixels that move
together do, and a model that has learned the ground from other clips can tell it from objects. Masks hold 0 for the
ground and one number per object, for visible pixels only. Training shards have masks too, for inspection only.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfstep_train.data.files import Array, create_folder
from halfstep_train.workloads.segmentation.demo import draw_smooth_noise, find_inside

NUM_TRAIN, NUM_VAL, PER_SHARD = 96, 16, 16
FRAMES, SIDE = 12, 64
OBJECTS = (3, 5)
"""Smallest and largest number of objects per clip."""
GROUND = 2**31
"""Second seed of the ground's generator, after the seed of the set. For clips it is their number, which is smaller."""


def write_demo(
    folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL,
    frames: int = FRAMES, side: int = SIDE, per_shard: int = PER_SHARD,
) -> None:  # fmt: skip
    """Write `demo-train-000000.tar`, … and `demo-validation-000000.tar`, … to `folder`, which appears when complete."""
    ground = _draw_texture(np.random.default_rng([seed, GROUND]), side, knots=4, strength=0.25) * 0.8 + 0.1
    with create_folder(folder) as unfinished:
        first = 0
        for part, count in (("train", num_train), ("validation", num_val)):
            for shard, start in enumerate(range(0, count, per_shard)):
                samples = range(start, min(start + per_shard, count))
                clips = [draw_clip(np.random.default_rng([seed, first + k]), frames, ground) for k in samples]
                write_shard(unfinished / f"demo-{part}-{shard:06d}.tar", clips, first=start)
            first += count


def write_shard(path: Path, clips: Sequence[tuple[Array, Array | None]], *, first: int = 0) -> None:
    """Write clips as samples of a shard: `NAME.video.npy` and, if there are masks, `NAME.segmentations.npy`."""
    with tarfile.open(path, "w") as shard:
        for number, (video, masks) in enumerate(clips, start=first):
            add_array(shard, f"{number:06d}.video.npy", video)
            if masks is not None:
                add_array(shard, f"{number:06d}.segmentations.npy", masks[..., None])


def add_array(shard: tarfile.TarFile, name: str, array: Array) -> None:
    """Add an array to a tar as a `.npy` file."""
    content = io.BytesIO()
    np.save(content, array)
    member = tarfile.TarInfo(name)
    member.size = content.tell()
    content.seek(0)
    shard.addfile(member, content)


def draw_clip(rng: np.random.Generator, frames: int, ground: Array) -> tuple[Array, Array]:
    """Return frames (T, side, side, 3) and masks (T, side, side), both uint8, on a ground (side, side, 3) in 0..1."""
    side = len(ground)
    grid = (np.mgrid[:side, :side] + 0.5) / side
    hue = rng.uniform(0, 1, 3)
    colour = 0.25 + 0.75 * (hue - hue.min()) / np.ptp(hue)
    objects = [_Object(rng, side, colour) for _ in range(rng.integers(OBJECTS[0], OBJECTS[1] + 1))]
    video = np.empty((frames, side, side, 3))
    masks = np.zeros((frames, side, side), dtype=np.uint8)
    for t in range(frames):
        video[t] = ground
        for number, shape in enumerate(objects, start=1):
            inside, paint = shape.draw(grid, t / max(frames - 1, 1))
            video[t][inside], masks[t][inside] = paint[inside], number
    video += rng.normal(0, 0.015, video.shape)
    return (video.clip(0, 1) * 255).round().astype(np.uint8), masks


class _Object:
    """A disc, box or triangle with a texture, which moves and rotates."""

    def __init__(self, rng: np.random.Generator, side: int, colour: Array) -> None:
        self.kind = int(rng.integers(3))
        self.size = rng.uniform(0.12, 0.2)
        self.start, self.end = rng.uniform(0.15, 0.85, 2), rng.uniform(0.15, 0.85, 2)
        self.angles = rng.uniform(0, 2 * np.pi) + np.array([0, rng.uniform(-1.5, 1.5)])
        self.colour = colour
        self.texture = _draw_texture(rng, side, knots=10, strength=0.5)

    def draw(self, grid: Array, time: float) -> tuple[Array, Array]:
        """Return which pixels the object covers at a time in 0..1, and its colours."""
        centre = self.start + (self.end - self.start) * time
        angle = self.angles[0] + self.angles[1] * time
        y, x = grid - centre[:, None, None]
        # Coordinates in the frame of the object, whose texture moves with it.
        u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        side = len(grid[0])
        pixel = [((part + 0.5) * side).astype(int).clip(0, side - 1) for part in (v, u)]
        inside = find_inside(self.kind, u, v, self.size, box_ratio=0.75)
        return inside, self.colour * (0.55 + 0.6 * self.texture[pixel[0], pixel[1]])


def _draw_texture(rng: np.random.Generator, side: int, *, knots: int, strength: float) -> Array:
    """Return smooth colours with finer noise on top, (side, side, 3) in 0..1."""
    coarse = np.stack([draw_smooth_noise(rng, side, knots) for _ in range(3)], axis=-1)
    fine = draw_smooth_noise(rng, side, 4 * knots)[..., None]
    return np.asarray((1 - strength) * coarse + strength * fine)
