"""STEVE on a folder of videos."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.clips import ClipSamples
from halfstep.data.loader import Batch, Samples
from halfstep.models.steve import Seen, Steve, SteveSize
from halfstep.models.weights import load_weights_, read_weights
from halfstep.workloads.kind import Store
from halfstep.workloads.parts import Group
from halfstep.workloads.scheduled import Scheduled
from halfstep.workloads.slots.clip_data import ClipData, open_clips, unit_pixels
from halfstep.workloads.slots.steve_config import SteveConfig
from halfstep.workloads.slots.steve_loss import SteveMetrics, settled_scale, temperature, total_loss
from halfstep.workloads.slots.steve_pictures import sample_of
from halfstep.workloads.slots.word_draws import word_keys
from halfstep.workloads.workload import Workload

FRAGILE = (
    "dvae.gumbel: logarithms of tiny numbers, and logits divided by a temperature down to 0.1",
    "dvae.words: of 4096 logits many are equal in half formats; the argmax is over fp32",
    "steve_encoder.savi: slots from frame to frame, softmax over slots and its sums over positions",
    "loss.mse: a sum over all pixels passes fp16's largest number",
    "loss.cross_entropy: log of probabilities near 0",
)
THEIR_MASKS = ".self_attn_mask"
"""Of the public project's weights: a triangle for each block, stored as parameters."""


def build(config: SteveConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`."""
    clips = open_clips(config.data)
    workload = _workload(config, clips.train, clips.val, about=clips)
    if store is None and config.model.weights:
        weights, _ = read_weights(Path(config.model.weights))
        own = {name: value for name, value in weights.items() if not name.endswith(THEIR_MASKS)}
        load_weights_(workload.model, own, source=config.model.weights)
    return workload


def over(config: SteveConfig, store: Store, samples: Samples) -> Workload:
    """On samples that are there already."""
    return _workload(config, samples, samples)


def _workload(config: SteveConfig, train: Samples, val: Samples, *, about: ClipData | None = None) -> Workload:
    tau = Scheduled(lambda step: temperature(config.model, step))

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        seen: Seen = model(
            batch["video"],
            tau.value,
            soft_noise=batch["soft_keys"].flatten(0, 1),
            word_noise=batch["word_keys"].flatten(0, 1),
            slot_draw=batch["slot_draw"],
            hard=config.model.hard,
        )
        outputs = {"mse": seen.mse, "cross_entropy": seen.cross_entropy, "masks": seen.attention.flatten(3)}
        outputs["loss"] = total_loss(seen, config.model.loss)
        return outputs if model.training else outputs | {"slots": seen.slots, "reconstruction": seen.reconstruction}

    prepare = Prepared(config)
    return Workload(
        name=config.workload,
        model=model_of(config),
        train_samples=train,
        val_samples=val,
        prepare=prepare,
        forward=forward,
        loss=lambda outputs, batch: (outputs["loss"], len(batch["video"])),
        metrics=SteveMetrics,
        metric="loss",
        mode="min",
        scoring="fg_ari and mbo: attention masks against true masks, where the data has some",
        fragile=FRAGILE,
        groups=(
            Group(modules=("dvae",), lr=config.optimizer.dvae_lr, schedule={"name": "constant", "warmup_steps": 0}),
            Group(modules=("steve_encoder",), lr=config.optimizer.encoder_lr),
        ),
        values={"tau": tau},
        settled=settled_scale(config) if config.model.loss == "sum" else {},
        sample=sample_of(val, prepare, forward) if isinstance(val, ClipSamples) else None,
        notes=about.notes if about else (),
        about=about.about if about else (),
        val_names=about.val_names if about else (),
    )


def model_of(config: SteveConfig) -> Steve:
    m = config.model
    size = SteveSize(
        image_size=config.data.image_size,
        vocabulary=m.vocabulary,
        num_slots=m.slots,
        slot_dim=m.slot_dim,
        num_iterations=m.iterations,
        cnn_channels=m.cnn_channels,
        mlp_dim=m.mlp_dim,
        predictor_blocks=m.predictor_blocks,
        predictor_heads=m.predictor_heads,
        dim=m.dim,
        decoder_blocks=m.decoder_blocks,
        decoder_heads=m.decoder_heads,
        dropout=m.dropout,
    )
    return Steve(size, checkpointing=config.train.activation_checkpointing)


class Prepared:
    """Frames as numbers, and each clip's own draws: keys of both Gumbel draws (models/keyed_noise.py), slots' start."""

    def __init__(self, config: SteveConfig) -> None:
        self.side, self.slots = config.data.image_size, (config.model.slots, config.model.slot_dim)

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        video = batch["video"]
        return batch | {
            "video": unit_pixels(video, self.side, mode="bilinear", antialias=True),
            "slot_draw": noise.normal(key, len(video), self.slots, video.device, stream="slots"),
            **word_keys(video, key),
        }
