"""k-means as a baseline for slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep_train.workloads import build, load
from halfstep_train.workloads.slots.clusters import On, run_k_means, score_k_means, score_untrained
from halfstep_train.workloads.slots.demo import write_shard


def test_far_apart_points_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = centres.repeat_interleave(20, dim=0) + torch.randn(60, 2, generator=generator) * 0.1
    labels = run_k_means(points, 3, generator).view(3, 20)
    assert all(len(group.unique()) == 1 for group in labels)
    assert len(labels.unique()) == 3


@pytest.mark.parametrize("on", ["features", "pixels"])
def test_objects_of_two_colours_are_clusters(tmp_path: Path, on: On) -> None:
    video, masks = np.zeros((4, 32, 32, 3), np.uint8), np.zeros((4, 32, 32), np.uint8)
    for label, (corner, channel) in enumerate(((0, 0), (16, 2)), start=1):
        inside = slice(corner, corner + 16)
        video[:, inside, inside, channel], masks[:, inside, inside] = 250, label
    for part in ("train", "val"):
        write_shard(tmp_path / f"{part}-0.tar", [(video, masks)])
    words = (f"data.dir={tmp_path}", "data.image_size=32", "data.num_workers=0", "model.backbone=filters",
             "model.slots=3", "model.slot_dim=8", "model.decoder_hidden=[8]")  # fmt: skip
    config = load("slotcontrast", overrides=list(words)).config
    workload = build(config)
    assert score_k_means(workload, 3, on=on, coordinates=False)["fg_ari"] > 0.95  # masks are enlarged bilinearly
    assert score_untrained(workload)["fg_ari"] < 0.9
