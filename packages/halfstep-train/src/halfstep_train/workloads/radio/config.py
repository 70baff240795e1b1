"""Settings of both RadioDiff stages. Defaults are those of the public configs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from halfstep_train.config.schema import (
    BuiltModelConfig,
    DataConfig,
    LatentCaching,
    RunConfig,
)
from halfstep_train.config.section import (
    CachePath,
    FilePath,
    Fraction,
    OffCount,
    Positive,
    PositiveCount,
    Section,
    setting,
)

Counts = tuple[PositiveCount, ...]
Window = tuple[PositiveCount, PositiveCount]


class RadioDataConfig(DataConfig):
    """The RadioMapSeer folder."""

    image_size: PositiveCount = setting(256, "Side of the square maps the model sees, in pixels")
    simulation: Literal["DPM", "IRT2", "IRT4"] = setting("DPM", "Simulation whose gains are used")
    cars: bool = setting(False, "Use gains simulated with cars, and the cars as a third input")
    missing_buildings: int = setting(
        0, "Number of buildings missing in the input; a version is drawn at random for each sample", ge=0, le=4
    )
    val_maps: tuple[int, ...] = setting(
        (), "Maps to validate on, by number; all others except test_maps train; default: RadioUNet's split"
    )
    test_maps: tuple[int, ...] = setting((), "Maps to test on, by number; needs val_maps")
    threshold: float = setting(
        0.0, "Gains below this are set to 0, and the rest is rescaled to 0..1; RadioUNet uses 0.2", ge=0, lt=1
    )

    @model_validator(mode="after")
    def check_split(self) -> Self:
        if self.test_maps and not self.val_maps:
            raise ValueError("data.test_maps needs data.val_maps: without it, RadioUNet's split chooses the test maps")
        if self.val_fraction != DataConfig.model_fields["val_fraction"].default:
            raise ValueError(
                f"data.val_fraction={self.val_fraction:g} has no effect: radio maps are split by their numbers "
                "(RadioUNet's split, or data.val_maps=[...])"
            )
        return self


class RadioDiffDataConfig(RadioDataConfig):
    """The RadioMapSeer folder, with an optional cache of latents on disk."""

    cache: LatentCaching = setting("off", "latents: encode every training map once and cache the latents")
    cache_file: CachePath = setting(None, "File of the cached latents; default: in data.dir")


class FirstStageConfig(Section):
    """Sizes of the autoencoder."""

    width: PositiveCount = setting(128, "Channels of the first level")
    multipliers: Counts = setting(
        (1, 2, 4), "Channels of each level, as multiples of width; all but the last level halve the map"
    )
    num_blocks: PositiveCount = setting(2, "Residual blocks of each level")
    latent_channels: PositiveCount = setting(3, "Channels of the latent")


class DiscriminatorConfig(Section):
    """The discriminator of stage 1."""

    enabled: bool = setting(True, "Train a PatchGAN discriminator together with the autoencoder")
    start: OffCount = setting(50_001, "First step at which the discriminator is trained and its loss counts")
    weight: float = setting(0.5, "Weight of the discriminator loss, multiplied by the adaptive weight", ge=0)


class RadioVaeModelConfig(BuiltModelConfig):
    """The autoencoder and its loss."""

    first_stage: FirstStageConfig = FirstStageConfig()
    kl_weight: float = setting(1e-6, "Weight of the KL term, which is summed over the latent", ge=0)
    discriminator: DiscriminatorConfig = DiscriminatorConfig()


class PyramidConfig(Section):
    """The Swin transformer that encodes buildings and antenna; defaults are Swin-B's."""

    width: PositiveCount = setting(128, "Channels of the Swin encoder's first stage; each stage doubles them")
    depths: Counts = setting((2, 2, 18, 2), "Blocks of each stage; as many as the U-Net has levels")
    num_heads: Counts = setting((4, 8, 16, 32), "Attention heads of each stage")
    window: PositiveCount = setting(7, "Side of the attention windows")
    stochastic_depth: float = setting(0.5, "Stochastic depth: probability of dropping the last block", ge=0, lt=1)
    weights: FilePath = setting(None, "File with torchvision's swin weights to start from")


class RadioDiffModelConfig(BuiltModelConfig):
    """The denoiser and its sampler."""

    vae: FilePath = setting(None, "First stage: a radiodiff_vae run, or a file with weights (then see first_stage)")
    first_stage: FirstStageConfig = FirstStageConfig()
    scale_factor: Literal["auto"] | Positive = setting(
        "auto", "Scale factor of the latents; auto: 1 / their standard deviation; the published config has 0.3"
    )
    width: PositiveCount = setting(128, "Channels of the U-Net's first level, a multiple of 8")
    multipliers: Counts = setting((1, 2, 4, 4), "Channels of each level, as multiples of width")
    windows: tuple[Window, ...] = setting(
        ((8, 8), (4, 4), (2, 2), (1, 1)),
        "Attention window sizes of the condition's encoder and of the U-Net's feature maps, one per level",
    )
    fourier_scale: Positive = setting(16.0, "Spread of the time embedding's frequencies")
    dropout: Fraction = setting(0.1, "Dropout of the condition's attention")
    pyramid: PyramidConfig = PyramidConfig()
    weighted_loss: bool = setting(True, "Weight the losses of C and noise by time")
    sampling_steps: int = setting(1, "Sampling steps in validation and prediction", ge=1, le=1000)
    extra_call: bool = setting(
        True, "N sampling steps call the network N + 1 times, as in the public sampler; false: N times"
    )

    @model_validator(mode="after")
    def check_levels(self) -> Self:
        levels, pyramid = len(self.multipliers), self.pyramid
        lists = {"windows": self.windows, "pyramid.depths": pyramid.depths, "pyramid.num_heads": pyramid.num_heads}
        for name, given in lists.items():
            if len(given) != levels:
                raise ValueError(f"{name} has {len(given)} entries, but multipliers has {levels}: each level needs one")
        if self.width % 8:
            raise ValueError(f"width={self.width}: it must be a multiple of 8, for eight groups and heads")
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
"""AdamW with weight decay on all parameters; the learning rate falls as (1 - step / steps)^0.96."""
SMALL_DATA: dict[str, Any] = {"data.image_size": 16, "data.num_workers": 0}
SMALL_FIRST_STAGE: dict[str, Any] = {
    "model.first_stage.width": 16,
    "model.first_stage.multipliers": (1, 2),
    "model.first_stage.num_blocks": 1,
    "model.first_stage.latent_channels": 4,
}


class RadioVaeConfig(RunConfig):
    """The config of a stage 1 run."""

    demo: ClassVar[dict[str, Any]] = {
        **SMALL_DATA,
        **SMALL_FIRST_STAGE,
        "model.discriminator.enabled": False,
        "optimizer.lr": 4e-3,
        "train.epochs": 3,
    }

    data: RadioDataConfig = RadioDataConfig()
    model: RadioVaeModelConfig = RadioVaeModelConfig()
    # The loss is a sum over pixels, so its gradients are large: at the published size they overflow fp16 even without
    # loss scaling. The scale therefore starts low and may fall below 1.
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
        "model.fourier_scale": 1.0,
        "model.pyramid.width": 32,
        "model.pyramid.depths": (2,),
        "model.pyramid.num_heads": (2,),
        "model.pyramid.window": 8,
        "model.pyramid.stochastic_depth": 0.0,
        "model.dropout": 0.0,
        "model.sampling_steps": 5,
        "optimizer.lr": 4e-3,
        "train.epochs": 5,
        "train.validate_every": 5,
    }

    data: RadioDiffDataConfig = RadioDiffDataConfig()
    model: RadioDiffModelConfig = RadioDiffModelConfig()
    defaults: ClassVar[dict[str, Any]] = RADIO
