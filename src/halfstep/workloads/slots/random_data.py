"""Made-up clips, and the workload on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.workloads.kind import Store
from halfstep.workloads.slots.build import (
    FRAGILE,
    RANDOM,
    build_backbone,
    build_model,
    forward_of,
    loss_of,
    metrics_of,
    prepare_of,
)
from halfstep.workloads.slots.config import SlotContrastConfig
from halfstep.workloads.workload import Workload

FILE_SIDE = 128
"""Of MOVi's frames; they are resized on the device."""


def frames_per_clip(config: SlotContrastConfig, store: Store) -> int:
    return config.data.chunk_size


def sample_size(config: SlotContrastConfig) -> str:
    return f"{config.data.chunk_size} frames of {config.data.image_size} pixels"


def random_store(config: SlotContrastConfig) -> dict[str, Any]:
    return {"background_is_labelled": True, "has_masks": False}


def random_batch(config: SlotContrastConfig, store: Store) -> Batch:
    """Bytes as a loader delivers them."""
    generator, size = generator_for(config.train.seed), config.train.batch_size
    shape = (size, config.data.chunk_size, 3, FILE_SIDE, FILE_SIDE)
    return {
        "video": torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        "index": torch.arange(size),
    }


def over(config: SlotContrastConfig, store: Store, samples: Samples) -> Workload:
    """With a random backbone where no weights are named: they cost the same."""
    if config.model.backbone_weights is None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"backbone_weights": RANDOM})})
    backbone = build_backbone(config)
    return Workload(
        name=config.workload,
        model=build_model(config, backbone.module),
        train_samples=samples,
        val_samples=samples,
        prepare=prepare_of(config),
        forward=forward_of(backbone.module),
        loss=loss_of(config),
        metrics=lambda: metrics_of(config, store),
        metric="loss",
        mode="min",
        fragile=FRAGILE,
        frozen={"backbone": backbone},
        store=store,
    )
