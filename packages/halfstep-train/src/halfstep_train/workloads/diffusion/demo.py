"""Demo data: images of shapes, with classes and captions; the same for a seed on every machine.

Each image shows a disc, a square or a cross, in one of four colours, on a dark background with a brightness gradient:
simple enough to learn in a minute on a CPU, with edges, positions and sizes that a model has to get right.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep_train.data.files import Array, create_folder

NUM_IMAGES, SIDE = 240, 32
SHAPES = ("cross", "disc", "square")
COLOURS = {"red": (0.9, 0.2, 0.2), "green": (0.2, 0.8, 0.3), "blue": (0.2, 0.4, 0.95), "yellow": (0.95, 0.85, 0.2)}


def write_demo(folder: Path, *, seed: int = 0, num_images: int = NUM_IMAGES, side: int = SIDE) -> None:
    """Write `<shape>/<number>.png` and metadata.jsonl with captions into `folder`, which appears when complete."""
    with create_folder(folder) as unfinished:
        rows = []
        for number in range(num_images):
            random = np.random.default_rng([seed, number])
            shape, colour = SHAPES[number % len(SHAPES)], list(COLOURS)[random.integers(len(COLOURS))]
            name = f"{shape}/{number:04d}.png"
            (unfinished / shape).mkdir(exist_ok=True)
            Image.fromarray(draw_shape(random, side, shape, colour)).save(unfinished / name)
            rows.append({"file_name": name, "text": f"a {colour} {shape}"})
        lines = [json.dumps(row) + "\n" for row in rows]
        (unfinished / "metadata.jsonl").write_text("".join(lines))


def draw_shape(random: np.random.Generator, side: int, shape: str, colour: str) -> Array:
    """Return one image (side, side, 3) uint8."""
    y, x = (np.mgrid[:side, :side] + 0.5) / side
    angle, size = random.uniform(0, 2 * np.pi), random.uniform(0.18, 0.3)
    ground = 0.12 + 0.12 * (x * np.cos(angle) + y * np.sin(angle))
    centre_y, centre_x = random.uniform(0.32, 0.68, 2)
    u, v = abs(x - centre_x), abs(y - centre_y)
    # Distance from the edge of the shape, positive inside.
    depth = {
        "disc": size - np.hypot(u, v),
        "square": 0.85 * size - np.maximum(u, v),
        "cross": np.minimum(size - np.maximum(u, v), 0.35 * size - np.minimum(u, v)),
    }[shape]
    inside = (depth * side + 0.5).clip(0, 1)[..., None]  # anti-aliased: edges are one pixel wide
    image = ground[..., None] * (1 - inside) + np.array(COLOURS[colour]) * inside
    return np.asarray((image.clip(0, 1) * 255).round().astype(np.uint8))
