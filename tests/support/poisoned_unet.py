"""The U-Net workload with NaN in a pixel at some steps; steps from the fourth on are captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfstep_train.workloads.base.workload import Batch, Workload
from halfstep_train.workloads.segmentation import KIND as SEGMENTATION
from halfstep_train.workloads.segmentation.build import build as build_unet

POISONED = (8, 9, 13)


def build(config: Any, store: Mapping[str, Any] | None = None) -> Workload:
    workload = build_unet(config, store)

    def prepare(batch: Batch, *, key: Any, training: bool) -> Batch:
        prepared = workload.prepare(batch, key=key, training=training)
        if training and key[1] in POISONED:
            prepared["image"][0, 0, 0, 0] = float("nan")
        return prepared

    return replace(workload, prepare=prepare)


KIND = replace(SEGMENTATION, builder=build)
