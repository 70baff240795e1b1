"""Settings of the slot models; SlotContrast's defaults and presets are those of its published configs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from halfstep_train.config.schema import (
    BuiltModelConfig,
    DataConfig,
    OptimizerConfig,
    RunConfig,
)
from halfstep_train.config.section import (
    FilePath,
    Fraction,
    OffCount,
    OffNumber,
    Positive,
    PositiveCount,
    Section,
    setting,
)

Backbone = Literal[
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2", "filters"
]  # fmt: skip
DINO_PATCH = 14


VIDEO_NAMES = frozenset({"data.train_shards", "data.val_shards", "data.val_videos"})
"""Settings that refer to the videos of a data folder; they do not apply to the demo data."""


class VideoDataConfig(DataConfig):
    """A folder of videos: tar shards, folders of frames, gif or mp4 files."""

    image_size: PositiveCount = setting(128, "Side of the square frames the model sees, in pixels")
    train_shards: str | tuple[str, ...] = setting(
        "", "Tar shards to train on, below data.dir; {000000..000304} is a range"
    )
    val_shards: str | tuple[str, ...] = setting("", "Tar shards to validate on")
    val_videos: tuple[str, ...] = setting(
        (), "Videos to validate on, by name pattern; empty: the last ones, by val_fraction"
    )
    chunk_size: PositiveCount = setting(3, "Frames per training clip")
    chunks: Literal["one", "all"] = setting(
        "all", "Clips of a video in an epoch: one at random, or all that do not overlap"
    )
    val_chunk_size: OffCount = setting(6, "Frames of a validation clip; shorter for shorter videos; 0: whole videos")
    crop: Literal["none", "central", "random"] = setting(
        "none", "Which square is cropped from frames that are not square; none: they are resized to a square"
    )
    flip: Fraction = setting(0.0, "Probability of a horizontal flip of the clip")


class SlotContrastModelConfig(BuiltModelConfig):
    """A frozen backbone, and a model whose slots reconstruct its features."""

    backbone: Backbone = setting(
        "vit_small_patch14_dinov2",
        "Backbone that computes the features, by its timm name; filters: fixed image filters, for demos",
    )
    backbone_weights: FilePath = setting(
        None, "Local file with the backbone's weights (timm's, official or HF names), or random"
    )
    backbone_size: tuple[OffCount, OffCount, OffCount] = setting(
        (0, 0, 0), "Blocks, attention heads and channels of the backbone; 0: from its name"
    )
    patch: PositiveCount = setting(8, "Side of a patch in pixels, for filters; DINOv2 uses 14")
    slots: PositiveCount = setting(11, "Number of slots: objects that can be separated, background included")
    slot_dim: PositiveCount = setting(64, "Channels of a slot")
    iterations: PositiveCount = setting(2, "Slot-attention iterations per frame, one more in the first frame")
    decoder_hidden: Annotated[tuple[PositiveCount, ...], Field(min_length=1)] = setting(
        (1024, 1024, 1024), "Hidden channels of the decoder"
    )
    contrast_weight: OffNumber = setting(0.5, "Weight of the slot-contrast loss between frames; 0: off")
    ignore_background: bool = setting(
        True, "Report FG-ARI, and mBO without label 0; false: count the background as an object"
    )


class GroupConfig(Section):
    """Modules with separate optimizer settings; a setting that is left out is that of the whole model."""

    modules: tuple[Literal["initializer", "encoder", "processor", "decoder"], ...] = Field(min_length=1)
    lr: Positive | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    schedule: dict[str, JsonValue] = Field(default_factory=dict)


class SlotOptimizerConfig(OptimizerConfig):
    """Optimizer settings, with optional groups of modules that differ."""

    groups: tuple[GroupConfig, ...] = setting(
        (), "Optimizer settings for single modules: [{modules: [encoder], lr: 1e-4}]"
    )


MOVI_E: dict[str, Any] = {
    "model.backbone": "vit_base_patch14_dinov2",
    "model.slots": 15,
    "model.slot_dim": 128,
    "train.max_steps": 300_000,
    "train.val_batch_size": 4,
    "schedule.half_life_steps": 297_500,
}
YTVIS: dict[str, Any] = {
    "data.image_size": 518,
    "data.crop": "random",
    "data.flip": 0.0,
    "model.backbone": "vit_base_patch14_dinov2",
    "model.slots": 7,
    "model.ignore_background": False,
    "optimizer.lr": 8e-4,
    "train.val_batch_size": 1,
}


class SlotContrastConfig(RunConfig):
    """One SlotContrast run; the defaults are MOVi-C's."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {**RunConfig.presets, "movi_c": {}, "movi_e": MOVI_E, "ytvis": YTVIS}

    # 96 small clips: about four minutes of CPU time.
    demo: ClassVar[dict[str, Any]] = {
        "data.image_size": 64,
        "data.num_workers": 0,
        "data.flip": 0.0,  # the ground is the same in all clips, so the model learns it by position
        "model.backbone": "filters",
        "model.slots": 6,
        "model.slot_dim": 32,
        "model.decoder_hidden": [64, 64],
        "model.contrast_weight": 0.2,
        "optimizer.lr": 4e-3,
        "schedule.warmup_steps": 50,
        "schedule.half_life_steps": 750,
        "train.clip_norm": 1.0,
        "train.batch_size": 8,
        "train.max_steps": 1500,
        "train.validate_every_steps": 250,
    }
    demo_replaces = VIDEO_NAMES

    data: VideoDataConfig = VideoDataConfig()
    model: SlotContrastModelConfig = SlotContrastModelConfig()
    optimizer: SlotOptimizerConfig = SlotOptimizerConfig()
    # Adam without weight decay, and strong clipping; after the warmup the learning rate halves until the last step.
    defaults: ClassVar[dict[str, Any]] = {
        "data.image_size": 336,
        "data.chunk_size": 4,
        "data.chunks": "one",
        "data.val_chunk_size": 0,
        "data.flip": 0.5,
        "optimizer.name": "adam",
        "optimizer.lr": 4e-4,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "exponential",
        "schedule.warmup_steps": 2500,
        "schedule.half_life_steps": 97_500,
        "train.epochs": 100_000,
        "train.max_steps": 100_000,
        "train.batch_size": 64,
        "train.val_batch_size": 16,
        "train.clip_norm": 0.05,
        "train.early_stopping_patience": 0,
        "train.validate_every_steps": 2500,
    }

    @model_validator(mode="after")
    def check_chunk_size(self) -> Self:
        if self.model.contrast_weight and self.data.chunk_size < 2:
            raise ValueError(
                "data.chunk_size=1 has no second frame to contrast with: set 2 or more, or contrast_weight=0"
            )
        return self


Reduction = Literal["sum", "mean"]


class DVaeModelConfig(BuiltModelConfig):
    """Settings of a discrete VAE whose words are predicted from slots."""

    vocabulary: PositiveCount = setting(4096, "Vocabulary size of the discrete VAE")
    hard: bool = setting(
        False, "Straight-through: the VAE's decoder sees one token per position; gradients follow the soft mixture"
    )
    tau: tuple[Positive, Positive, PositiveCount] = setting(
        (1.0, 0.1, 30_000), "Gumbel-softmax temperature: first, last, and the steps of the cosine decay between them"
    )


class SteveModelConfig(DVaeModelConfig):
    """A discrete VAE, an encoder of slots, and a decoder of words."""

    slots: PositiveCount = setting(15, "Number of slots: at most this many objects, background included")
    slot_dim: PositiveCount = setting(192, "Channels of a slot")
    iterations: PositiveCount = setting(2, "Iterations of slot attention on each frame")
    cnn_channels: PositiveCount = setting(64, "Channels of the encoder's convolutions")
    dim: PositiveCount = setting(192, "Channels of encoder and decoder")
    decoder_blocks: PositiveCount = setting(8, "Transformer blocks of the decoder")
    dropout: Fraction = setting(0.1, "Dropout in the decoder")
    loss: Reduction = setting("sum", "Reduction of a frame's losses: sum over pixels and tokens, as published, or mean")


class SteveOptimizerConfig(OptimizerConfig):
    """Three learning rates; `lr` is the decoder's."""

    encoder_lr: Positive = setting(1e-4, "Learning rate of the slot encoder, with the same schedule")
    dvae_lr: Positive = setting(3e-4, "Learning rate of the discrete VAE (constant)")


DEMO: dict[str, Any] = {
    "data.image_size": 32,
    "data.num_workers": 0,
    "model.vocabulary": 64,
    "model.slots": 6,
    "model.slot_dim": 64,
    "model.cnn_channels": 32,
    "model.dim": 64,
    "model.decoder_blocks": 2,
    "model.tau": (1.0, 0.1, 150),
    "train.batch_size": 8,
    "train.epochs": 4,
    "train.max_steps": 0,
    "optimizer.lr": 1e-3,
    "optimizer.encoder_lr": 4e-4,
    "optimizer.dvae_lr": 1e-3,
    "schedule.warmup_steps": 50,
    "schedule.half_life_steps": 2000,
}
"""Sized for clips of 64 pixels and a CPU with two cores."""


class SteveConfig(RunConfig):
    """One STEVE run."""

    demo: ClassVar[dict[str, Any]] = DEMO
    demo_replaces = VIDEO_NAMES

    data: VideoDataConfig = VideoDataConfig()
    model: SteveModelConfig = SteveModelConfig()
    optimizer: SteveOptimizerConfig = SteveOptimizerConfig()
    # As published: Adam, 200,000 steps of 24 clips, and exponential decay that starts with the warmup, at step 0.
    defaults: ClassVar[dict[str, Any]] = {
        "optimizer.name": "adam",
        "optimizer.lr": 3e-4,
        "optimizer.weight_decay": 0.0,
        "schedule.name": "exponential",
        "schedule.warmup_steps": 30_000,
        "schedule.half_life_steps": 250_000,
        "schedule.decay_from_start": True,
        "train.epochs": 500,
        "train.max_steps": 200_000,
        "train.batch_size": 24,
        "train.clip_norm": 0.05,
        "train.clip_type": "inf",
        "train.early_stopping_patience": 0,
    }


class WordsModelConfig(DVaeModelConfig, SlotContrastModelConfig):
    """SlotContrast whose slots also predict words of a discrete VAE."""

    word_side: Literal[4, 14] = setting(14, "Side of a token's patch in pixels; 14: one token per backbone patch")
    words_blocks: OffCount = setting(4, "Blocks of the token decoder; 0: train the VAE only")
    words_dim: PositiveCount = setting(128, "Channels of the token decoder")
    words_dropout: Fraction = setting(0.1, "Dropout in the token decoder")
    dvae_weight: OffNumber = setting(0.5, "Weight of the VAE's squared error")
    dvae_loss: Reduction = setting("sum", "Reduction of a frame's squared error: sum or mean over pixels")
    dvae_checkpointing: bool = setting(False, "Recompute the VAE's decoder in backward: less memory, more time")
    words_weight: OffNumber = setting(1.0, "Weight of the tokens' cross-entropy")
    words_loss: Reduction = setting("mean", "Reduction of a frame's cross-entropy: sum or mean over tokens")


class WordsConfig(SlotContrastConfig):
    """One run of SlotContrast with words."""

    demo: ClassVar[dict[str, Any]] = {
        **SlotContrastConfig.demo,
        "model.word_side": 4,
        "model.vocabulary": 64,
        "model.words_blocks": 2,
        "model.words_dim": 64,
        "model.tau": (1.0, 0.1, 150),
        "model.dvae_loss": "mean",
        "train.max_steps": 200,
    }

    model: WordsModelConfig = WordsModelConfig()
    defaults: ClassVar[dict[str, Any]] = {"model.hard": True, "model.tau": (1.0, 0.1, 10_000)}
