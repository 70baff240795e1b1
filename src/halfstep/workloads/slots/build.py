"""SlotContrast as a workload: clips in, slots that paint a frozen backbone's features, and slots told apart in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.loader import Batch
from halfstep.errors import ConfigError, DataError, counted
from halfstep.models.dinov2 import dinov2, load_backbone_
from halfstep.models.filter_bank import FilterBank
from halfstep.models.slotcontrast import SlotContrast, SlotContrastSize, from_upstream
from halfstep.models.weights import load_weights_, read_weights
from halfstep.workloads.parts import FrozenPart, Group
from halfstep.workloads.slots.clip_data import open_clips, unit_pixels
from halfstep.workloads.slots.config import DINO_PATCH, SlotContrastConfig
from halfstep.workloads.slots.data import normalised, notes_on, prepared_masks
from halfstep.workloads.slots.losses import slot_contrast
from halfstep.workloads.slots.metrics import SlotMetrics
from halfstep.workloads.slots.pictures import sample_pictures
from halfstep.workloads.workload import Forward, Loss, Prepare, Workload

FRAGILE = (
    "slot attention: softmax over slots, renormalised with an epsilon that half formats round away",
    "decoder masks: softmax over slots, sums over positions",
    "loss.contrast: cosines over a temperature of 0.1, cross-entropy",
)
RANDOM = "random"


def build(config: SlotContrastConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`."""
    if config.data.dir is None:
        raise DataError("no data folder", why="videos are read from data.dir", fix="--data-dir DIR")
    clips = open_clips(config.data)
    found = {"background_is_labelled": clips.val.videos.labels_background, "has_masks": clips.has_masks}
    backbone = build_backbone(config)
    model = build_model(config, backbone.module)
    if store is None and config.model.weights:  # a stored run's checkpoint brings its own
        weights, _ = read_weights(Path(config.model.weights))
        load_weights_(model, from_upstream(weights), source=config.model.weights)
    forward = forward_of(backbone.module)
    prepare = prepare_of(config)
    metric, scoring = _scoring(config, found)
    return Workload(
        name=config.workload,
        model=model,
        train_samples=clips.train,
        val_samples=clips.val,
        prepare=prepare,
        forward=forward,
        loss=loss_of(config),
        metrics=lambda: metrics_of(config, found),
        metric=metric,
        mode="min" if metric == "loss" else "max",
        fragile=FRAGILE,
        frozen={"backbone": backbone},
        groups=tuple(Group(**group.model_dump()) for group in config.optimizer.groups),
        scoring=scoring,
        by_batch=("in validation, the slots that a slot is told from",) if config.model.contrast_weight else (),
        store=found,
        notes=(*_said_aloud(config), *_negatives(config), *notes_on(config.data, clips), *clips.notes),
        val_names=clips.val_names,
        about=clips.about,
        sample=sample_pictures(clips.val, prepare, forward),
    )


def build_model(
    config: SlotContrastConfig, backbone: nn.Module, make: Callable[[SlotContrastSize], SlotContrast] = SlotContrast
) -> SlotContrast:
    """What trains."""
    m = config.model
    model = make(
        SlotContrastSize(
            feature_dim=feature_dim(backbone),
            num_positions=(config.data.image_size // patch_of(config)) ** 2,
            num_slots=m.slots,
            slot_dim=m.slot_dim,
            decoder_hidden=m.decoder_hidden,
            num_iterations=m.iterations,
            first_iterations=m.first_iterations,
            slot_mlp=m.slot_mlp,
            predictor_blocks=m.predictor_blocks,
            predictor_heads=m.predictor_heads,
            initial_slots=m.initial_slots,
        )
    )
    model.decoder.chunk = m.decoder_chunk
    if config.train.activation_checkpointing:
        model.decoder.recompute = "blocks"
    return model


def feature_dim(backbone: nn.Module) -> int:
    dim = backbone.dim
    assert isinstance(dim, int)
    return dim


def patch_of(config: SlotContrastConfig) -> int:
    """Side of a patch; images that it does not tile are refused."""
    patch = config.model.patch if config.model.backbone == "filters" else DINO_PATCH
    side = config.data.image_size
    if side % patch:
        raise ConfigError(
            f"data.image_size={side} is not a multiple of the backbone's patches of {patch} pixels",
            fix=f"data.image_size={max(1, round(side / patch)) * patch}",
        )
    return patch


def build_backbone(config: SlotContrastConfig) -> FrozenPart:
    """The frozen backbone with its weights; that it has none is said aloud, and has to be asked for."""
    m = config.model
    if m.backbone == "filters":
        return FrozenPart(module=FilterBank(m.patch).requires_grad_(False))
    if m.backbone_weights is None:
        raise ConfigError(
            f"{m.backbone} needs its weights",
            why="halfstep downloads nothing",
            fix="model.backbone_weights=FILE with timm's, the official or Hugging Face's weights, or =random",
        )
    backbone = dinov2(m.backbone, depth=m.backbone_depth, heads=m.backbone_heads, dim=m.backbone_dim)
    if m.backbone_weights != RANDOM:
        load_backbone_(backbone, m.backbone_weights)
    source = "" if m.backbone_weights == RANDOM else m.backbone_weights
    return FrozenPart(module=backbone.requires_grad_(False), source=source)


def _said_aloud(config: SlotContrastConfig) -> tuple[str, ...]:
    if config.model.backbone == "filters":
        return ("the backbone is a small one of our own: fixed colour and edge filters, not DINOv2 (model.backbone)",)
    if config.model.backbone_weights == RANDOM:
        return ("the backbone has RANDOM weights: its features mean nothing (model.backbone_weights)",)
    return ()


def _negatives(config: SlotContrastConfig) -> tuple[str, ...]:
    """A micro-batch decides how many slots a slot is told from, so accumulation is not the same as a larger batch."""
    t = config.train
    if not config.model.contrast_weight or not config.model.contrast_batch or (t.accumulate == 1 and not t.auto_batch):
        return ()
    others = t.batch_size * config.model.slots - 1
    return (
        f"slots are told from the {others:,} others of their micro-batch of {counted(t.batch_size, 'clip')}, as "
        "upstream does for each GPU: accumulation (or train.auto_batch) changes that number, a larger batch raises it",
    )


def prepare_of(config: SlotContrastConfig) -> Prepare:
    """From loaded bytes to what the backbone sees, and the draw that random slots start from."""
    data, m = config.data, config.model

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        pixels = unit_pixels(batch["video"], data.image_size, mode="bicubic")  # as upstream
        if m.backbone != "filters":
            pixels = normalised(pixels, data.normalise)
        prepared = batch | {"video": pixels} | prepared_masks(batch, data)
        if m.initial_slots == "random":
            prepared["draw"] = noise.normal(key, len(pixels), (m.slots, m.slot_dim), pixels.device, stream="slots")
        return prepared

    return prepare


def forward_of(backbone: nn.Module) -> Forward:
    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        video = batch["video"]
        with torch.no_grad():
            features = backbone(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        outputs: dict[str, Tensor] = model(features, batch.get("draw"), batch.get("is_real"))
        return outputs

    return forward


def loss_of(config: SlotContrastConfig) -> Loss:
    """Reconstruction and contrast; the weight of a batch is its clips."""
    m = config.model

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        total = m.feature_weight * outputs["error"]
        if m.contrast_weight:
            contrast = slot_contrast(
                outputs["slots"], temperature=m.temperature, across_batch=m.contrast_batch, is_real=batch.get("is_real")
            )
            total = total + m.contrast_weight * contrast
        return total, len(batch["video"])

    return loss


def metrics_of(config: SlotContrastConfig, store: Mapping[str, Any]) -> SlotMetrics:
    """Pixels that nobody labelled are not background to find, whatever the config says."""
    labelled = bool(store.get("background_is_labelled", True))
    ignores = config.model.ignore_background or not labelled
    return SlotMetrics(ignore_background=ignores, skip_empty=config.model.skip_empty or not labelled)


def _scoring(config: SlotContrastConfig, found: Mapping[str, Any]) -> tuple[str, str]:
    if not found["has_masks"]:
        return "loss", "the validation videos have no masks, so the loss alone is watched"
    side = config.data.mask_size or config.data.image_size
    ignores = config.model.ignore_background or not found["background_is_labelled"]
    empty = "are left out of FG-ARI" if config.model.skip_empty else "count as 1 in FG-ARI, as upstream (`empty`)"
    return (
        "fg_ari" if ignores else "ari",
        f"slot masks at {side}×{side} pixels; {'fg_ari and mbo leave' if ignores else 'fg_ari leaves'} label 0 out; "
        f"*_image: each frame alone; those without foreground {empty}",
    )
