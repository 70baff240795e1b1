"""Pictures of what a model makes: a grid of samples, and the way from noise to image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GAP = 2
"""White pixels between two pictures."""


def grid(images: Array, columns: int = 0) -> Array:
    """(H, W, 3) of images (N, h, w, 3), in rows of `columns`; 0: about as many rows as columns."""
    num, height, width = images.shape[:3]
    columns = columns or int(np.ceil(np.sqrt(num)))
    rows = -(-num // columns)
    sheet = np.full((rows * (height + GAP) + GAP, columns * (width + GAP) + GAP, 3), 255, dtype=np.uint8)
    for k, image in enumerate(images):
        top, left = (
            GAP + place * (side + GAP) for place, side in zip(divmod(k, columns), (height, width), strict=True)
        )
        sheet[top : top + height, left : left + width] = image
    return sheet


def path_picture(states: Sequence[Array]) -> Array:
    """A row for each sample, from noise on the left to the image on the right."""
    steps = np.stack(states, axis=1)
    return grid(steps.reshape(-1, *steps.shape[2:]), columns=len(states))
