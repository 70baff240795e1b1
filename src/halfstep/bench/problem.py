"""A workload on random data: its real model, loss and preparation, and no folder of images."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.bench.runner import Batch, Problem
from halfstep.config.schema import RunConfig
from halfstep.data.classification_augment import SCALE, SHIFT, model_images
from halfstep.data.seeds import generator_for
from halfstep.errors import ConfigError
from halfstep.guide.memory import model_for
from halfstep.step.randomness import seed_everything
from halfstep.workloads import BUILDERS
from halfstep.workloads.classification import build as image_classification
from halfstep.workloads.classification.config import ClassifierConfig
from halfstep.workloads.classification.scores import ClassificationMetrics, classification_loss
from halfstep.workloads.segmentation import build as unet
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.scores import SegmentationMetrics, segmentation_loss
from halfstep.workloads.workload import Loss, Workload

IMAGENET_CLASSES = 1000
NUM_BATCHES = 10_000
"""Length of the pretended data set, that of ImageNet in batches of 128: `auto` weighs its trials against the run."""


class RandomSamples:
    """A data set whose samples are those of one batch, over and over."""

    def __init__(self, batch: Batch) -> None:
        self.values = batch  # not `batch`: samples with that name make whole batches themselves
        self.size = len(batch["image"])

    def __len__(self) -> int:
        return NUM_BATCHES * self.size

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        del key
        return {name: tensor[index % self.size] for name, tensor in self.values.items() if name != "index"}


def problem_for(config: RunConfig, device: torch.device) -> Problem:
    """What everybody who is timed gets: weights, one pinned batch, preparation and loss."""
    batch = random_batch(config)
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    prototype = _model(config)
    workload = random_workload(config, prototype, batch)
    samples = config.train.batch_size
    return Problem(
        config=config,
        make_model=lambda: copy.deepcopy(prototype),
        host_batch=batch,
        prepare=_prepare_pixels_alone if isinstance(config, UNetConfig) else _picture_preparation(device),
        loss=lambda model, prepared: workload.loss(workload.forward(model, prepared), prepared)[0],
        device=device,
        lr=config.optimizer.peak_lr(samples),
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.train.clip_norm,
        samples=samples,
    )


def random_workload(config: RunConfig, model: nn.Module, batch: Batch) -> Workload:
    """The workload as a run would build it, but for augmentation: it costs everybody the same and shows nothing."""
    samples = RandomSamples(batch)
    is_unet = isinstance(config, UNetConfig)
    return Workload(
        name=config.workload,
        model=model,
        train_samples=samples,
        val_samples=samples,
        prepare=_prepare_pixels if is_unet else _prepare_picture,
        forward=lambda model, prepared: model(prepared["image"]),
        loss=_loss(config),
        metrics=lambda: (
            SegmentationMetrics(_num_classes(config)) if is_unet else ClassificationMetrics(IMAGENET_CLASSES)
        ),
        metric="iou" if is_unet else "top1",
        fragile=unet.FRAGILE if is_unet else image_classification.FRAGILE,
    )


def random_batch(config: RunConfig) -> Batch:
    """Bytes as a loader delivers them, and targets that no model can guess."""
    generator, size, side = generator_for(config.train.seed), config.train.batch_size, config.data.image_size
    ids = {"index": torch.arange(size)}
    if isinstance(config, UNetConfig):
        image = torch.randint(256, (size, _channels(config), side, side), dtype=torch.uint8, generator=generator)
        classes = max(2, _num_classes(config))
        mask = torch.randint(classes, (size, side, side), dtype=torch.uint8, generator=generator)
        return {"image": image, "mask": mask, **ids}
    image = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    return {"image": image, "label": torch.randint(IMAGENET_CLASSES, (size,), generator=generator), **ids}


def stored_facts(config: RunConfig) -> dict[str, Any]:
    """What a run would store of data such as ours; a workload whose data nobody knows is refused."""
    if isinstance(config, UNetConfig):
        return {"channels": _channels(config), "num_classes": _num_classes(config)}
    if isinstance(config, ClassifierConfig):
        return {"classes": [str(k) for k in range(IMAGENET_CLASSES)]}
    raise ConfigError(
        f"halfstep bench cannot make data for {config.workload}",
        why="random data of the right shape are known for halfstep's own workloads only",
        fix=f"one of {', '.join(BUILDERS)}",
    )


def _model(config: RunConfig) -> nn.Module:
    seed_everything(config.train.seed)
    return model_for(config, stored_facts(config))


def _loss(config: RunConfig) -> Loss:
    def of_masks(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        assert isinstance(config, UNetConfig)
        wish = config.model
        value = segmentation_loss(
            outputs,
            batch["mask"],
            class_weights=wish.class_weights,
            ce_weight=wish.ce_weight,
            dice_weight=wish.dice_weight,
        )
        return value, len(outputs)

    def of_labels(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        assert isinstance(config, ClassifierConfig)
        return classification_loss(outputs, batch, smoothing=config.model.label_smoothing), len(outputs)

    return of_masks if isinstance(config, UNetConfig) else of_labels


def _prepare_pixels(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
    del key, training
    return batch | {"image": unet.unit_range(batch["image"])}


def _prepare_picture(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
    del training
    return batch | {"image": model_images(batch, batch["image"].shape[1], key=key)}


def _prepare_pixels_alone(batch: Batch) -> Batch:
    return _prepare_pixels(batch, key=(), training=True)


def _picture_preparation(device: torch.device) -> Callable[[Batch], Batch]:
    """The same numbers as `model_images`, as a peer's user would write it: nothing drawn, constants on the device.

    Contiguous, for pictures are stored channels last: who does not ask for this layout must not get it by accident.
    """
    scale, shift = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (SCALE, SHIFT))

    def prepare(batch: Batch) -> Batch:
        image = batch["image"].permute(0, 3, 1, 2).float()
        return batch | {"image": torch.addcmul(shift, image, scale).contiguous()}

    return prepare


def _num_classes(config: UNetConfig | RunConfig) -> int:
    assert isinstance(config, UNetConfig)
    return 2 if config.model.classes == "auto" else config.model.classes


def _channels(config: UNetConfig) -> int:
    return 3 if config.data.channels == "auto" else config.data.channels
