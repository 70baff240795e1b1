"""Small folders of pictures for the tests of the image pipeline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def smooth_picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Random colours without fine detail, so that two ways of resizing nearly agree."""
    corners = np.random.default_rng(seed).integers(0, 256, (3, 3, 3)).astype(np.uint8)
    return Image.fromarray(corners).resize(size, Image.Resampling.BICUBIC)


def write_classes(folder: Path, counts: dict[str, int], *, size: tuple[int, int] = (40, 30)) -> None:
    """`folder/<class>/<n>.jpg`, as many of each class as asked for."""
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            smooth_picture(100 * number + i, size).save(folder / name / f"{i}.jpg", quality=95)


def write_split(folder: Path, *, train: int = 4, val: int = 2, size: tuple[int, int] = (40, 30)) -> Path:
    """train/ and val/ with the classes bird and cat."""
    write_classes(folder / "train", {"bird": train, "cat": train}, size=size)
    write_classes(folder / "val", {"bird": val, "cat": val}, size=size)
    return folder
