"""The workload of segmentation: a U-Net on pairs of images and masks, trained with cross-entropy + Dice.

`classes: auto` gives one logit per class, background included, with softmax and cross-entropy; with two classes the
model has the 31,037,698 parameters of the reference. `classes: 1` is its other form: one logit and a sigmoid.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ConfigError, DataError
from halfstep.prefetching import send_to_device
from halfstep_train.data.files import BadFiles, list_some
from halfstep_train.data.images import USUAL, choose_scale, describe_outliers, read_image_facts
from halfstep_train.data.loader import Batch, BatchDraws, Samples, make_generator
from halfstep_train.models.weights import load_weights_file_
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Guiding, measure_median_size
from halfstep_train.workloads.base.workload import OpenedData, Prepare, Workload
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig, UNetConfig
from halfstep_train.workloads.segmentation.data import (
    IGNORED,
    FoundPairs,
    ImageFormat,
    MaskTable,
    MaskValue,
    Scan,
    SegmentationData,
    collect_values,
    find_pairs,
    make_table,
    parse_table,
    scan_pairs,
)
from halfstep_train.workloads.segmentation.pictures import draw_overlay
from halfstep_train.workloads.segmentation.scores import SegmentationMetrics, segmentation_loss
from halfstep_train.workloads.segmentation.unet import UNet

FRAGILE = (
    "loss.cross_entropy: log of probabilities near 0",
    "loss.dice: sums over all pixels of a batch exceed fp16's largest number",
)

SHOWN_VALUES = 8
"""Mask values in a message."""


def build(config: UNetConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes classes and image format."""
    bad_files = BadFiles(config.data.on_bad_file)
    found = find_pairs(config.data, bad_files)
    scan = scan_pairs([*found.train, *found.val], bad_files=bad_files)
    usable = set(scan.pairs)
    train_pairs, val_pairs = (tuple(pair for pair in part if pair in usable) for part in (found.train, found.val))
    bad_files.refuse_empty_split("training", len(found.train), len(train_pairs))
    bad_files.refuse_empty_split("validation", len(found.val), len(val_pairs))
    is_new = store is None
    about = {"layout": found.layout}
    settled: dict[str, Any] = {}
    if store is None:
        store, settled, why = _decide(config, found, scan, bad_files)
        about |= why
        if "model.background" in settled:
            config = config.replace(model={"background": None})
    elif config.data.image_size != store["image_size"]:
        factor = config.data.image_size / store["image_size"]
        store = {**store, "image_size": config.data.image_size, "resize": [factor * share for share in store["resize"]]}
    scaling, scale_notes = _describe_scale(store["raw_scale"], scan)
    about |= scaling
    table, image = read_table(store), read_image_format(store)
    given, needed = len(config.model.class_weights), max(2, store["num_classes"])
    if given not in (0, needed):
        raise ConfigError(
            f"{given} class weights for {needed} classes",
            fix="give model.class_weights one number per class, background first",
        )
    background = find_background(config, table)
    model = build_model(config, store)
    if is_new and config.model.weights:  # a resumed run loads its checkpoint later
        load_weights_file_(model, config.model.weights)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        pixels, mask = to_unit_range(batch["image"]), batch["mask"]
        if training:
            pixels, mask = augment(pixels, mask, config.data.augment, key=key)
        return batch | {"image": pixels, "mask": mask}

    data = OpenedData(
        train=SegmentationData(train_pairs, table=table, image=image),
        val=SegmentationData(val_pairs, table=table, image=image),
        store=store,
        notes=(*_note_many_values(config, found, table), *scale_notes, *bad_files.notes),
        about=tuple(about.items()),
        settled=settled,
    )
    return make_workload(
        config, model, data, prepare, background=background, scoring=_describe_scoring(table, background)
    )


def _decide(
    config: UNetConfig, found: FoundPairs, scan: Scan, bad_files: BadFiles
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the store of a new run, the settings that follow from its data, and the reasons."""
    seen = collect_values(scan.pairs, bad_files=bad_files)
    ignored, why_ignored = find_ignored_value(config, found, seen)
    side, why_side = choose_image_side(config, scan)
    settled: dict[str, Any] = {"data.image_size": side}
    why = {"ignored mask value": why_ignored, "image size": why_side}
    if not found.has_background and "background" not in config.model.model_fields_set:
        settled["model.background"] = None
        why["background"] = "this data set has none, so all classes count (model.background)"
    store = _make_store(config, scan, make_table(seen, ignored=ignored), side)
    if scan.raw:
        settled["data.scale"] = store["raw_scale"]
    return store, settled, {name: text for name, text in why.items() if text}


def _describe_scale(scale: float | None, scan: Scan) -> tuple[dict[str, str], list[str]]:
    """Describe the scale of float and 32-bit images for the run's header; also return warnings."""
    if scale is None or not scan.raw:
        return {}, []
    own = choose_scale(scan.raw.values())
    values = f"{USUAL:.1%} of a typical file's values are at most {own.usual:g}"
    notes = describe_outliers(scan.raw, own.limit)
    if not scale / 10 <= own.scale <= scale * 10:
        notes.append(
            f"float images are divided by {scale:g} (data.scale), but seem to be in 0..{own.scale:g}: {values}"
        )
    return {"float images": f"divided by {scale:g} (data.scale): {values}"}, notes


def make_workload(
    config: UNetConfig,
    model: nn.Module,
    data: OpenedData,
    prepare: Prepare,
    *,
    background: int | None = 0,
    scoring: str = "",
) -> Workload:
    """Build the workload from its model and samples."""
    m = config.model
    compute_loss = partial(segmentation_loss, class_weights=m.class_weights, dice_weight=m.dice_weight)
    return Workload(
        name=config.workload,
        model=model,
        prepare=prepare,
        forward=lambda model, batch: model(batch["image"]),
        loss=lambda outputs, batch: (compute_loss(outputs, batch["mask"]), len(outputs)),
        metrics=lambda: SegmentationMetrics(data.store["num_classes"], background),
        metric="iou",
        scoring=scoring,
        fragile=FRAGILE,
        by_batch=("the Dice term of the loss",) if m.dice_weight else (),
        **data.to_fields(),
    )


def to_unit_range(pixels: Tensor) -> Tensor:
    """Convert bytes to floats in 0..1; floating-point images are scaled when they are read."""
    return pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels


def read_table(store: Mapping[str, Any]) -> MaskTable:
    """Return the mask table of a stored run."""
    return parse_table(store["mask_values"], ignored=store["ignored_value"])


def read_image_format(store: Mapping[str, Any]) -> ImageFormat:
    """Return the image format of a stored run."""
    return ImageFormat(
        size=(store["image_size"], store["image_size"]),
        channels=store["channels"],
        is_float=store["is_float"],
        raw_scale=store["raw_scale"],
    )


def find_background(config: UNetConfig, table: MaskTable) -> int | None:
    """Return the class that `iou` and `dice` leave out."""
    background = config.model.background
    if background is None or background == "first":
        return None if background is None else 0
    if background not in table.values:
        raise ConfigError(
            f"model.background={background} is not a value of the masks: {list_some(table.values, SHOWN_VALUES)}",
            fix="give a mask value, `first` for the smallest one, or null to count all classes",
        )
    return table.values.index(background)


def _describe_scoring(table: MaskTable, background: int | None) -> str:
    if background is None:
        return "iou and dice are means over all classes, like iou_all and dice_all (model.background=null)"
    return (
        f"iou and dice leave out the background, mask value {table.values[background]}; iou_all and dice_all are means "
        "over all classes (as is iou with model.background=null)"
    )


def _make_store(config: UNetConfig, scan: Scan, table: MaskTable, side: int) -> dict[str, Any]:
    """Return the facts that a run stores; refuse masks that do not fit `model.classes`."""
    found, classes, scale = len(table.values), config.model.classes, config.data.scale
    if found < 2:
        raise DataError(
            f"every mask contains only the value {list_some(table.values) or table.ignored}",
            why="segmentation needs at least two classes",
            fix="check the masks; a value to ignore is model.ignore_index",
        )
    if classes not in ("auto", found) and not (classes == 1 and found == 2):
        raise DataError(
            f"model.classes is {classes}, but the masks contain {found} values: "
            f"{list_some(table.values, SHOWN_VALUES)}",
            fix=f"model.classes={found} (or auto), or model.ignore_index for a value that is not a class",
        )
    return {
        "mask_values": [list(value) if isinstance(value, tuple) else value for value in table.values],
        "ignored_value": list(table.ignored) if isinstance(table.ignored, tuple) else table.ignored,
        "num_classes": found if classes == "auto" else classes,
        "image_size": side,
        "channels": scan.channels if config.data.channels == "auto" else config.data.channels,
        "is_float": scan.is_float,
        "raw_scale": scale if scale != "auto" else choose_scale(scan.raw.values()).scale if scan.raw else None,
        # Later images are resized by the same factors, so that objects have the size the model was trained on.
        "resize": [side / median(size[axis] for size in scan.sizes) for axis in (0, 1)],
    }


def _note_many_values(config: UNetConfig, data: FoundPairs, table: MaskTable) -> list[str]:
    """Return a note if there are so many mask values that they are probably blurred edges."""
    found = len(table.values)
    # No note for known data sets (ADE20K has 150 classes), or if the user set the number of classes.
    if found <= MANY_VALUES or data.ignored is not None or config.model.classes == found:
        return []
    shown = list_some(table.values, SHOWN_VALUES)
    hint = "if JPEG or resizing has blurred the edges, save the masks again as PNG with exact values"
    return [f"the masks contain {found} different values, each treated as a class: {shown}; {hint}"]


def build_model(config: UNetConfig, store: Mapping[str, Any]) -> nn.Module:
    """Build the model without data, as prediction needs it."""
    side, depth = store["image_size"], config.model.depth
    if side < 2 ** (depth + 1):
        raise ConfigError(
            f"data.image_size={side} is too small for model.depth={depth}",
            why="each level halves the image, and BatchNorm needs more than one pixel at the deepest",
            fix=f"data.image_size={2 ** (depth + 2)} or more, or a smaller depth",
        )
    return UNet(
        in_channels=store["channels"],
        num_classes=store["num_classes"],
        checkpointing=config.train.activation_checkpointing,
        **config.model.model_dump(include={"base_channels", "depth", "bilinear"}),
    )


# --- settings that follow from the data ---

MANY_VALUES = 64
"""More classes than common data sets have (Cityscapes 34, VOC 22): more values are probably blurred edges."""


def find_ignored_value(
    config: UNetConfig, found: FoundPairs, seen: Collection[MaskValue]
) -> tuple[MaskValue | None, str]:
    """Return the mask value to ignore, and the reason if the config leaves it open."""
    ignored = config.model.ignore_index
    if ignored != "auto":
        return ignored, ""
    numbers = sorted(value for value in seen if isinstance(value, int))
    if len(numbers) < len(seen) or not numbers or config.model.classes == len(numbers):
        return None, ""
    advice = "model.ignore_index=null makes it a class"
    # Only the smallest or largest value can mark unlabelled pixels; in between, the same number may be a class.
    if found.ignored in (numbers[0], numbers[-1]):
        return found.ignored, f"{found.ignored}, which marks pixels without a label in this data set; {advice}"
    *classes, last = numbers
    if last == IGNORED and 1 < len(classes) <= MANY_VALUES and classes == list(range(len(classes))):
        return last, f"{last}: in addition to the classes 0 to {classes[-1]} it marks pixels without a label; {advice}"
    return None, ""


def choose_image_side(config: UNetConfig, scan: Scan) -> tuple[int, str]:
    """Return the side of the images, and the reason if the config leaves it open: the default, or less for small
    images."""
    usual = config.data.image_size
    if "image_size" in config.data.model_fields_set:
        return usual, ""
    height, width = (median(size[axis] for size in scan.sizes) for axis in (0, 1))
    step = 2**config.model.depth  # every level halves the side
    side = max(2 * step, -(-round(max(height, width)) // step) * step)
    pictures = f"the images have {width:g}×{height:g} pixels"
    if side >= usual:
        return usual, f"{usual}, the default; {pictures}"
    return side, f"{side}: {pictures}, so a larger size would only upscale them (data.image_size)"


def describe_export(config: UNetConfig, store: Store, folder: Path) -> dict[str, Any]:
    """Return what the model takes and returns."""
    side, channels = store["image_size"], store["channels"]
    return {
        "input": f"image, float32 (N, {channels}, {side}, {side}): x / 255 (8 bits), x / 65535 (16) or x / raw_scale",
        "output": f"logits (N, {store['num_classes']}, {side}, {side}): the largest is the class; of one channel, > 0",
        "size": side,
        "resize": "bicubic (Pillow) to the size; `halfstep predict` scales (height, width) by `factors`, in tiles",
        "factors": store["resize"],
        "channels": channels,
        "raw_scale": store["raw_scale"],
        "mask_values": [str(value) for value in read_table(store).values],
    }


def make_random_store(config: UNetConfig) -> dict[str, Any]:
    return {
        "channels": 3 if config.data.channels == "auto" else config.data.channels,
        "num_classes": 2 if config.model.classes == "auto" else config.model.classes,
    }


def make_random_batch(config: UNetConfig, store: Store) -> Batch:
    """Return random bytes as the loader returns them, and random masks."""
    generator, size, side = make_generator(config.train.seed), config.train.batch_size, config.data.image_size
    image = torch.randint(256, (size, store["channels"], side, side), dtype=torch.uint8, generator=generator)
    classes = max(2, store["num_classes"])
    mask = torch.randint(classes, (size, side, side), dtype=torch.uint8, generator=generator)
    return {"image": image, "mask": mask, "index": torch.arange(size)}


def build_on_samples(config: UNetConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples, without augmentation, which would cost every framework the same."""

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return batch | {"image": to_unit_range(batch["image"])}

    model = build_model(config, {**store, "image_size": config.data.image_size})
    return make_workload(config, model, OpenedData(train=samples, val=samples, store=store), prepare)


# --- halfstep guide ---


class Guide(Guiding):
    """Guide to segmentation."""

    small_on_cpu = {"data.image_size": 256, "model.base_channels": 16}

    def open(self, config: UNetConfig) -> OpenedData:
        # Only the data is used; initialising a full-size U-Net would take a second.
        tiny = config.replace(model={"base_channels": 1})
        built = build(tiny)
        assert isinstance(built.train_samples, SegmentationData)
        pairs = built.train_samples.pairs
        return OpenedData(
            train=built.train_samples,
            val=built.val_samples,
            store=built.store,
            classes=tuple(f"mask value {value}" for value in built.store["mask_values"]),
            notes=built.notes,
            sides=measure_median_size(len(pairs), lambda index: read_image_facts(pairs[index].image).size[::-1]),
        )

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        return f"sample {index}", draw_overlay(np.moveaxis(sample["image"].numpy(), 0, -1), sample["mask"].numpy())

    def suggest_for_side(self, config: UNetConfig, side: int) -> dict[str, Any]:
        return {"data.image_size": side}


# --- augmentation ---
#
# All geometric changes (flip, rotation, scale, crop) form one sampling grid, so an image is interpolated only
# once. Random numbers are drawn on the CPU from a key such as (seed, attempted step): the same step sees the same
# images on any device, and nothing waits for the device. The grid is computed without `affine_grid`, which is a matrix
# product: TF32 would round positions to half a pixel.


def augment(image: Tensor, mask: Tensor, spec: UNetAugmentConfig, *, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Augment images (N, C, H, W) in 0..1 and class maps (N, H, W) together; pixels from outside become IGNORED."""
    num, _, height, width = image.shape
    drawn = BatchDraws(key, num)
    # Always draw all numbers, so that enabling one change does not alter the random numbers of the others.
    draws = drawn.uniform(9)
    numbers = draws.T.contiguous()
    if spec.flip or spec.rotate_degrees or spec.scale or spec.crop:
        grid = _make_affine_grid(send_to_device(_draw_affine(numbers, spec), image.device), height, width)
        image, mask = _sample(image, mask, grid)
    if spec.brightness:
        gain, offset = send_to_device((numbers[7:9] * 2 - 1) * spec.brightness, image.device).view(2, num, 1, 1, 1)
        image = image * (1 + gain) + offset
    return image, mask


def _draw_affine(numbers: Tensor, spec: UNetAugmentConfig) -> Tensor:
    """Return matrices (N, 2, 3) that map output positions in -1..1 to input positions."""
    flip_x, flip_y, turn, zoom, cut, move_x, move_y = numbers[:7]
    angle = (turn * 2 - 1) * math.radians(spec.rotate_degrees)
    window = (1 - cut * spec.crop) / (1 + (zoom * 2 - 1) * spec.scale)
    free = cut * spec.crop  # how far the crop can move from the centre, in half images
    sign_x, sign_y = (1 - 2 * (flip < spec.flip).float() for flip in (flip_x, flip_y))
    cos, sin = angle.cos() * window, angle.sin() * window
    shift_x, shift_y = (move_x * 2 - 1) * free, (move_y * 2 - 1) * free
    rows = [sign_x * cos, -sign_x * sin, shift_x, sign_y * sin, sign_y * cos, shift_y]
    return torch.stack(rows, dim=1).view(-1, 2, 3)


def _make_affine_grid(affine: Tensor, height: int, width: int) -> Tensor:
    """Return the sampling grid (N, height, width, 2) of affine matrices."""
    y, x = (
        ((torch.arange(side, device=affine.device, dtype=torch.float32) + 0.5) * 2 - side) / side
        for side in (height, width)
    )
    # Rotate in pixels, not in the unit square, which would distort images that are not square.
    ratio = width / height
    x, y = x.view(1, 1, width), y.view(1, height, 1)
    a = affine.view(-1, 6, 1, 1)
    source_x = a[:, 0] * x + a[:, 1] * y / ratio + a[:, 2]
    source_y = a[:, 3] * x * ratio + a[:, 4] * y + a[:, 5]
    return torch.stack([source_x, source_y], dim=-1)


def _sample(image: Tensor, mask: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Read images bilinearly and masks by nearest neighbour; pixels from outside become IGNORED in masks."""
    moved = F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    # Classes below 256 are exact in fp32.
    classes = F.grid_sample(mask.unsqueeze(1).float(), grid, mode="nearest", padding_mode="border", align_corners=False)
    is_inside = (grid.abs() <= 1).all(dim=-1)
    return moved, torch.where(is_inside, classes.squeeze(1), IGNORED).to(mask.dtype)
