"""How far a single colour threshold gets on a segmentation set: what a demo must be harder than."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def best_threshold_iou(folder: Path) -> float:
    """The best IoU of any threshold on any channel or on gray, both directions, chosen with the truth at hand."""
    images, masks = (
        np.stack([np.asarray(Image.open(path)) for path in sorted((folder / part).iterdir())])
        for part in ("imgs", "masks")
    )
    truth = masks > 0
    gray = images.astype(float).mean(axis=-1).astype(np.uint8)
    best = 0.0
    for values in (*np.moveaxis(images, -1, 0), gray):
        # Pixels at or below each threshold, by cumulated histograms: all 256 thresholds and both directions at once.
        inside = np.cumsum(np.bincount(values[truth], minlength=256))
        below = np.cumsum(np.bincount(values.ravel(), minlength=256))
        for hit, predicted in ((inside, below), (inside[-1] - inside, below[-1] - below)):
            best = max(best, float((hit / (predicted + inside[-1] - hit)).max()))
    return best
