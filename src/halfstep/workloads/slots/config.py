"""Settings of the slot models; SlotContrast's defaults and presets are those of its published configs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from halfstep.config.schema import ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from halfstep.config.section import Fraction, OffCount, OffNumber, Positive, PositiveCount, Section
from halfstep.config.training import OptimizerName, ScheduleName
from halfstep.workloads.slots.video_config import VIDEO_NAMES, VideoDataConfig

Backbone = Literal[
    "vit_small_patch14_dinov2", "vit_base_patch14_dinov2", "vit_large_patch14_dinov2", "filters"
]  # fmt: skip
DINO_PATCH = 14


class SlotVideoConfig(VideoDataConfig):
    """MOVi's, as upstream reads it."""

    image_size: PositiveCount = Field(default=336, description="Side of the square frames the model sees, in pixels")
    chunk_size: PositiveCount = Field(default=4, description="Frames of a training clip")
    chunks: Literal["one", "all"] = Field(
        default="one", description="Clips of a video in an epoch: one at random, or all that do not overlap"
    )
    val_chunk_size: OffCount = Field(
        default=0, description="Frames of a validation clip; longer than a video: its length. 0: whole videos"
    )
    val_size: OffCount = Field(default=0, description="How many validation clips there should be; 0: as there are")
    flip: Fraction = Field(default=0.5, description="Chance of a mirrored clip")
    mask_size: OffCount = Field(default=0, description="Side at which masks are compared; 0: image_size")
    normalise: Literal["imagenet", "half"] = Field(
        default="imagenet", description="Mean and deviation of the colours: ImageNet's, or 0.5 and 0.5"
    )


class SlotContrastModelConfig(ModelConfig):
    """A frozen backbone, and slots that paint its features."""

    backbone: Backbone = Field(
        default="vit_small_patch14_dinov2",
        description="Where features come from, by timm's name; filters: fixed filters of our own, for demos",
    )
    backbone_weights: str | None = Field(
        default=None, description="Local file with the backbone's weights (timm's, official or HF names), or random"
    )
    backbone_depth: OffCount = Field(default=0, description="Blocks of the backbone; 0: as the name says")
    backbone_heads: OffCount = Field(default=0, description="Its attention heads; 0: as the name says")
    backbone_dim: OffCount = Field(default=0, description="Its channels; 0: as the name says")
    patch: PositiveCount = Field(default=8, description="Side of a patch in pixels for filters; DINOv2 has 14")
    slots: PositiveCount = Field(default=11, description="Slots: objects that can be told apart, ground included")
    slot_dim: PositiveCount = Field(default=64, description="Channels of a slot")
    initial_slots: Literal["learned", "random"] = Field(
        default="learned", description="Where the first frame starts: learned slots, or a draw for each clip"
    )
    iterations: PositiveCount = Field(default=2, description="Iterations of slot attention in a frame")
    first_iterations: PositiveCount = Field(default=3, description="The same in the first frame")
    slot_mlp: bool = Field(default=True, description="A perceptron after each iteration")
    predictor_blocks: OffCount = Field(default=1, description="Transformer blocks from one frame's slots to the next")
    predictor_heads: PositiveCount = Field(default=4, description="Their attention heads")
    decoder_hidden: Annotated[tuple[PositiveCount, ...], Field(min_length=1)] = Field(
        default=(1024, 1024, 1024), description="Hidden channels of the decoder"
    )
    decoder_chunk: OffCount = Field(
        default=0, description="Frames that are decoded at a time; 0: as many as train.memory allows"
    )
    feature_weight: OffNumber = Field(default=1.0, description="Weight of the features' reconstruction")
    contrast_weight: OffNumber = Field(default=0.5, description="Weight of the contrast between frames; 0: off")
    temperature: Positive = Field(default=0.1, description="Temperature of the contrast")
    contrast_batch: bool = Field(
        default=True, description="Slots of all clips of a micro-batch are told apart; false: of each clip alone"
    )
    ignore_background: bool = Field(
        default=True, description="The metric is FG-ARI, and mBO without label 0; false: background is an object"
    )
    skip_empty: bool = Field(
        default=False, description="Leave clips and frames without foreground out of FG-ARI, where they count as 1"
    )

    @model_validator(mode="after")
    def builds_its_own_model(self) -> Self:
        if self.path or self.options:
            raise ValueError(
                "slotcontrast builds its own model; one of your own is a workload: halfstep train my_pkg.my_mod:build"
            )
        return self


class GroupConfig(Section):
    """Modules of the model that learn by settings of their own; what is not said is as for all."""

    modules: tuple[Literal["initializer", "encoder", "processor", "decoder"], ...] = Field(min_length=1)
    lr: Positive | None = None
    weight_decay: float | None = Field(default=None, ge=0)
    schedule: dict[str, JsonValue] = Field(default_factory=dict)


class SlotOptimizerConfig(OptimizerConfig):
    """Adam without decay, as upstream."""

    name: OptimizerName = Field(default="adam", description="Which optimizer")
    lr: Positive = Field(default=4e-4, description="Learning rate at the top of the schedule")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay; decoupled in adamw, added to the gradient in sgd"
    )
    groups: tuple[GroupConfig, ...] = Field(
        default=(), description="Modules with settings of their own: [{modules: [encoder], lr: 1e-4}]"
    )


class SlotScheduleConfig(ScheduleConfig):
    """Warmup, then half the rate at the end of the run."""

    name: ScheduleName = Field(
        default="exponential", description="Shape after the warmup; plateau follows the validation metric"
    )
    warmup_steps: OffCount | None = Field(
        default=2500, description="Steps of linear warmup; when given it replaces warmup_epochs"
    )
    half_life_steps: PositiveCount = Field(default=97_500, description="Steps in which the exponential schedule halves")


class SlotTrainConfig(TrainConfig):
    """By steps, clipped hard; a run is best near its end."""

    epochs: PositiveCount = Field(default=100_000, description="Passes over the training set")
    max_steps: OffCount = Field(
        default=100_000, description="Stop after this many attempted steps, whatever the epochs; 0: no limit"
    )
    batch_size: PositiveCount = Field(default=64, description="Samples of one micro-batch")
    val_batch_size: OffCount = Field(
        default=16, description="Samples of a batch in validation; 0: as in training. Clips are longer there"
    )
    clip_norm: OffNumber = Field(default=0.05, description="Gradients are clipped to this; 0: off")
    early_stopping_patience: OffCount = Field(
        default=0, description="Validations without a better metric before the run ends; 0: off"
    )
    validate_every_steps: OffCount = Field(
        default=2500, description="Attempted steps between two validations; 0: by epochs, validate_every"
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
        "data.chunk_size": 4,
        "data.flip": 0.0,  # the ground is learned by place
        "model.backbone": "filters",
        "model.patch": 8,
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

    data: SlotVideoConfig = SlotVideoConfig()
    model: SlotContrastModelConfig = SlotContrastModelConfig()
    optimizer: SlotOptimizerConfig = SlotOptimizerConfig()
    schedule: SlotScheduleConfig = SlotScheduleConfig()
    train: SlotTrainConfig = SlotTrainConfig()

    @model_validator(mode="after")
    def frames_for_contrast(self) -> Self:
        if self.model.contrast_weight and self.data.chunk_size < 2:
            raise ValueError("data.chunk_size=1 has no second frame to contrast with: 2 or more, or contrast_weight=0")
        return self
