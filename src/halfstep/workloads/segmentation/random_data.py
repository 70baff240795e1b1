"""Made-up images and masks, and the workload on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.workloads.kind import Store
from halfstep.workloads.segmentation.build import FRAGILE, loss_of, model_from_store, unit_range
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.scores import SegmentationMetrics
from halfstep.workloads.workload import Workload


def random_store(config: UNetConfig) -> dict[str, Any]:
    return {
        "channels": 3 if config.data.channels == "auto" else config.data.channels,
        "num_classes": 2 if config.model.classes == "auto" else config.model.classes,
    }


def random_batch(config: UNetConfig, store: Store) -> Batch:
    """Bytes as a loader delivers them, and masks that no model can guess."""
    generator, size, side = generator_for(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, store["channels"], side, side), dtype=torch.uint8, generator=generator)
    classes = max(2, store["num_classes"])
    mask = torch.randint(classes, (size, side, side), dtype=torch.uint8, generator=generator)
    return {"image": image, "mask": mask, "index": torch.arange(size)}


def over(config: UNetConfig, store: Store, samples: Samples) -> Workload:
    """Without augmentation: it costs everybody the same and shows nothing."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return batch | {"image": unit_range(batch["image"])}

    def forward(model: Any, batch: Batch) -> Tensor:
        logits: Tensor = model(batch["image"])
        return logits

    return Workload(
        name=config.workload,
        model=model_from_store(config, {**store, "image_size": config.data.image_size}),
        train_samples=samples,
        val_samples=samples,
        prepare=prepare,
        forward=forward,
        loss=loss_of(config),
        metrics=lambda: SegmentationMetrics(store["num_classes"]),
        metric="iou",
        fragile=FRAGILE,
        store=store,
    )
