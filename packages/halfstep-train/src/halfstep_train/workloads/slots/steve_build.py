"""The workloads of STEVE, and of SlotContrast with STEVE's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.data import noise
from halfstep_train.data.loader import Batch, Samples
from halfstep_train.models.weights import Weights, load_weights_file_
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.scheduled import Scheduled
from halfstep_train.workloads.base.workload import Group, Workload
from halfstep_train.workloads.slots import build as slotcontrast
from halfstep_train.workloads.slots.config import SteveConfig, WordsConfig
from halfstep_train.workloads.slots.data import ClipData, ClipSamples, open_clips, to_unit_pixels
from halfstep_train.workloads.slots.pictures import make_sampler
from halfstep_train.workloads.slots.scores import SteveMetrics, compute_temperature, compute_total_loss, settle_scale
from halfstep_train.workloads.slots.slotcontrast import SlotContrastSize, SlotContrastWords, rename_upstream
from halfstep_train.workloads.slots.steve import Steve, SteveOutputs

FRAGILE_WORDS = (
    "dvae.gumbel: logarithms of tiny numbers, and logits divided by a temperature as low as 0.1",
    "dvae.words: in half formats many logits would be equal, so the argmax uses fp32",
    "loss.mse: a sum over all pixels exceeds fp16's largest number",
)
FRAGILE = (
    *FRAGILE_WORDS,
    "steve_encoder.savi: slots carried from frame to frame, softmax over slots, sums over positions",
    "loss.cross_entropy: log of probabilities near 0",
)
THEIR_MASKS = ".self_attn_mask"
"""Suffix of the causal masks in the public weights, one per block, stored as parameters."""


def build(config: SteveConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    clips = open_clips(config.data)
    workload = _make_workload(config, clips.train, clips.val, about=clips)
    if store is None and config.model.weights:
        load_weights_file_(workload.model, config.model.weights, _drop_masks)
    return workload


def _drop_masks(weights: Weights) -> Weights:
    return {name: value for name, value in weights.items() if not name.endswith(THEIR_MASKS)}


def build_on_samples(config: SteveConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload on given samples."""
    return _make_workload(config, samples, samples)


def _make_workload(config: SteveConfig, train: Samples, val: Samples, *, about: ClipData | None = None) -> Workload:
    """Build the workload on given samples; `about` adds facts and notes about the data."""
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
    return Workload(
        name=config.workload,
        model=build_steve(config),
        train_samples=train,
        val_samples=val,
        prepare=prepare,
        forward=forward,
        loss=lambda outputs, batch: (outputs["loss"], len(batch["video"])),
        metrics=SteveMetrics,
        metric="loss",
        mode="min",
        scoring="fg_ari and mbo: attention masks against true masks, if the data has any",
        fragile=FRAGILE,
        groups=(
            # STEVE's own: the dVAE learns at a constant rate, everything else with warm-up and decay.
            Group(modules=("dvae",), lr=config.optimizer.dvae_lr, schedule={"name": "constant", "warmup_steps": 0}),
            Group(modules=("steve_encoder",), lr=config.optimizer.encoder_lr),
        ),
        values={"tau": tau},
        settled=settle_scale(config) if config.model.loss == "sum" else {},
        sample=make_sampler(val, prepare, forward) if isinstance(val, ClipSamples) else None,
        notes=about.notes if about else (),
        about=about.about if about else (),
        val_names=about.val.list_names() if about else (),
    )


def build_steve(config: SteveConfig) -> Steve:
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
    workload = add_words(slotcontrast.build(config.replace(model={"weights": None}), store), config)
    if store is None and config.model.weights:
        load_weights_file_(workload.model, config.model.weights, rename_upstream)
    return workload


def build_with_words_on_samples(config: WordsConfig, store: Store, samples: Samples) -> Workload:
    """Build the workload of SlotContrast with words on given samples."""
    return add_words(slotcontrast.build_on_samples(config, store, samples), config)


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


def build_words_model(config: WordsConfig, backbone: nn.Module) -> SlotContrastWords:
    """Build the trained modules of SlotContrast with words."""

    def make(size: SlotContrastSize) -> SlotContrastWords:
        recomputes = config.train.activation_checkpointing
        return SlotContrastWords(size, config.model, config.data.image_size, checkpointing=recomputes)

    model = slotcontrast.build_model(config, backbone, make=make)
    assert isinstance(model, SlotContrastWords)
    return model


# Keys are int32, so that the hash in dvae.py stays in 32-bit arithmetic on the device.
KEY_RANGE = 2**31


def draw_word_keys(video: Tensor, key: tuple[int, ...]) -> Batch:
    """Draw the Gumbel keys `soft_keys` and `word_keys`, two int32 per frame of clips (B, T, …)."""

    def draw_keys(stream: str) -> Tensor:
        drawn = noise.integers(key, len(video), KEY_RANGE, video.device, stream=stream, shape=(video.shape[1], 2))
        return drawn.to(torch.int32)

    return {"soft_keys": draw_keys("soft words"), "word_keys": draw_keys("words")}
