"""Who of RadioMapSeer's maps trains, validates and tests: by their numbers, so that a part of the data keeps its roles.

Both public splits shuffle the maps 1..700 with numpy's seed 42 and cut the row. RadioUNet's ranges do not touch.
RadioDiff's do: the map at index 600 is in all three parts, and its IRT4 validation lies inside the training maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

Role = Literal["train", "val", "test"]
Split = Mapping[Role, tuple[int, ...]]
"""Map numbers by role."""

NUM_MAPS = 700
RANGES: Mapping[str, Mapping[Role, tuple[int, int]]] = {
    "radiounet": {"train": (0, 500), "val": (501, 600), "test": (601, 699)},
    "radiodiff": {"train": (0, 600), "val": (600, 650), "test": (600, 699)},
    "radiodiff_irt4": {"train": (0, 600), "val": (501, 600), "test": (600, 699)},
}
"""First and last index into the shuffled maps."""


def public_split(name: str, simulation: str) -> dict[Role, tuple[int, ...]]:
    """`radiounet`, or `radiodiff`, which has other ranges for IRT4."""
    key = "radiodiff_irt4" if name == "radiodiff" and simulation == "IRT4" else name
    maps = shuffled_maps()
    return {role: maps[first : last + 1] for role, (first, last) in RANGES[key].items()}


def shuffled_maps() -> tuple[int, ...]:
    order = np.arange(NUM_MAPS)
    np.random.RandomState(42).shuffle(order)
    return tuple(int(place) + 1 for place in order)


def trained_elsewhere(split: Split) -> dict[Role, tuple[int, ...]]:
    """Maps of validation and test that are training maps as well."""
    train = set(split["train"])
    others: tuple[Role, ...] = ("val", "test")
    found = {role: tuple(number for number in split.get(role, ()) if number in train) for role in others}
    return {role: numbers for role, numbers in found.items() if numbers}
