"""Made-up images and labels, and the workload on them: what a bench, trials and estimates of memory run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.data.classification_augment import SCALE, SHIFT, model_images
from halfstep.data.loader import Batch, Samples
from halfstep.data.seeds import generator_for
from halfstep.workloads.classification.build import FRAGILE, loss_of, model_from_store
from halfstep.workloads.classification.config import ClassifierConfig
from halfstep.workloads.classification.scores import ClassificationMetrics
from halfstep.workloads.kind import Store
from halfstep.workloads.workload import Workload

IMAGENET_CLASSES = 1000


def random_store(config: ClassifierConfig) -> dict[str, Any]:
    return {"classes": [str(k) for k in range(IMAGENET_CLASSES)]}


def random_batch(config: ClassifierConfig, store: Store) -> Batch:
    """Bytes as a loader delivers them, and labels that no model can guess."""
    generator, size, side = generator_for(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(len(store["classes"]), (size,), generator=generator)
    return {"image": image, "label": label, "index": torch.arange(size)}


def over(config: ClassifierConfig, store: Store, samples: Samples) -> Workload:
    """Without augmentation: it costs everybody the same and shows nothing."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return batch | {"image": model_images(batch, batch["image"].shape[1], key=key)}

    return Workload(
        name=config.workload,
        model=model_from_store(config, store),
        train_samples=samples,
        val_samples=samples,
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=loss_of(config),
        metrics=lambda: ClassificationMetrics(len(store["classes"])),
        metric="top1",
        fragile=FRAGILE,
        store=store,
    )


def peer_prepare(device: torch.device) -> Callable[[Batch], Batch]:
    """The same numbers as `model_images`, as a peer's user would write it: nothing drawn, constants on the device.

    Contiguous, for pictures are stored channels last: who does not ask for this layout must not get it by accident.
    """
    scale, shift = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (SCALE, SHIFT))

    def prepare(batch: Batch) -> Batch:
        image = batch["image"].permute(0, 3, 1, 2).float()
        return batch | {"image": torch.addcmul(shift, image, scale).contiguous()}

    return prepare
