"""Demo data: a small segmentation set in the `imgs/` + `masks/` layout, the same for a seed on every machine.

Backgrounds are textured, from dark to bright. Shapes are slightly lighter or darker than the background behind them and
have stripes; thin lines and noise are distractors. A pixel's colour does not separate shape from background; its
neighbourhood does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from halfstep_train.data.files import Array, create_folder

NUM_IMAGES = 100
SIDE = 64


def write_demo(folder: Path, *, seed: int = 0, num_images: int = NUM_IMAGES, side: int = SIDE) -> None:
    """Write the data to `folder`, which appears only when it is complete."""
    with create_folder(folder) as unfinished:
        for part in ("imgs", "masks"):
            (unfinished / part).mkdir()
        for number in range(num_images):
            image, mask = draw_sample(np.random.default_rng([seed, number]), side)
            Image.fromarray(image).save(unfinished / "imgs" / f"{number:03d}.png")
            Image.fromarray(mask).save(unfinished / "masks" / f"{number:03d}_mask.png")


def draw_sample(rng: np.random.Generator, side: int) -> tuple[Array, Array]:
    """Return one image (side, side, 3) and its mask with the values 0 and 255, both uint8."""
    grid = (np.mgrid[:side, :side] + 0.5) / side
    colour = np.stack(
        [draw_smooth_noise(rng, side, 3) + 0.3 * draw_smooth_noise(rng, side, 12) for _ in range(3)], axis=-1
    )
    image = 0.2 + 0.6 * (colour - colour.min()) / np.ptp(colour)
    mask = np.zeros((side, side), dtype=bool)
    for _ in range(rng.integers(2, 5)):
        shape = _draw_shape(rng, grid)
        # Shapes differ from the background by a small offset in either direction.
        lift = rng.choice([-1, 1]) * rng.uniform(0.22, 0.32)
        image[shape & ~mask] += lift
        mask |= shape
    image += 0.12 * (_draw_stripes(rng, grid) * mask)[..., None]
    for _ in range(3):
        image[_draw_line(rng, grid)] += rng.choice([-1, 1]) * 0.15
    image += rng.normal(0, 0.02, image.shape)
    return (image.clip(0, 1) * 255).round().astype(np.uint8), mask.astype(np.uint8) * 255


def draw_smooth_noise(rng: np.random.Generator, side: int, knots: int) -> Array:
    """Return random values at `knots` points per side, linearly interpolated to (side, side)."""
    values = rng.random((knots, knots))
    position = np.linspace(0, knots - 1, side)
    low = np.minimum(position.astype(int), knots - 2)
    part = position - low
    rows = values[low] * (1 - part)[:, None] + values[low + 1] * part[:, None]
    return np.asarray(rows[:, low] * (1 - part) + rows[:, low + 1] * part)


def _draw_stripes(rng: np.random.Generator, grid: Array) -> Array:
    angle, period = rng.uniform(0, np.pi), 4 / grid.shape[1]
    y, x = grid
    return np.asarray(np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / period))


def _draw_shape(rng: np.random.Generator, grid: Array) -> Array:
    """Return the pixels of a disc, box or triangle at a random angle."""
    kind, angle, size = int(rng.integers(3)), rng.uniform(0, 2 * np.pi), rng.uniform(0.15, 0.26)
    centre_y, centre_x = rng.uniform(0.15, 0.85, 2)
    y, x = grid[0] - centre_y, grid[1] - centre_x
    u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    return find_inside(kind, u, v, size, box_ratio=0.7)


def find_inside(kind: int, u: Array, v: Array, size: float, *, box_ratio: float) -> Array:
    """Return which positions (u, v) are inside a disc, box or triangle (`kind` 0 to 2) around the origin."""
    if kind == 0:
        return np.asarray(np.hypot(u, v) < size)
    if kind == 1:
        return np.asarray((abs(u) < size) & (abs(v) < box_ratio * size))
    return np.asarray((v > -0.6 * size) & (v + 1.7 * abs(u) < 1.3 * size))


def _draw_line(rng: np.random.Generator, grid: Array) -> Array:
    angle, offset = rng.uniform(0, np.pi), rng.uniform(-0.5, 0.5)
    y, x = grid - 0.5
    return np.asarray(abs(x * np.cos(angle) + y * np.sin(angle) - offset) < 0.6 / grid.shape[1])
