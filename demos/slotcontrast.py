"""SlotContrast's demo: trains on generated clips, asserts that slots learned, and shows k-means beside them.

    python demos/slotcontrast.py [--out DIR] [KEY=VALUE ...]

Asserted: FG-ARI is at least five times that of the untrained model, and the validation loss fell. k-means clusters the
same frozen features over all frames of a clip, k = slots, with and without coordinates, the best of three starts by its
own error; whether slots beat it is printed. KEY=VALUE words go to `halfstep train`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.config.schema import RunConfig
from halfstep.data.loader import Loader
from halfstep.data.seeds import Key
from halfstep.report.metrics_file import read
from halfstep.run.assemble import build_workload
from halfstep.run.train import train
from halfstep.workloads import load
from halfstep.workloads.slots.metrics import SlotMetrics

STARTS, ITERATIONS = 3, 25
COORDINATES = 2.0
"""Weight of a position's coordinates (-1 to 1) in units of the features' deviation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one in the temporary files")
    parser.add_argument("words", nargs="*", help="settings of halfstep train")
    arguments = parser.parse_args()
    out = arguments.out or Path(tempfile.mkdtemp()) / "slotcontrast"
    run = train(load("slotcontrast", overrides=["precision=fp32", *arguments.words]), out=out)
    config = load(str(run / "config.yaml")).config
    records = [record for record in read(run / "metrics.jsonl") if record["kind"] == "val"]
    best, before = max(record["fg_ari"] for record in records), untrained(config)
    first, last = records[0]["loss"], records[-1]["loss"]
    print(f"slots: FG-ARI {before:.3f} untrained, {best:.3f} at best; validation loss {first:.3f} -> {last:.3f}")
    for with_it in (False, True):
        score = clustered(config, coordinates=with_it)
        verdict = "slots are better" if best > score else "slots are worse"
        print(f"k-means {'with' if with_it else 'without'} coordinates: FG-ARI {score:.3f}, {verdict}")
    assert best >= 5 * max(before, 0.0), f"FG-ARI {best:.3f} is not five times the untrained model's {before:.3f}"
    assert last < first, "the validation loss did not fall"


def untrained(config: RunConfig) -> float:
    """FG-ARI of the run's first weights."""
    workload: Any = build_workload(config)
    metrics = SlotMetrics()
    workload.model.eval()
    for index, batch in enumerate(Loader(workload.val_samples, batch_size=1, shuffle=False).epoch(0)):
        prepared = workload.prepared(batch, key=Key.of_validation(config.train.seed, index), training=False)
        with torch.no_grad():
            metrics.update(workload.forward(workload.model, prepared), prepared)
    return metrics.compute()["fg_ari"]


def clustered(config: RunConfig, *, coordinates: bool) -> float:
    """FG-ARI of k-means on the backbone's features of each validation clip."""
    workload: Any = build_workload(config)
    backbone, generator = workload.frozen["backbone"].module, torch.Generator().manual_seed(0)
    metrics, num_slots = SlotMetrics(), workload.model.size.num_slots
    for index, batch in enumerate(Loader(workload.val_samples, batch_size=1, shuffle=False).epoch(0)):
        prepared = workload.prepared(batch, key=Key.of_validation(0, index), training=False)
        with torch.no_grad():
            features = backbone(prepared["video"][0])[..., : backbone.look_dim]
        points = with_coordinates(features) if coordinates else features.flatten(0, 1)
        labels = k_means(points, num_slots, generator).view(features.shape[:2])
        masks = F.one_hot(labels, num_slots).transpose(1, 2).float()
        metrics.update({"masks": masks.unsqueeze(0)}, prepared)
    return metrics.compute()["fg_ari"]


def with_coordinates(features: Tensor) -> Tensor:
    frames, positions, _ = features.shape
    line = torch.linspace(-1, 1, round(positions**0.5))
    grid = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).view(1, -1, 2).expand(frames, -1, -1)
    return torch.cat([features, grid * features.std() * COORDINATES], dim=-1).flatten(0, 1)


def k_means(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """The labels of the best of some starts, each by k-means++."""
    found = [_one_start(points, k, generator) for _ in range(STARTS)]
    return min(found, key=lambda labels_and_error: labels_and_error[1])[0]


def _one_start(points: Tensor, k: int, generator: torch.Generator) -> tuple[Tensor, float]:
    centres = points[torch.randint(len(points), (1,), generator=generator)]
    while len(centres) < k:
        distance = torch.cdist(points, centres).amin(1).square()
        centres = torch.cat([centres, points[torch.multinomial(distance, 1, generator=generator)]])
    for _ in range(ITERATIONS):
        labels = torch.cdist(points, centres).argmin(1)
        centres = torch.stack([points[labels == j].mean(0) if (labels == j).any() else centres[j] for j in range(k)])
    distance = torch.cdist(points, centres)
    return distance.argmin(1), float(distance.amin(1).square().sum())


if __name__ == "__main__":
    main()
