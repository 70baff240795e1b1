"""Demo data: a small RadioMapSeer in the original layout, with cities of blocks and streets and ray-marched shadows.

The gain falls with the logarithm of the distance to the antenna and with every building pixel on the straight line to
it; inside buildings it is 0, as in the original. A model therefore has to learn distance and shadows. Cars are small
boxes in the streets that attenuate a little more. Map numbers are chosen so that RadioUNet's split gives most maps to
training and some to validation and test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from halfstep_train.data.files import Array, create_folder
from halfstep_train.workloads.radio.maps import get_public_split

SIDE = 16
NUM_MAPS = {"train": 80, "val": 6, "test": 6}
NUM_TRANSMITTERS = 8
NUM_IRT4 = 2
"""Transmitters with an IRT4 simulation, as in the original."""
WALL_LOSS, CAR_LOSS = 0.035, 0.01
"""Gain lost per pixel of wall or car on the ray."""


def write_demo(
    folder: Path,
    *,
    seed: int = 0,
    side: int = SIDE,
    num_maps: dict[str, int] | None = None,
    num_transmitters: int = NUM_TRANSMITTERS,
) -> None:
    """Write the data to `folder`, which appears only when it is complete."""
    split = get_public_split()
    counts = num_maps or NUM_MAPS
    numbers = [number for role, count in counts.items() for number in split[role][:count]]  # type: ignore[index]
    with create_folder(folder) as unfinished:
        for number in numbers:
            _write_map(unfinished, number, np.random.default_rng([seed, number]), side, num_transmitters)


def _write_map(root: Path, number: int, rng: np.random.Generator, side: int, num_transmitters: int) -> None:
    """Write all files of one city: buildings, versions with missing buildings, cars, antennas and gains."""
    city, cars = draw_city(rng, side)
    _save(city * 255, root / "png/buildings_complete" / f"{number}.png")
    _save(cars * 255, root / "png/cars" / f"{number}.png")
    for missing in range(1, 5):
        for version in range(1, 7):
            thinned = remove_blocks(city, missing, rng)
            _save(thinned * 255, root / f"png/buildings_missing{missing}/{version}" / f"{number}.png")
    streets = np.argwhere(city == 0)
    for transmitter in range(num_transmitters):
        row, column = streets[rng.integers(len(streets))]
        antenna = np.zeros((side, side), dtype=np.uint8)
        antenna[row, column] = 255
        name = f"{number}_{transmitter}.png"
        _save(antenna, root / "png/antennas" / name)
        plain = compute_path_gain(city, (row, column), WALL_LOSS)
        with_cars = compute_path_gain(city, (row, column), WALL_LOSS, extra=cars)
        # Stand-ins for the original's simulations, which differ in how much they model behind walls.
        for simulation, factor in (("DPM", 1.0), ("IRT2", 0.9), ("IRT4", 0.95)):
            if simulation != "IRT4" or transmitter < NUM_IRT4:
                _save(plain * factor, root / "gain" / simulation / name)
                _save(with_cars * factor, root / "gain" / f"cars{simulation}" / name)


def draw_city(rng: np.random.Generator, side: int) -> tuple[Array, Array]:
    """Return buildings and cars, arrays (side, side) of 0 and 1: a grid of streets, and blocks of one to three
    houses."""
    city = np.zeros((side, side), dtype=np.uint8)
    cars = np.zeros_like(city)
    rows, columns = (_draw_blocks(rng, side) for _ in range(2))
    for top, bottom in rows:
        for left, right in columns:
            for _ in range(rng.integers(1, 4)):
                height, width = (rng.integers(max(2, span // 2), span + 1) for span in (bottom - top, right - left))
                y, x = rng.integers(top, bottom - height + 1), rng.integers(left, right - width + 1)
                city[y : y + height, x : x + width] = 1
    for y, x in rng.integers(0, side - 2, (side // 4, 2)):
        cars[y : y + 1, x : x + 2] = 1
    return city, cars * (1 - city)


def _draw_blocks(rng: np.random.Generator, side: int) -> list[tuple[int, int]]:
    """Return (start, end) of the blocks between randomly placed streets, along one axis."""
    spans, start = [], int(rng.integers(1, 4))
    while start < side - 4:
        end = min(side - 1, start + int(rng.integers(side // 8, side // 4)))
        spans.append((start, end))
        start = end + int(rng.integers(3, 6))
    return spans


def remove_blocks(city: Array, count: int, rng: np.random.Generator) -> Array:
    """Return the city with some buildings removed, as in an incomplete map."""
    thinned = city.copy()
    for y, x in rng.permutation(np.argwhere(city == 1))[:count]:
        size = city.shape[0] // 10
        thinned[max(0, y - size) : y + size, max(0, x - size) : x + size] = 0
    return thinned


def compute_path_gain(city: Array, antenna: tuple[int, int], wall_loss: float, *, extra: Array | None = None) -> Array:
    """Return the gain as uint8 (H, W): bright at the antenna, darker with distance and behind walls, 0 in buildings."""
    side = city.shape[0]
    grid = np.mgrid[:side, :side]
    offset = grid - np.array(antenna)[:, None, None]
    distance = np.hypot(*offset)
    steps = 2 * side
    lost = np.zeros(city.shape)
    for step in range(steps):
        # The point at this fraction of the ray to each pixel.
        point = np.array(antenna)[:, None, None] + offset * (step / steps)
        y, x = point.round().astype(int)
        # Each sample stands for distance / steps pixels of the ray.
        walls = city[y, x] * wall_loss + (extra[y, x] * CAR_LOSS if extra is not None else 0.0)
        lost += walls * distance / steps
    # Logarithmic path loss, scaled so that maps of any side look like one of 64 pixels.
    gain = 1.0 - 0.16 * np.log2(1 + distance * 64 / side / 2) - lost * 64 / side
    return np.asarray((gain.clip(0.02, 1) * (1 - city) * 255).round().astype(np.uint8))


def _save(pixels: Array, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels).round().astype(np.uint8)).save(path)
