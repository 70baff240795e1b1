"""The workload of SlotContrast: slots reconstruct the features of a frozen backbone, and a contrastive loss keeps each
slot on its object over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, format_count
from halfstep_train.config.section import fill_from_settings
from halfstep_train.data.loader import Batch, Samples
from halfstep_train.data.seeds import make_generator
from halfstep_train.models.layers import divide_side
from halfstep_train.models.vit import PATCHES_TILE
from halfstep_train.models.weights import load_weights_file_, read_weights
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.workload import Forward, FrozenPart, Group, Loss, Prepare, Workload
from halfstep_train.workloads.slots.backbones import FilterBank, build_dinov2, load_backbone_weights_
from halfstep_train.workloads.slots.config import DINO_PATCH, SlotContrastConfig
from halfstep_train.workloads.slots.data import ClipData, normalise, open_clips, prepare_masks, to_unit_pixels
from halfstep_train.workloads.slots.pictures import make_sampler
from halfstep_train.workloads.slots.scores import SlotMetrics, slot_contrast
from halfstep_train.workloads.slots.slotcontrast import SlotContrast, SlotContrastSize, rename_upstream

FRAGILE = (
    "slot attention: softmax over slots, renormalised with an epsilon that half formats round away",
    "decoder masks: softmax over slots, sums over positions",
    "loss.contrast: cosines over a temperature of 0.1, cross-entropy",
)
RANDOM = "random"


def build(config: SlotContrastConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    clips = open_clips(config.data)
    backbone = build_backbone(config)
    model = build_model(config, backbone.module)
    if store is None and config.model.weights:  # a resumed run loads its checkpoint later
        load_weights_file_(model, config.model.weights, rename_upstream)
    metric, scoring = _choose_scoring(config, clips.store)
    plain = make_workload(config, model, backbone, clips.train, clips.val, clips.store)
    return replace(
        plain,
        metric=metric,
        mode="min" if metric == "loss" else "max",
        groups=tuple(Group(**group.model_dump()) for group in config.optimizer.groups),
        scoring=scoring,
        by_batch=("validation loss: it depends on the number of slots that each slot is contrasted with",)
        if config.model.contrast_weight
        else (),
        notes=(*_describe_surprises(config, clips), *clips.notes),
        val_names=clips.val.list_names(),
        about=clips.about,
        sample=make_sampler(clips.val, plain.prepare, plain.forward),
    )


def make_workload(
    config: SlotContrastConfig, model: SlotContrast, backbone: FrozenPart, train: Samples, val: Samples, store: Store
) -> Workload:
    """Build the parts of the workload that need no data folder; the metric is the loss."""
    counting = _choose_counting(config, bool(store.get("background_is_labelled", True)))
    return Workload(
        name=config.workload,
        model=model,
        train_samples=train,
        val_samples=val,
        prepare=make_prepare(config),
        forward=make_forward(backbone.module),
        loss=make_loss(config),
        metrics=lambda: SlotMetrics(**counting),
        metric="loss",
        mode="min",
        fragile=FRAGILE,
        frozen={"backbone": backbone},
        store=store,
    )


def build_model(
    config: SlotContrastConfig, backbone: nn.Module, make: Callable[[SlotContrastSize], SlotContrast] = SlotContrast
) -> SlotContrast:
    """Build the trained modules; `make` is the class or function that creates them from their sizes."""
    m = config.model
    patch = m.patch if m.backbone == "filters" else DINO_PATCH
    model = make(
        fill_from_settings(
            SlotContrastSize,
            m,
            feature_dim=backbone.dim,
            num_positions=divide_side(config.data.image_size, patch, PATCHES_TILE) ** 2,
            num_slots=m.slots,
            num_iterations=m.iterations,
        )
    )
    if config.train.activation_checkpointing:
        model.decoder.recompute = "blocks"
    return model


def build_backbone(config: SlotContrastConfig) -> FrozenPart:
    """Build the frozen backbone with its weights; random weights must be requested explicitly."""
    m = config.model
    if m.backbone == "filters":
        return FrozenPart(module=FilterBank(m.patch).requires_grad_(False))
    if m.backbone_weights is None:
        raise ConfigError(
            f"{m.backbone} needs its weights",
            why="halfstep downloads nothing",
            fix="model.backbone_weights=FILE with timm's, the official or Hugging Face's weights, or =random",
        )
    depth, heads, dim = m.backbone_size
    backbone = build_dinov2(m.backbone, depth=depth, heads=heads, dim=dim)
    if m.backbone_weights != RANDOM:
        load_backbone_weights_(backbone, read_weights(Path(m.backbone_weights))[0], source=m.backbone_weights)
    source = "" if m.backbone_weights == RANDOM else m.backbone_weights
    return FrozenPart(module=backbone.requires_grad_(False), source=source)


def _describe_surprises(config: SlotContrastConfig, clips: ClipData) -> list[str]:
    """Return notes about the backbone, the negatives and the masks."""
    m, t, notes = config.model, config.train, []
    if m.backbone == "filters":
        notes.append("the backbone is a small set of fixed colour and edge filters, not DINOv2 (model.backbone)")
    elif m.backbone_weights == RANDOM:
        notes.append("the backbone has RANDOM weights: its features mean nothing (model.backbone_weights)")
    if m.contrast_weight and (t.accumulate > 1 or t.auto_batch):
        notes.append(
            f"slots are contrasted with {t.batch_size * m.slots - 1:,} others of their micro-batch of "
            f"{format_count(t.batch_size, 'clip')}, as upstream does per GPU: accumulation (or train.auto_batch) "
            "changes that number, a larger batch raises it"
        )
    if len(clips.val) and not clips.store["has_masks"]:
        notes.append("not all validation videos have masks: there is no FG-ARI, and the loss selects checkpoints")
    return notes


def make_prepare(config: SlotContrastConfig) -> Prepare:
    """Return the preparation: it converts bytes to the backbone's input."""
    data, m = config.data, config.model

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        pixels = to_unit_pixels(batch["video"], data.image_size, mode="bicubic")  # as upstream
        if m.backbone != "filters":
            pixels = normalise(pixels)
        return batch | {"video": pixels} | prepare_masks(batch, data.image_size)

    return prepare


def make_forward(backbone: nn.Module) -> Forward:
    """Return the forward function: features of the frozen backbone, then the model."""

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        video = batch["video"]
        with torch.no_grad():
            features = backbone(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        return model(features, batch.get("is_real"))

    return forward


def make_loss(config: SlotContrastConfig) -> Loss:
    """Return the loss function: reconstruction and contrast. The weight of a batch is its number of clips."""
    m = config.model

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        total = outputs["error"]
        if m.contrast_weight:
            total = total + m.contrast_weight * slot_contrast(outputs["slots"], batch.get("is_real"))
        return total, len(batch["video"])

    return loss


def _choose_counting(config: SlotContrastConfig, background_is_labelled: bool) -> dict[str, bool]:
    """Return the settings of the metrics; unlabelled pixels never count as background."""
    return {
        "ignore_background": config.model.ignore_background or not background_is_labelled,
        "skip_empty": not background_is_labelled,
    }


def _choose_scoring(config: SlotContrastConfig, found: Mapping[str, Any]) -> tuple[str, str]:
    """Return the main metric, and a description of how scores are computed."""
    if not found["has_masks"]:
        return "loss", "the validation videos have no masks, so the loss is the metric"
    side = config.data.image_size
    ignores, skips = _choose_counting(config, found["background_is_labelled"]).values()
    empty = "are left out of FG-ARI" if skips else "count as 1 in FG-ARI, as upstream (`empty`)"
    return (
        "fg_ari" if ignores else "ari",
        f"slot masks at {side}×{side} pixels; {'fg_ari and mbo leave' if ignores else 'fg_ari leaves'} label 0 out; "
        f"*_image: each frame alone; those without foreground {empty}",
    )


FILE_SIDE = 128
"""Side of MOVi's frames in pixels; they are resized on the device."""


def get_frames_per_clip(config: SlotContrastConfig, store: Store) -> int:
    return config.data.chunk_size


def describe_size(config: SlotContrastConfig) -> str:
    return f"{config.data.chunk_size} frames of {config.data.image_size} pixels"


def make_random_store(config: SlotContrastConfig) -> dict[str, Any]:
    return {"background_is_labelled": True, "has_masks": False}


def make_random_batch(config: SlotContrastConfig, store: Store) -> Batch:
    """Return random bytes in the form in which the loader returns clips."""
    generator, size = make_generator(config.train.seed), config.train.batch_size
    shape = (size, config.data.chunk_size, 3, FILE_SIDE, FILE_SIDE)
    return {
        "video": torch.randint(256, shape, dtype=torch.uint8, generator=generator),
        "index": torch.arange(size),
    }


def build_on_samples(config: SlotContrastConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples. Without a weights file the backbone is random, at the same cost."""
    if config.model.backbone_weights is None:
        config = config.replace(model={"backbone_weights": RANDOM})
    backbone = build_backbone(config)
    return make_workload(config, build_model(config, backbone.module), backbone, samples, samples, store)
