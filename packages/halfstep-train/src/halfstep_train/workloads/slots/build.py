"""The workloads of slot models: SlotContrast, STEVE, and SlotContrast with STEVE's words.

SlotContrast's slots reconstruct the features of a frozen backbone, and a contrastive loss keeps each slot on its object
over time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import ConfigError, format_count
from halfstep_train.data import noise
from halfstep_train.data.loader import Batch, Samples, make_generator
from halfstep_train.models.layers import divide_side
from halfstep_train.models.vit import PATCHES_TILE
from halfstep_train.models.weights import Weights, load_weights_file_, read_weights
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Guiding
from halfstep_train.workloads.base.workload import FrozenPart, Group, OpenedData, Scheduled, Workload
from halfstep_train.workloads.slots.backbones import FilterBank, build_dinov2, load_backbone_weights_
from halfstep_train.workloads.slots.config import DINO_PATCH, SlotContrastConfig, SteveConfig, WordsConfig
from halfstep_train.workloads.slots.data import (
    ClipSamples,
    make_sampler,
    normalise,
    open_clips,
    prepare_masks,
    to_unit_pixels,
)
from halfstep_train.workloads.slots.scores import (
    SlotMetrics,
    SteveMetrics,
    compute_temperature,
    compute_total_loss,
    settle_scale,
    slot_contrast,
)
from halfstep_train.workloads.slots.slot_decoder import (
    SlotContrast,
    SlotContrastWords,
    rename_upstream,
)
from halfstep_train.workloads.slots.steve import Steve, SteveOutputs

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
    plain = make_workload(config, model, backbone, clips)
    contrasted = "validation loss: it depends on the number of slots that each slot is contrasted with"
    return replace(
        plain,
        metric=metric,
        mode="min" if metric == "loss" else "max",
        groups=tuple(Group(**group.model_dump()) for group in config.optimizer.groups),
        scoring=scoring,
        by_batch=(contrasted,) if config.model.contrast_weight else (),
        notes=(*_describe_surprises(config, clips), *clips.notes),
        sample=make_sampler(clips.val, plain.prepare, plain.forward),
    )


def make_workload(config: SlotContrastConfig, model: SlotContrast, backbone: FrozenPart, data: OpenedData) -> Workload:
    """Build the parts of the workload that need no data folder; the metric is the loss."""
    counting = _choose_counting(config, bool(data.store.get("background_is_labelled", True)))
    task = SlotTask(config, backbone.module)
    return Workload(
        name=config.workload,
        model=model,
        prepare=task.prepare,
        forward=task.forward,
        loss=task.compute_loss,
        metrics=lambda: SlotMetrics(**counting),
        metric="loss",
        mode="min",
        fragile=FRAGILE,
        frozen={"backbone": backbone},
        **data.to_fields(),
    )


def build_model(config: SlotContrastConfig, backbone: Any) -> SlotContrast:
    """Build the trained modules."""
    recomputes = config.train.activation_checkpointing
    return SlotContrast(config.model, backbone.dim, _count_positions(config), checkpointing=recomputes)


def _count_positions(config: SlotContrastConfig) -> int:
    """Return the number of patches of a frame."""
    patch = config.model.patch if config.model.backbone == "filters" else DINO_PATCH
    return divide_side(config.data.image_size, patch, PATCHES_TILE) ** 2


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


def _describe_surprises(config: SlotContrastConfig, clips: OpenedData) -> list[str]:
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
            "changes that number, and a larger batch raises it"
        )
    if len(clips.val) and not clips.store["has_masks"]:
        notes.append("not all validation videos have masks: there is no FG-ARI, and the loss selects checkpoints")
    return notes


class SlotTask:
    """The steps of SlotContrast: preparation, forward pass and loss."""

    def __init__(self, config: SlotContrastConfig, backbone: nn.Module) -> None:
        self.side, self.settings, self.backbone = config.data.image_size, config.model, backbone

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Convert bytes to the backbone's input."""
        pixels = to_unit_pixels(batch["video"], self.side, mode="bicubic")  # as upstream
        if self.settings.backbone != "filters":
            pixels = normalise(pixels)
        return batch | {"video": pixels} | prepare_masks(batch, self.side)

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Compute features of the frozen backbone, then run the model."""
        video = batch["video"]
        with torch.no_grad():
            features = self.backbone(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        return model(features, batch.get("is_real"))

    def compute_loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        """Return reconstruction and contrast. The weight of a batch is its number of clips."""
        total, weight = outputs["error"], self.settings.contrast_weight
        if weight:
            total = total + weight * slot_contrast(outputs["slots"], batch.get("is_real"))
        return total, len(batch["video"])


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
    data = OpenedData(train=samples, val=samples, store=store)
    return make_workload(config, build_model(config, backbone.module), backbone, data)


# --- STEVE ---


FRAGILE_WORDS = (
    "dvae.gumbel: logarithms of tiny numbers, and logits divided by a temperature as low as 0.1",
    "dvae.words: in half formats many logits would be equal, so the argmax uses fp32",
    "loss.mse: a sum over all pixels exceeds fp16's largest number",
)
STEVE_FRAGILE = (
    *FRAGILE_WORDS,
    "steve_encoder.savi: slots carried from frame to frame, softmax over slots, sums over positions",
    "loss.cross_entropy: log of probabilities near 0",
)
THEIR_MASKS = ".self_attn_mask"
"""Suffix of the causal masks in the public weights, one per block, stored as parameters."""


def build_steve(config: SteveConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    workload = make_steve_workload(config, replace(open_clips(config.data), store={}))
    if store is None and config.model.weights:
        load_weights_file_(workload.model, config.model.weights, _drop_masks)
    return workload


def _drop_masks(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if not name.endswith(THEIR_MASKS)}


def build_steve_on_samples(config: SteveConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples."""
    return make_steve_workload(config, OpenedData(train=samples, val=samples))


def make_steve_workload(config: SteveConfig, data: OpenedData) -> Workload:
    """Build the workload on opened data."""
    tau = Scheduled(lambda step: compute_temperature(config.model.tau, step))

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found: SteveOutputs = model(
            batch["video"],
            tau.value,
            soft_noise=batch["soft_keys"].flatten(0, 1),
            word_noise=batch["word_keys"].flatten(0, 1),
            slot_draw=batch["slot_draw"],
            hard=config.model.hard,
        )
        outputs = {"mse": found.mse, "cross_entropy": found.cross_entropy, "masks": found.attention.flatten(3)}
        outputs["loss"] = compute_total_loss(found, config.model.loss)
        return outputs if model.training else outputs | {"slots": found.slots, "reconstruction": found.reconstruction}

    prepare = PrepareClips(config)
    settled = settle_scale(config) if config.model.loss == "sum" else {}
    return Workload(
        name=config.workload,
        model=build_steve_model(config),
        prepare=prepare,
        forward=forward,
        loss=lambda outputs, batch: (outputs["loss"], len(batch["video"])),
        metrics=SteveMetrics,
        metric="loss",
        mode="min",
        scoring="fg_ari and mbo: attention masks against true masks, if the data has any",
        fragile=STEVE_FRAGILE,
        groups=(
            # STEVE's own: the dVAE learns at a constant rate, everything else with warm-up and decay.
            Group(modules=("dvae",), lr=config.optimizer.dvae_lr, schedule={"name": "constant", "warmup_steps": 0}),
            Group(modules=("steve_encoder",), lr=config.optimizer.encoder_lr),
        ),
        values={"tau": tau},
        sample=make_sampler(data.val, prepare, forward) if isinstance(data.val, ClipSamples) else None,
        **replace(data, settled=settled).to_fields(),
    )


def build_steve_model(config: SteveConfig) -> Steve:
    return Steve(config.model, config.data.image_size, checkpointing=config.train.activation_checkpointing)


class PrepareClips:
    """Convert frames to floats, and draw the random numbers of each clip: Gumbel keys (dvae.py) and initial slots."""

    def __init__(self, config: SteveConfig) -> None:
        self.side, self.slots = config.data.image_size, (config.model.slots, config.model.slot_dim)

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        video = batch["video"]
        return batch | {
            "video": to_unit_pixels(video, self.side, mode="bilinear", antialias=True),
            "slot_draw": noise.normal(key, len(video), self.slots, video.device, stream="slots"),
            **draw_word_keys(video, key),
        }


# --- SlotContrast with words ---


def build_with_words(config: WordsConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    # Start weights hold the words too: they are loaded below, into the complete model.
    workload = add_words(build(config.replace(model={"weights": None}), store), config)
    if store is None and config.model.weights:
        load_weights_file_(workload.model, config.model.weights, rename_upstream)
    return workload


def build_with_words_on_samples(config: WordsConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload of SlotContrast with words on given samples."""
    return add_words(build_on_samples(config, store, samples), config)


def add_words(plain: Workload, config: WordsConfig) -> Workload:
    """Add the model, random draws and losses of words to SlotContrast's workload."""
    backbone, m = plain.frozen["backbone"].module, config.model
    tau = Scheduled(lambda step: compute_temperature(m.tau, step))

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        return plain.prepare(batch, key=key, training=training) | draw_word_keys(batch["video"], key)

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        assert isinstance(model, SlotContrastWords)
        outputs: dict[str, Tensor] = plain.forward(model, batch)
        return outputs | model.compute_word_losses(
            outputs["slots"],
            batch["video"],
            tau.value,
            soft_noise=batch["soft_keys"].flatten(0, 1),
            word_noise=batch["word_keys"].flatten(0, 1),
            hard=m.hard,
            is_real=batch.get("is_real"),
        )

    def loss(outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor | float]:
        total, weight = plain.compute_loss(outputs, batch)
        # The model sums over the values of a frame (C, H, W), as STEVE does; "mean" divides by their number.
        pixels = batch["video"][0, 0].numel() if m.dvae_loss == "mean" else 1
        total = total + m.dvae_weight / pixels * outputs["mse"]
        if "cross_entropy" in outputs:
            # One word per word_side × word_side pixels.
            words = (config.data.image_size // m.word_side) ** 2 if m.words_loss == "mean" else 1
            total = total + m.words_weight / words * outputs["cross_entropy"]
        return total, weight

    return replace(
        plain,
        model=build_words_model(config, backbone),
        prepare=prepare,
        forward=forward,
        loss=loss,
        values={**plain.values, "tau": tau},
        fragile=(*plain.fragile, *FRAGILE_WORDS),
        settled={**plain.settled, **(settle_scale(config) if m.dvae_loss == "sum" and m.dvae_weight else {})},
    )


def build_words_model(config: WordsConfig, backbone: Any) -> SlotContrastWords:
    """Build the trained modules of SlotContrast with words."""
    side, recomputes = config.data.image_size, config.train.activation_checkpointing
    return SlotContrastWords(config.model, backbone.dim, _count_positions(config), side, checkpointing=recomputes)


# Keys are int32, so that the hash in dvae.py stays in 32-bit arithmetic on the device.
KEY_RANGE = 2**31


def draw_word_keys(video: Tensor, key: tuple[int, ...]) -> Batch:
    """Draw the Gumbel keys `soft_keys` and `word_keys`, two int32 per frame of clips (B, T, …)."""

    def draw_keys(stream: str) -> Tensor:
        drawn = noise.integers(key, len(video), KEY_RANGE, video.device, stream=stream, shape=(video.shape[1], 2))
        return drawn.to(torch.int32)

    return {"soft_keys": draw_keys("soft words"), "word_keys": draw_keys("words")}


# --- halfstep guide ---


class SteveGuide(Guiding):
    """Guide to STEVE, which trains from scratch."""

    small_on_cpu = {
        "data.image_size": 64,
        "model.vocabulary": 512,
        "model.slot_dim": 64,
        "model.cnn_channels": 32,
        "model.dim": 64,
        "model.decoder_blocks": 4,
    }
    remarks: ClassVar[tuple[tuple[str, str], ...]] = ()

    def open(self, config: SteveConfig | SlotContrastConfig) -> OpenedData:
        clips = open_clips(config.data)
        height, width = clips.train.videos[0].size
        form = f"{config.data.chunk_size} frames; the first video has {width}×{height} pixels"
        masks = "masks to score with" if clips.store["has_masks"] else "no masks: only the loss is validated"
        return replace(clips, about=(*clips.about, ("a clip", f"{form}; {masks}")), remarks=self.remarks)

    def draw_sample(self, sample: dict[str, Tensor], index: int, classes: tuple[str, ...]) -> tuple[str, Image.Image]:
        """Draw the middle frame of a clip."""
        frame = sample["video"][len(sample["video"]) // 2]
        return f"clip {index}", Image.fromarray(frame.movedim(0, -1).contiguous().numpy())


class Guide(SteveGuide):
    """Guide to SlotContrast, whose features come from a frozen backbone."""

    small_on_cpu = {
        "data.image_size": 64,
        "model.backbone": "filters",
        "model.patch": 8,
        "model.slot_dim": 32,
        "model.decoder_hidden": (128, 128),
    }
    remarks: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "backbone",
            "a DINOv2 backbone needs model.backbone_weights=FILE when you train (halfstep downloads nothing); "
            "model.backbone=filters needs no file, and is for demos",
        ),
    )
