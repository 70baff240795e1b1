"""Demo data: ten classes of textures in the ImageFolder layout, the same for a seed on every machine.

There are five patterns, each coarse and fine, in two random colours, randomly shifted and slightly rotated, with uneven
light and noise. The value of a single pixel says nothing about the class, so a linear model learns little, while a
small convolutional network learns nearly everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep_train.data.files import Array, create_folder

SIDE = 64
NUM_TRAIN, NUM_VAL = 100, 20  # images per class
PERIODS = {"coarse": 0.5, "fine": 0.22}
"""Period of a pattern as a fraction of the side; random crops of 0.7 of the area keep the two distinct."""

PATTERNS: dict[str, Callable[[Array, Array], Array]] = {
    "checks": lambda u, v: np.sin(u) * np.sin(v),
    "columns": lambda u, v: np.sin(u),
    "rows": lambda u, v: np.sin(v),
    "rings": lambda u, v: np.sin(np.hypot(u, v)),
    "waves": lambda u, v: np.sin(u + 1.5 * np.sin(v)),
}
"""Values in -1..1 at positions (u, v), in radians of the period."""
CLASSES = tuple(sorted(f"{pattern}_{grain}" for pattern in PATTERNS for grain in PERIODS))


def write_demo(
    folder: Path, *, seed: int = 0, num_train: int = NUM_TRAIN, num_val: int = NUM_VAL, side: int = SIDE
) -> None:
    """Write `train/<class>/*.jpg` and `val/<class>/*.jpg` into `folder`, which appears only when it is complete."""
    with create_folder(folder) as unfinished:
        for split, (split_name, num_images) in enumerate((("train", num_train), ("val", num_val))):
            for label, name in enumerate(CLASSES):
                class_folder = unfinished / split_name / name
                class_folder.mkdir(parents=True)
                for number in range(num_images):
                    pixels = draw_image(name, np.random.default_rng([seed, split, label, number]), side)
                    Image.fromarray(pixels).save(class_folder / f"{number:03d}.jpg", quality=90)


def draw_image(name: str, rng: np.random.Generator, side: int) -> Array:
    """Return one image (side, side, 3) uint8 of a class."""
    pattern, grain = name.split("_")
    y, x = (np.mgrid[:side, :side] + 0.5) / side
    angle, wave = rng.uniform(-0.2, 0.2), 2 * np.pi / (PERIODS[grain] * rng.uniform(0.9, 1.1))
    dx, dy = x - rng.uniform(0.25, 0.75), y - rng.uniform(0.25, 0.75)
    u, v = (dx * np.cos(angle) + dy * np.sin(angle)) * wave, (dy * np.cos(angle) - dx * np.sin(angle)) * wave
    low, high = _draw_two_colours(rng)
    share = (PATTERNS[pattern](u, v)[..., None] + 1) / 2
    # Uneven light: a linear gradient in a random direction.
    light = 1 + 0.3 * (rng.uniform(-1, 1) * (x - 0.5) + rng.uniform(-1, 1) * (y - 0.5))[..., None]
    image = (low + (high - low) * share) * light + rng.normal(0, 0.06, (side, side, 3))
    return np.asarray((image.clip(0, 1) * 255).round().astype(np.uint8))


def _draw_two_colours(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return two random colours whose brightness differs by more than a quarter."""
    while True:
        one, other = rng.uniform(0, 1, (2, 3))
        if abs(one.mean() - other.mean()) > 0.25:
            return one, other
