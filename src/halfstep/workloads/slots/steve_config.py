"""Settings of STEVE; the defaults are the public project's own."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from halfstep.config.schema import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from halfstep.config.section import Fraction, OffCount, OffNumber, Positive, PositiveCount
from halfstep.config.training import OptimizerName, ScheduleName
from halfstep.workloads.slots.video_config import VIDEO_NAMES, VideoDataConfig


class SteveModelConfig(ModelConfig):
    """A discrete VAE, an encoder of slots, a decoder of words."""

    vocabulary: PositiveCount = Field(default=4096, description="Words of the discrete VAE")
    slots: PositiveCount = Field(default=15, description="Slots: objects at most, the background among them")
    slot_dim: PositiveCount = Field(default=192, description="Channels of a slot")
    iterations: PositiveCount = Field(default=2, description="Iterations of slot attention on each frame")
    cnn_channels: PositiveCount = Field(default=64, description="Channels of the encoder's convolutions")
    mlp_dim: PositiveCount = Field(default=192, description="Hidden channels of the slots' perceptron")
    predictor_blocks: OffCount = Field(default=1, description="Transformer blocks from one frame's slots to the next")
    predictor_heads: PositiveCount = Field(default=4, description="Their attention heads")
    dim: PositiveCount = Field(default=192, description="Channels of encoder and decoder")
    decoder_blocks: PositiveCount = Field(default=8, description="Transformer blocks of the decoder")
    decoder_heads: PositiveCount = Field(default=4, description="Their attention heads, which share dim evenly")
    dropout: Fraction = Field(default=0.1, description="Dropout in the decoder")
    hard: bool = Field(
        default=False,
        description="The VAE's decoder sees one word per position; gradients are the mixture's",
    )
    tau_start: Positive = Field(default=1.0, description="Temperature of the mixture at the first step")
    tau_final: Positive = Field(default=0.1, description="Temperature after tau_steps")
    tau_steps: PositiveCount = Field(default=30_000, description="Steps of the cosine between both")
    loss: Literal["sum", "mean"] = Field(
        default="sum", description="Losses of a frame: summed over pixels and words, as published, or averaged"
    )


class SteveOptimizerConfig(OptimizerConfig):
    """Adam with three learning rates."""

    name: OptimizerName = Field(default="adam", description="Which optimizer")
    lr: Positive = Field(default=3e-4, description="Learning rate of the decoder at the top of the schedule")
    encoder_lr: Positive = Field(default=1e-4, description="Learning rate of the slots' encoder, on the same schedule")
    dvae_lr: Positive = Field(default=3e-4, description="Learning rate of the discrete VAE; it is constant")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay, added to the gradient in adam")


class SteveScheduleConfig(ScheduleConfig):
    """Warmup, and a half-life from the first step on."""

    name: ScheduleName = Field(
        default="exponential", description="Shape after the warmup; plateau follows the validation metric"
    )
    warmup_steps: OffCount | None = Field(
        default=30_000, description="Steps of linear warmup; when given it replaces warmup_epochs"
    )
    half_life_steps: PositiveCount = Field(
        default=250_000, description="Steps in which the exponential schedule halves"
    )
    decay_from_start: bool = Field(
        default=True, description="Decay from the first step on, also during the warmup, instead of after it"
    )


class SteveTrainConfig(TrainConfig):
    """As published: 200,000 steps of 24 clips."""

    epochs: PositiveCount = Field(default=500, description="Passes over the training set")
    max_steps: OffCount = Field(
        default=200_000, description="Stop after this many attempted steps, whatever the epochs; 0: no limit"
    )
    batch_size: PositiveCount = Field(default=24, description="Clips of one micro-batch")
    clip_norm: OffNumber = Field(default=0.05, description="Gradients are clipped to this; 0: off")
    clip_type: Literal["l2", "inf", "value"] = Field(
        default="inf", description="What is clipped: the L2 norm, the largest entry's norm, each value"
    )
    early_stopping_patience: OffCount = Field(
        default=0, description="Validations without a better metric before the run ends; 0: off"
    )


DEMO: dict[str, Any] = {
    "data.image_size": 32,
    "data.num_workers": 0,
    "model.vocabulary": 64,
    "model.slots": 6,
    "model.slot_dim": 64,
    "model.cnn_channels": 32,
    "model.mlp_dim": 64,
    "model.dim": 64,
    "model.decoder_blocks": 2,
    "model.tau_steps": 150,
    "train.batch_size": 8,
    "train.epochs": 4,
    "train.max_steps": 0,
    "optimizer.lr": 1e-3,
    "optimizer.encoder_lr": 4e-4,
    "optimizer.dvae_lr": 1e-3,
    "schedule.warmup_steps": 50,
    "schedule.half_life_steps": 2000,
}
"""For clips of 64 pixels on two cores."""


class SteveConfig(RunConfig):
    """One STEVE run."""

    demo: ClassVar[dict[str, Any]] = DEMO
    demo_replaces = VIDEO_NAMES

    data: VideoDataConfig = VideoDataConfig()
    model: SteveModelConfig = SteveModelConfig()
    optimizer: SteveOptimizerConfig = SteveOptimizerConfig()
    schedule: SteveScheduleConfig = SteveScheduleConfig()
    train: SteveTrainConfig = SteveTrainConfig()
