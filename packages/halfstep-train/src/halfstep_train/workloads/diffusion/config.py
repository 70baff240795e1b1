"""Settings of the VAE and of diffusion models, with the defaults of diffusers' training examples."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from halfstep_train.config.schema import (
    BuiltModelConfig,
    FolderConfig,
    LabelledFolderConfig,
    LatentCaching,
    RunConfig,
)
from halfstep_train.config.section import (
    CachePath,
    FilePath,
    Fraction,
    OffCount,
    OffNumber,
    Positive,
    PositiveCount,
    Section,
    setting,
)

Conditioning = Literal["none", "class", "text"]


class ImageFolderConfig(FolderConfig):
    """A folder of images."""

    image_size: PositiveCount = setting(64, "Side of the square images the model sees, in pixels")
    flip: Fraction = setting(0.5, "Probability of a horizontal flip in training")


class DiffusionDataConfig(ImageFolderConfig, LabelledFolderConfig):
    """A folder of images, with classes or captions if the model is conditioned on them."""

    text_column: str = setting("text", "Column of metadata.jsonl or .csv with the captions")
    cache: LatentCaching = setting(
        "off", "latents: encode every image once with the VAE and train on the cached latents, flips included"
    )
    cache_file: CachePath = setting(None, "File of the cached latents; default: in data.dir")


class UNetSize(BuiltModelConfig):
    """Settings that U-Net and VAE share: the blocks of diffusers' networks."""

    channels: tuple[PositiveCount, ...] = setting(
        (128, 128, 256, 256, 512, 512), "Channels of each level; each halves the image", min_length=1
    )
    layers: PositiveCount = setting(2, "ResNet blocks of each level")
    weights: FilePath = setting(None, "diffusers folder of a network or pipeline to start from")


class VaeModelConfig(UNetSize):
    """AutoencoderKL, its losses and its discriminator."""

    channels: tuple[PositiveCount, ...] = setting(
        (128, 256, 512, 512),
        "Channels of each level; all but the last halve the image (four levels: latents of 1/8 the side)",
        min_length=1,
    )
    latent_channels: PositiveCount = setting(4, "Channels of the latents")
    loss: Literal["l1", "l2"] = setting("l1", "Distance between image and reconstruction")
    kl_weight: OffNumber = setting(1e-6, "Weight of the KL divergence, summed over a latent")
    perceptual_weight: OffNumber = setting(0.0, "Weight of the perceptual loss; needs vgg_weights")
    vgg_weights: FilePath = setting(None, "File with torchvision's VGG16 weights, for the perceptual loss")
    gan_weight: OffNumber = setting(
        0.0, "Weight of the PatchGAN loss, multiplied by the ratio of gradient norms; 0: no discriminator"
    )
    gan_from_step: OffCount = setting(50_001, "First step at which the discriminator is trained and its loss counts")

    @model_validator(mode="after")
    def check_perceptual(self) -> Self:
        if self.perceptual_weight and not self.vgg_weights:
            raise ValueError(
                "model.perceptual_weight needs model.vgg_weights=FILE: torchvision's vgg16, which is never downloaded"
            )
        return self


class NoiseConfig(Section):
    """Settings of the forward process."""

    schedule: Literal["linear", "scaled_linear", "cosine"] = setting("linear", "Shape of the beta schedule")
    steps: int = setting(1000, "Timesteps", ge=4)
    beta_start: Annotated[float, Field(gt=0, lt=1)] = setting(
        1e-4, "Beta (noise variance) at the first timestep (Stable Diffusion: 0.00085, scaled_linear)"
    )
    beta_end: Annotated[float, Field(gt=0, lt=1)] = setting(0.02, "Beta at the last timestep (Stable Diffusion: 0.012)")
    zero_terminal_snr: bool = setting(False, "Rescale the schedule so that the last timestep is pure noise")
    offset: OffNumber = setting(0.0, "Offset noise: strength of extra noise that is constant over each channel")

    @model_validator(mode="after")
    def check_betas(self) -> Self:
        if self.beta_start > self.beta_end:
            raise ValueError(f"noise.beta_start={self.beta_start:g} is above noise.beta_end={self.beta_end:g}")
        return self


class DiffusionModelConfig(UNetSize):
    """The U-Net, its conditions and its prediction target."""

    attention: tuple[int, ...] | None = setting(
        None, "Levels with attention, from 0; default: the last but one, with text all but the last"
    )
    attention_head_dim: PositiveCount = setting(
        8, "Channels per attention head; with text: number of heads (as in diffusers)"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = setting(0.0, "Dropout in ResNet blocks")
    target: Literal["eps", "v", "sample"] = setting("eps", "What the U-Net predicts")
    min_snr_gamma: Positive | None = setting(
        None, "Min-SNR loss weights (5 is usual; 0 would make the loss 0); null: equal weights"
    )
    conditioning: Conditioning = setting("none", "What the U-Net is conditioned on")
    drop_condition: Fraction = setting(
        0.1, "Fraction of samples trained without condition, for classifier-free guidance"
    )
    vae: FilePath = setting(
        None, "Folder of a VAE (diffusers', or model/ of a run): train on latents instead of pixels"
    )
    text_encoder: FilePath = setting(
        None, "Folder of a CLIP text model with its tokenizer, or of a pipeline that has both"
    )

    @model_validator(mode="after")
    def check_text_encoder(self) -> Self:
        if (self.conditioning == "text") != bool(self.text_encoder):
            raise ValueError("model.conditioning=text and model.text_encoder=DIR belong together")
        return self


Sampler = Literal["ddim", "dpm"]
SAMPLERS: tuple[str, ...] = get_args(Sampler)


class SampleConfig(Section):
    """Samples that are drawn during training; `halfstep predict` has options of the same names."""

    num: PositiveCount = setting(16, "Number of images in the grid")
    steps: PositiveCount = setting(50, "Sampling steps")
    sampler: Sampler = setting("ddim", "DDIM or DPM-Solver++")
    guidance: OffNumber = setting(3.0, "Classifier-free guidance scale of conditional models; 1: none")


PICTURES: dict[str, Any] = {
    "optimizer.lr": 1e-4,
    "schedule.warmup_steps": 500,
    "train.early_stopping_patience": 0,
    "ema.warmup_power": 3 / 4,
}
"""As in diffusers' examples: a warmup of 500 steps, and the EMA warmup of its EMAModel."""


class VaeConfig(RunConfig):
    """The config of an AutoencoderKL run."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **RunConfig.presets,
        "fast": {"precision.default": "bf16", "train.batch_size": 16},
        "lowmem": {"precision.default": "bf16", "train.activation_checkpointing": True, "train.batch_size": 4},
    }
    demo: ClassVar[dict[str, Any]] = {
        "data.image_size": 16,
        "data.num_workers": 0,
        "model.channels": (16, 32),
        "model.layers": 1,
        "optimizer.lr": 4e-3,
        "schedule.warmup_steps": 10,
        "train.batch_size": 8,
        "train.epochs": 10,
    }

    data: ImageFolderConfig = ImageFolderConfig()
    model: VaeModelConfig = VaeModelConfig()
    defaults: ClassVar[dict[str, Any]] = {
        **PICTURES,
        "data.image_size": 256,
        "optimizer.weight_decay": 0.0,
        "optimizer.betas": (0.5, 0.9),
        "train.batch_size": 4,
    }


class DiffusionConfig(RunConfig):
    """The config of a diffusion run."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        **RunConfig.presets,
        "fast": {"precision.default": "bf16", "train.batch_size": 64},
        "quality": {"precision.default": "bf16", "model.min_snr_gamma": 5.0, "model.target": "v"},
        "lowmem": {"precision.default": "bf16", "train.activation_checkpointing": True, "train.batch_size": 4},
        # Stable Diffusion 1.x: latents, text conditioning, and its beta schedule.
        "sd1": {
            "precision.default": "bf16",
            "data.image_size": 512,
            "model.channels": (320, 640, 1280, 1280),
            "model.attention": (0, 1, 2),
            "model.conditioning": "text",
            "noise.schedule": "scaled_linear",
            "noise.beta_start": 0.00085,
            "noise.beta_end": 0.012,
            "optimizer.betas": (0.9, 0.999),
            "optimizer.weight_decay": 1e-2,
            "schedule.name": "constant",
        },
    }
    demo: ClassVar[dict[str, Any]] = {
        "data.image_size": 16,
        "data.num_workers": 0,
        "model.channels": (32, 64),
        "model.attention": (1,),
        "model.layers": 1,
        "noise.steps": 100,
        "noise.beta_end": 0.2,
        "optimizer.lr": 2e-3,
        "schedule.warmup_steps": 20,
        "sample.steps": 20,
        "train.epochs": 12,
    }

    data: DiffusionDataConfig = DiffusionDataConfig()
    model: DiffusionModelConfig = DiffusionModelConfig()
    noise: NoiseConfig = NoiseConfig()
    sample: SampleConfig = SampleConfig()
    defaults: ClassVar[dict[str, Any]] = {
        **PICTURES,
        "optimizer.weight_decay": 1e-6,
        "optimizer.betas": (0.95, 0.999),
        "train.batch_size": 16,
        "ema.enabled": True,
    }

    @model_validator(mode="after")
    def check_vae_and_target(self) -> Self:
        if self.data.cache == "latents" and not self.model.vae:
            raise ValueError("data.cache=latents needs a VAE: model.vae=DIR")
        if why := self.explain_untrainable():
            raise ValueError(why)
        return self

    def explain_untrainable(self) -> str:
        """Explain why a target cannot be trained with this schedule; return an empty string if it can."""
        if not (self.noise.zero_terminal_snr and self.model.target == "eps"):
            return ""
        return (
            "model.target=eps with noise.zero_terminal_snr: the last timestep is pure noise, so predicting it teaches "
            "nothing, and its SNR of 0 would divide by zero; use model.target=v"
        )
