"""Settings of both RadioDiff stages. Defaults are those of the public configs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from halfstep.config.schema import (
    BuiltModelConfig,
    DataConfig,
    LatentCaching,
    RunConfig,
)
from halfstep.config.section import FilePath, Fraction, NamedPath, OffCount, Positive, PositiveCount, Section

Counts = tuple[PositiveCount, ...]
Window = tuple[PositiveCount, PositiveCount]
WINDOWS: tuple[Window, ...] = ((8, 8), (4, 4), (2, 2), (1, 1))


class RadioDataConfig(DataConfig):
    """The RadioMapSeer folder."""

    image_size: PositiveCount = Field(default=256, description="Side of the square maps the model sees, in pixels")
    simulation: Literal["DPM", "IRT2", "IRT4"] = Field(default="DPM", description="Which of the simulated gains")
    cars: bool = Field(default=False, description="Gains simulated with cars, and the cars as third input")
    missing_buildings: int = Field(
        default=0, ge=0, le=4, description="Buildings missing in the input; a version is drawn for each sample"
    )
    split: Literal["radiounet", "radiodiff"] = Field(
        default="radiounet", description="Whose maps train and validate; RadioDiff's own has a map in all parts"
    )
    val_maps: tuple[int, ...] = Field(
        default=(), description="Numbers of the validation maps; all others train, but test_maps. Replaces split"
    )
    test_maps: tuple[int, ...] = Field(default=(), description="Numbers of the test maps, beside val_maps")
    max_transmitters: OffCount = Field(default=0, description="Transmitters of each map that count; 0: all there are")
    threshold: float = Field(
        default=0.0, ge=0, lt=1, description="Gains below it are 0, the rest is stretched; RadioUNet has 0.2"
    )

    @model_validator(mode="after")
    def maps_are_split_by_number(self) -> Self:
        if self.test_maps and not self.val_maps:
            raise ValueError("data.test_maps would be passed over without data.val_maps: data.split says who tests")
        if self.val_fraction != DataConfig.model_fields["val_fraction"].default:
            raise ValueError(
                f"data.val_fraction={self.val_fraction:g} would be passed over: radio maps are split by their numbers "
                "(data.split, or data.val_maps=[...])"
            )
        return self


class RadioDiffDataConfig(RadioDataConfig):
    """The RadioMapSeer folder, with an optional cache of latents on disk."""

    cache: LatentCaching = Field(
        default="off", description="latents: encode every training map once, not in every step"
    )
    cache_file: NamedPath = Field(default=None, description="Where latents are; default: in data.dir")


class FirstStageConfig(Section):
    """Sizes of the autoencoder."""

    width: PositiveCount = Field(default=128, description="Channels of the first level")
    multipliers: Counts = Field(default=(1, 2, 4), description="Channels of each level, in widths; all but one halve")
    num_blocks: PositiveCount = Field(default=2, description="Residual blocks of each level")
    z_channels: PositiveCount = Field(default=3, description="Channels between encoder and decoder")
    latent_channels: PositiveCount = Field(default=3, description="Channels of the latent")
    dropout: Fraction = Field(default=0.0, description="Dropout in residual blocks")


class DiscriminatorConfig(Section):
    """The discriminator of stage 1."""

    enabled: bool = Field(default=True, description="Train a PatchGAN discriminator beside the autoencoder")
    start: OffCount = Field(default=50_001, description="Step from which on it trains and counts")
    weight: float = Field(default=0.5, ge=0, description="How much it counts, times the adaptive weight")
    channels: PositiveCount = Field(default=64, description="Channels of its first layer")
    num_halvings: PositiveCount = Field(default=3, description="How often it halves the map: how large its patches are")


class RadioVaeModelConfig(BuiltModelConfig):
    """The autoencoder and its loss."""

    first_stage: FirstStageConfig = FirstStageConfig()
    kl_weight: float = Field(default=1e-6, ge=0, description="Weight of the KL term, which is summed over the latent")
    discriminator: DiscriminatorConfig = DiscriminatorConfig()


class PyramidConfig(Section):
    """The Swin transformer that encodes buildings and antenna; defaults are Swin-B's."""

    width: PositiveCount = Field(default=128, description="Channels of its first stage; each stage doubles them")
    depths: Counts = Field(default=(2, 2, 18, 2), description="Blocks of each stage; as many as the U-Net has levels")
    num_heads: Counts = Field(default=(4, 8, 16, 32), description="Attention heads of each stage")
    window: PositiveCount = Field(default=7, description="Side of the attention windows")
    stochastic_depth: float = Field(default=0.5, ge=0, lt=1, description="Chance that the last block is left out")
    weights: FilePath = Field(default=None, description="File with torchvision's swin weights to start from")


class RadioDiffModelConfig(BuiltModelConfig):
    """The denoiser and its sampler."""

    vae: FilePath = Field(
        default=None, description="First stage: a radiodiff_vae run, or a file with weights (then see first_stage)"
    )
    first_stage: FirstStageConfig = FirstStageConfig()
    scale_factor: Literal["auto"] | Positive = Field(
        default="auto", description="Latents are multiplied by it; auto: 1 / their standard deviation. Public: 0.3"
    )
    width: PositiveCount = Field(default=128, description="Channels of the U-Net's first level, a multiple of 8")
    multipliers: Counts = Field(default=(1, 2, 4, 4), description="Channels of each level, in widths")
    windows: tuple[Window, ...] = Field(
        default=WINDOWS, description="Attention windows of the condition, level by level"
    )
    feature_windows: tuple[Window, ...] = Field(default=WINDOWS, description="The same of the U-Net's own maps")
    fourier_scale: Positive = Field(default=16.0, description="Spread of the time embedding's frequencies")
    dropout: Fraction = Field(default=0.1, description="Dropout of the condition's attention")
    pyramid: PyramidConfig = PyramidConfig()
    weighted_loss: bool = Field(default=True, description="Weigh errors of C and noise by time")
    l1: bool = Field(default=True, description="Half of the loss is absolute errors, else squared ones alone")
    smallest_time: float = Field(default=1e-4, gt=0, lt=1, description="Training times lie between it and 1")
    sampling_steps: int = Field(default=1, ge=1, le=1000, description="Steps of a sample, in validation and use")
    extra_call: bool = Field(
        default=True, description="N steps take N + 1 calls of the network, as the public sampler does; false: N"
    )

    @model_validator(mode="after")
    def levels_agree(self) -> Self:
        levels = len(self.multipliers)
        for name, given in (
            ("windows", self.windows),
            ("feature_windows", self.feature_windows),
            ("pyramid.depths", self.pyramid.depths),
            ("pyramid.num_heads", self.pyramid.num_heads),
        ):
            if len(given) != levels:
                raise ValueError(f"{name} has {len(given)} entries, multipliers has {levels}: one for each level")
        if self.width % 8:
            raise ValueError(f"width={self.width}: a multiple of 8 is needed, for eight groups and heads")
        return self


RADIO: dict[str, Any] = {
    "optimizer.lr": 5e-5,
    "optimizer.weight_decay": 1e-4,
    "optimizer.decay_norms_and_biases": True,
    "schedule.name": "polynomial",
    "schedule.power": 0.96,
    "train.early_stopping_patience": 0,
    "ema.enabled": True,
    "ema.decay": 0.999,
}
"""AdamW on everything, and a rate of (1 - step / steps) ^ 0.96."""
SMALL_DATA: dict[str, Any] = {"data.image_size": 16, "data.num_workers": 0}
SMALL_FIRST_STAGE: dict[str, Any] = {
    "model.first_stage.width": 16,
    "model.first_stage.multipliers": (1, 2),
    "model.first_stage.num_blocks": 1,
    "model.first_stage.z_channels": 4,
    "model.first_stage.latent_channels": 4,
}


class RadioVaeConfig(RunConfig):
    """The config of a stage 1 run."""

    demo: ClassVar[dict[str, Any]] = {
        **SMALL_DATA,
        **SMALL_FIRST_STAGE,
        "model.discriminator.enabled": False,
        "optimizer.lr": 4e-3,
        "train.batch_size": 8,
        "train.epochs": 3,
    }

    data: RadioDataConfig = RadioDataConfig()
    model: RadioVaeModelConfig = RadioVaeModelConfig()
    # Gradients of a sum over pixels are large as they are: at the published size they overflow even unscaled.
    defaults: ClassVar[dict[str, Any]] = {
        **RADIO, "optimizer.lr": 5e-6, "scaler.init_scale": 16.0, "scaler.min_scale": 2.0**-10,
    }  # fmt: skip


class RadioDiffConfig(RunConfig):
    """The config of a stage 2 run."""

    demo: ClassVar[dict[str, Any]] = {
        **SMALL_DATA,
        **SMALL_FIRST_STAGE,
        "model.width": 16,
        "model.multipliers": (1,),
        "model.windows": ((2, 2),),
        "model.feature_windows": ((2, 2),),
        "model.fourier_scale": 1.0,
        "model.pyramid.width": 32,
        "model.pyramid.depths": (2,),
        "model.pyramid.num_heads": (2,),
        "model.pyramid.window": 8,
        "model.pyramid.stochastic_depth": 0.0,
        "model.dropout": 0.0,
        "model.sampling_steps": 5,
        "optimizer.lr": 4e-3,
        "train.batch_size": 8,
        "train.epochs": 5,
        "train.validate_every": 5,
    }

    data: RadioDiffDataConfig = RadioDiffDataConfig()
    model: RadioDiffModelConfig = RadioDiffModelConfig()
    defaults: ClassVar[dict[str, Any]] = RADIO
