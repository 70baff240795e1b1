"""k-means as a baseline for slots: cluster each clip separately, over all of its frames, with as many clusters as
slots.

The points are the backbone's features of patches, or mean colours of 4×4 pixels, with or without coordinates. Unlike a
trained model, k-means does not use other clips.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.data.loader import Key, Loader
from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.slots.scores import SlotMetrics

On = Literal["features", "pixels"]
STARTS, ITERATIONS = 3, 25
"""Random initialisations, of which the best is used, and iterations of each."""
COORDINATES = 2.0
"""Weight of the coordinates (-1 to 1), in units of the points' standard deviation."""
PIXELS = 4
"""Side of the squares whose mean colours are clustered."""


@torch.no_grad()
def score_k_means(workload: Workload, num_clusters: int, *, on: On, coordinates: bool) -> dict[str, float]:
    """Return the scores of k-means on the validation clips of a slot workload with a frozen backbone."""
    backbone: Any = workload.frozen["backbone"].module
    generator = torch.Generator().manual_seed(0)
    metrics = SlotMetrics()
    for batch, prepared in _iterate_clips(workload):
        if on == "features":
            # Without the backbone's position channels: coordinates are a separate option.
            points = backbone(prepared["video"][0])[..., : getattr(backbone, "look_dim", None)]
        else:  # mean colours (T, positions, 3) in 0..1 of squares of frames (T, 3, H, W) uint8
            points = F.avg_pool2d(batch["video"][0].float() / 255, PIXELS).flatten(2).transpose(1, 2)
        rows = add_coordinates(points) if coordinates else points.flatten(0, 1)
        labels = run_k_means(rows, num_clusters, generator).view(points.shape[:2])
        metrics.update({"masks": F.one_hot(labels, num_clusters).transpose(1, 2).float().unsqueeze(0)}, prepared)
    return metrics.compute()


def score_untrained(workload: Workload) -> dict[str, float]:
    """Return the scores of a workload's initial weights on its validation clips."""
    metrics = workload.metrics()
    workload.model.eval()
    with torch.no_grad():
        for _, prepared in _iterate_clips(workload):
            metrics.update(workload.forward(workload.model, prepared), prepared)
    return metrics.compute()


def _iterate_clips(workload: Workload) -> Iterator[tuple[Batch, Batch]]:
    """Yield each validation clip as loaded and as prepared, in batches of one."""
    for index, batch in enumerate(Loader(workload.val_samples, batch_size=1, shuffle=False).iterate_epoch(0)):
        yield batch, workload.prepare_batch(batch, key=Key.for_validation(index), training=False)


def add_coordinates(points: Tensor) -> Tensor:
    """Append coordinates to points (T, positions, channels) of a square grid; return rows (T * positions, channels +
    2)."""
    frames, positions, _ = points.shape
    line = torch.linspace(-1, 1, round(positions**0.5))
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).view(1, -1, 2).expand(frames, -1, -1)
    return torch.cat([points, grid * points.std() * COORDINATES], dim=-1).flatten(0, 1)


def run_k_means(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Cluster points several times, each initialised by k-means++; return the labels with the smallest error."""
    found = [_run_one_start(points, k, generator) for _ in range(STARTS)]
    return min(found, key=lambda labels_and_error: labels_and_error[1])[0]


def _run_one_start(points: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, float]:
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    # k-means++: draw each further centre with a probability proportional to its squared distance.
    while len(centres) < k:
        distance = torch.cdist(points, centres).amin(1).square()
        centres = torch.cat([centres, points[torch.multinomial(distance, 1, generator=generator)]])
    # Lloyd's algorithm; a cluster without points keeps its centre.
    for _ in range(ITERATIONS):
        labels = torch.cdist(points, centres).argmin(1)
        centres = torch.stack([points[labels == j].mean(0) if (labels == j).any() else centres[j] for j in range(k)])
    distance = torch.cdist(points, centres)
    return distance.argmin(1), float(distance.amin(1).square().sum())
