"""The workload of image classification: a ResNet or a ViT."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import ConfigError, ModelError, format_count
from halfstep_train.data.image_folder import check_same_classes
from halfstep_train.data.image_samples import TrainingFiles, TrainingImages
from halfstep_train.data.loader import Batch, Samples, make_generator
from halfstep_train.models.layers import divide_side
from halfstep_train.models.patch_gan import IMAGENET_MEAN, IMAGENET_STD
from halfstep_train.models.vit import PATCHES_TILE, ViT, build_vit, resize_positions
from halfstep_train.models.weights import load_weights_, match_names, read_weights
from halfstep_train.workloads import get_model_name
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Guiding, choose_side, measure_median_size, read_size
from halfstep_train.workloads.base.workload import OpenedData, Prepare, Workload
from halfstep_train.workloads.classification.augment import SCALE, SHIFT, prepare_images
from halfstep_train.workloads.classification.config import (
    SMALL_CHANGES,
    SMALL_SIDE,
    ClassifierConfig,
    ImageDataConfig,
    ResNetConfig,
    ViTConfig,
)
from halfstep_train.workloads.classification.data import get_evaluation_share, get_evaluation_size, open_image_data
from halfstep_train.workloads.classification.resnet import ResNet, build_resnet
from halfstep_train.workloads.classification.scores import ClassificationMetrics, classification_loss, mix

FRAGILE = ("loss.cross_entropy: log of probabilities near 0, and weights of mixed labels",)


def build(config: ClassifierConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes the classes that data must have."""
    data = open_image_data(config.data, store, quiet=config.log.quiet)
    is_new = store is None
    store = data.store if store is None else store
    check_same_classes(store["classes"], data.store["classes"])
    sides, settled = measure_sides(data.train) if is_new else None, {}
    if sides is not None and (fitting := config.data.fit_augmentation(max(sides))) != config.data.augment:
        settled["data.augment"] = fitting
        config = config.replace(data={"augment": fitting})
        assert isinstance(data.train, (TrainingFiles, TrainingImages))  # only these have sides
        data.train.crop_area = fitting.crop_area
    model = build_model(config, store)
    if is_new:
        check_last_batch(model, config, len(data.train))
    if is_new and (path := config.model.weights):
        load_classifier_(model, read_weights(Path(path))[0], source=path, replace_head=config.model.replace_head)
    prepare = PrepareImages(config.data)
    about = data.about
    if is_new:
        about = (*about, *describe_scaling(config, sides), *describe_augmentation(config.data, sides))
    by_batch = ("Mixup and CutMix",) if config.data.augment.is_mixing else ()
    data = replace(data, store=store, about=about, settled=settled)
    return make_workload(config, model, data, prepare, by_batch=by_batch)


def describe_scaling(config: ClassifierConfig, sides: tuple[int, int] | None) -> tuple[tuple[str, str], ...]:
    """Return the header's line about images that are smaller than what the model sees."""
    if sides is None or choose_side(sides) >= config.data.image_size:
        return ()
    width, height = sides
    fitting = Guide().suggest_for_side(config, choose_side(sides))
    settings = " ".join(f"{path}={value}" for path, value in fitting.items() if value)
    size = config.data.image_size
    return (("image size", f"{size}: images of {width}×{height} pixels are scaled up; at their own size: {settings}"),)


def describe_augmentation(data: ImageDataConfig, sides: tuple[int, int] | None) -> tuple[tuple[str, str], ...]:
    """Return the header's line about the augmentation of small images."""
    area, flip = data.augment.crop_area, data.augment.flip
    is_small = data.image_size <= SMALL_SIDE or (sides is not None and max(sides) <= SMALL_SIDE)
    if not is_small or {"crop_area": area, "flip": flip} != SMALL_CHANGES:
        return ()
    why = f"data.image_size={data.image_size}" if data.image_size <= SMALL_SIDE else "the size of the images"
    text = f"crops of {area[0]:.0%} to {area[1]:.0%} of an image and no flips, because of {why}"
    return (("augmentation", f"{text} (data.augment.crop_area, data.augment.flip)"),)


def make_workload(
    config: ClassifierConfig, model: nn.Module, data: OpenedData, prepare: Prepare, *, by_batch: tuple[str, ...] = ()
) -> Workload:
    """Build the workload from its model and samples."""

    def compute_loss(outputs: Tensor, batch: Batch) -> tuple[Tensor, float]:
        return classification_loss(outputs, batch, smoothing=config.model.label_smoothing), len(outputs)

    return Workload(
        name=config.workload,
        model=model,
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=compute_loss,
        metrics=lambda: ClassificationMetrics(len(data.store["classes"])),
        metric="top1",
        fragile=FRAGILE,
        by_batch=by_batch,
        **data.to_fields(),
    )


def check_last_batch(model: nn.Module, config: ClassifierConfig, num_train: int) -> None:
    """Refuse a batch size that leaves one sample in the last batch, if BatchNorm cannot normalise a single sample."""
    size, side = config.train.batch_size, config.data.image_size
    if (num_train % size or size) != 1:
        return
    try:  # on the meta device, so that nothing is computed
        with torch.no_grad():
            copy.deepcopy(model).to("meta").train()(torch.empty(1, 3, side, side, device="meta"))
    except ValueError as error:
        raise ConfigError(
            f"train.batch_size={size} leaves a single sample in the last batch of {num_train} samples",
            why=f"at data.image_size={side} BatchNorm gets only one value per channel from it, so the variance is 0",
            fix="choose another train.batch_size, or a larger data.image_size",
        ) from error


class PrepareImages:
    """Convert bytes to the model's input; in training with crop, flip, colour, erasing and mixing."""

    def __init__(self, config: ImageDataConfig) -> None:
        self.train_size, self.eval_size = config.image_size, get_evaluation_size(config)
        self.changes = config.augment

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        others = {name: tensor for name, tensor in batch.items() if name != "box"}
        if not training:
            return others | {"image": prepare_images(batch, self.eval_size)}
        prepared = others | {"image": prepare_images(batch, self.train_size, changes=self.changes, key=key)}
        return mix(prepared, self.changes, key=key) if self.changes.is_mixing else prepared


def build_model(config: ClassifierConfig, store: Mapping[str, Any]) -> Classifier:
    """Build a ResNet or ViT without data, as prediction needs it."""
    num_classes, checkpointing = len(store["classes"]), config.train.activation_checkpointing
    if isinstance(config, ResNetConfig):
        sizes = config.model.model_dump(include={"blocks", "width", "stem"})
        return build_resnet(get_model_name(config), num_classes=num_classes, checkpointing=checkpointing, **sizes)
    assert isinstance(config, ViTConfig)
    model = build_vit(
        get_model_name(config),
        num_classes=num_classes,
        image_size=config.data.image_size,
        checkpointing=checkpointing,
        **config.model.model_dump(include={"depth", "heads", "dim", "patch"}),
    )
    # Raise now, not at the first validation.
    divide_side(get_evaluation_size(config.data), model.patch, PATCHES_TILE)
    return model


def describe_export(config: ClassifierConfig, store: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the model takes and returns."""
    side = get_evaluation_size(config.data)
    return {
        "input": f"RGB image, float32 (N, 3, {side}, {side}): (x / 255 - mean) / std",
        "output": "logits (N, classes); softmax gives probabilities",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "size": side,
        "crop": get_evaluation_share(config.data, store),
        "resize": "centre square of the upright image, `crop` of its shorter side, bilinear (Pillow, reducing_gap=2); "
        "a JPEG is decoded (Image.draft) at the smallest of 1/8, 1/4, 1/2 at which that square has `size` pixels",
        "classes": store["classes"],
    }


IMAGENET_CLASSES = 1000


def make_random_store(config: ClassifierConfig) -> dict[str, Any]:
    return {"classes": [str(k) for k in range(IMAGENET_CLASSES)]}


def make_random_batch(config: ClassifierConfig, store: Store) -> Batch:
    """Return random bytes as the loader returns them, and random labels."""
    generator, size, side = make_generator(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, side, side, 3), dtype=torch.uint8, generator=generator)
    label = torch.randint(len(store["classes"]), (size,), generator=generator)
    return {"image": image, "label": label, "index": torch.arange(size)}


def build_on_samples(config: ClassifierConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples, without augmentation, which would cost every framework the same."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return batch | {"image": prepare_images(batch, batch["image"].shape[1], key=key)}

    data = OpenedData(train=samples, val=samples, store=store)
    return make_workload(config, build_model(config, store), data, prepare)


def make_peer_prepare(device: torch.device) -> Callable[[Batch], Batch]:
    """Return the preparation that a user of another framework would write; its results equal `prepare_images`.

    The result is contiguous: images are stored channels last, and a peer must not get this layout by accident.
    """
    scale, shift = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (SCALE, SHIFT))

    def prepare(batch: Batch) -> Batch:
        image = batch["image"].permute(0, 3, 1, 2).float()
        return batch | {"image": torch.addcmul(shift, image, scale).contiguous()}

    return prepare


Classifier = ResNet | ViT


def load_classifier_(model: Classifier, weights: dict[str, Tensor], *, source: str, replace_head: bool) -> None:
    """Load weights, with `replace_head` all but those of the head; raise ModelError if they do not match."""
    weights = match_names(model.state_dict(), weights)
    if isinstance(model, ViT) and "encoder.pos_embedding" in weights:
        weights["encoder.pos_embedding"] = _fit_positions(model, weights["encoder.pos_embedding"])
    head = {name: value for name, value in model.state_dict().items() if name.startswith(f"{model.head_name}.")}
    if replace_head:
        weights |= head
    own, theirs = head[f"{model.head_name}.weight"], weights.get(f"{model.head_name}.weight")
    if theirs is not None and len(theirs) != len(own):
        raise ModelError(
            f"{source} has weights for {format_count(len(theirs), 'class', 'classes')}, but the data has {len(own)}",
            fix="model.replace_head=true starts with a new head",
        )
    load_weights_(model, weights, source=source)


def _fit_positions(model: ViT, positions: Tensor) -> Tensor:
    """Resample position embeddings to the grid of the model; loading later refuses those of a grid that is not
    square."""
    num_patches = positions.shape[1] - 1
    is_square = positions.ndim == 3 and math.isqrt(max(num_patches, 0)) ** 2 == num_patches > 0
    return resize_positions(positions, model.grid, model.grid) if is_square else positions


# --- halfstep guide ---


PATCHES_PER_SIDE = 8
"""Of a ViT for images up to SMALL_SIDE pixels; a ResNet then needs the stem that keeps the resolution."""


class Guide(Guiding):
    """Guide to image classifiers."""

    small_on_cpu = {"data.image_size": 128, "data.eval_size": 0}

    def open(self, config: ClassifierConfig) -> OpenedData:
        data = open_image_data(config.data)
        assert isinstance(data.train, TrainingFiles | TrainingImages)
        classes, titles = data.store["classes"], data.store["titles"]
        return replace(
            data,
            about=(),
            classes=tuple(titles.get(name, name) for name in classes),
            counts=tuple(torch.bincount(data.train.labels, minlength=len(classes)).tolist()),
            sides=measure_sides(data.train),
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        return classes[int(sample["label"])], Image.fromarray(sample["image"].numpy())

    def suggest_for_side(self, config: ClassifierConfig, side: int) -> dict[str, Any]:
        paths: dict[str, Any] = {"data.image_size": side, "data.eval_size": 0}
        if side <= SMALL_SIDE and isinstance(config, ResNetConfig):
            paths["model.stem"] = "small"
        if side <= SMALL_SIDE and isinstance(config, ViTConfig):
            paths["model.patch"] = side // PATCHES_PER_SIDE
        return paths


def measure_sides(train: Samples) -> tuple[int, int] | None:
    """Return the median width and height of the training images; None if they are neither files nor arrays."""
    if isinstance(train, TrainingImages):
        width, height = np.median(train.images.sizes, axis=0)
        return int(width), int(height)
    if isinstance(train, TrainingFiles):
        return measure_median_size(len(train), lambda index: read_size(train.listing.paths[index]))
    return None
