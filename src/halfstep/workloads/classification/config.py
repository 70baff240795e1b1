"""Settings of the image classifiers, ResNet and ViT; a preset is a purpose or a published recipe.

Learning rates of recipes are per 256 (or 512) samples of a step, as their sources have them: `optimizer.lr_per`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from halfstep.config.schema import DataConfig, ModelConfig, RunConfig
from halfstep.config.section import Fraction, NamedPath, OffCount, OffNumber, Positive, PositiveCount, Section
from halfstep.workloads.classification.presets import RESNET_DEMO, RESNET_PRESETS, VIT_DEMO, VIT_PRESETS


def from_low_to_high(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise ValueError(f"the first number is the smaller one, unlike {bounds[0]:g}, {bounds[1]:g}")
    return bounds


PositiveShare = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[tuple[PositiveShare, PositiveShare], AfterValidator(from_low_to_high)]
Ratios = Annotated[tuple[Positive, Positive], AfterValidator(from_low_to_high)]


class ImageAugmentConfig(Section):
    """How far training images are changed; 0 switches a change off."""

    crop_area: Shares = Field(default=(0.08, 1.0), description="Share of the image that a random crop shows")
    crop_ratio: Ratios = Field(default=(3 / 4, 4 / 3), description="Width over height of a random crop")
    flip: Fraction = Field(default=0.5, description="Chance of a mirror image")
    brightness: Fraction = Field(default=0.0, description="Largest relative change of brightness")
    contrast: Fraction = Field(default=0.0, description="Largest relative change of contrast")
    saturation: Fraction = Field(default=0.0, description="Largest relative change of saturation")
    trivial: bool = Field(
        default=False, description="One random change more for each image, of 14 kinds (TrivialAugment, its wide set)"
    )
    erase: Fraction = Field(default=0.0, description="Chance that a rectangle is blanked (random erasing)")
    mixup: OffNumber = Field(default=0.0, description="Alpha of mixup: two images blended; 0: off")
    cutmix: OffNumber = Field(default=0.0, description="Alpha of CutMix: a box pasted from another image; 0: off")
    cutmix_share: Fraction = Field(default=0.5, description="Share of CutMix among the mixed batches where both are on")
    mix_chance: Fraction = Field(default=1.0, description="Chance that a batch is mixed at all")


class ImageDataConfig(DataConfig):
    """A folder of class folders."""

    train_folder: str = Field(default="", description="Training folder below data.dir; empty: train or training")
    val_folder: str = Field(
        default="", description="Validation folder below data.dir; empty: val, valid, validation or test"
    )
    label_column: str = Field(
        default="", description="Column of metadata.jsonl or .csv with the classes; empty: label, or what is usual"
    )
    split_seed: int = Field(default=0, ge=0, description="Seed of the split where there is no val folder")
    eval_size: OffCount = Field(
        default=0,
        description="Side of the images in validation; 0: image_size. A larger one often helps (FixRes, Touvron 2019)",
    )
    eval_crop_ratio: PositiveShare | None = Field(
        default=None, description="Share of the shorter side that validation shows; default: 0.875, all of CIFAR's"
    )
    cache: bool = Field(
        default=False, description="Decode every image once into one packed file and read that from then on"
    )
    cache_file: NamedPath = Field(
        default=None, description="Where that file is, for a folder that cannot be written to; default: in data.dir"
    )
    cache_size: PositiveCount = Field(default=256, description="Side of the images in that file, in pixels")
    cache_limit_gb: Positive = Field(default=64.0, description="Largest size of that file; more is refused")
    augment: ImageAugmentConfig = ImageAugmentConfig()

    @property
    def is_packed(self) -> bool:
        """Whether images come from a packed file; to name one is to want it."""
        return self.cache or self.cache_file is not None


class ClassifierModelConfig(ModelConfig):
    """What all classifiers share."""

    replace_head: bool = Field(
        default=False, description="Start a new last layer on model.weights, for data with other classes"
    )
    label_smoothing: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the target spread over all classes in the training loss"
    )


class ResNetModelConfig(ClassifierModelConfig):
    """ResNet v1.5 at any width and depth."""

    width: PositiveCount = Field(default=64, description="Channels of the first stage; each stage doubles them")
    blocks: tuple[PositiveCount, ...] = Field(
        default=(), description="Blocks of each stage; empty: as the workload's name says"
    )
    stem: Literal["imagenet", "small"] = Field(
        default="imagenet", description="First layers: imagenet quarters the size, small (for 32 to 64 pixels) keeps it"
    )


class ViTModelConfig(ClassifierModelConfig):
    """Vision transformer; official weights need every option as it is here."""

    depth: OffCount = Field(default=0, description="Number of blocks; 0: as the workload's name says")
    heads: OffCount = Field(default=0, description="Attention heads, which share dim evenly; 0: as the name says")
    dim: OffCount = Field(default=0, description="Channels of a token; 0: as the name says")
    patch: OffCount = Field(default=0, description="Side of a patch in pixels; 0: 16, as the name says")
    layer_scale: OffNumber = Field(default=0.0, description="Start of a learned gain on each branch; 0: none")
    registers: OffCount = Field(default=0, description="Extra tokens that take the global work off the patches")


class ClassifierConfig(RunConfig):
    """One run of an image classifier: guide 1's batch, five epochs of warmup, then a cosine, as in guide 1 and in DeiT.

    A cosine run is best at its end, so it does not stop early unless asked to.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "schedule.warmup_epochs": 5.0,
        "train.batch_size": 64,
        "train.early_stopping_patience": 0,
    }

    data: ImageDataConfig = ImageDataConfig()
    model: ClassifierModelConfig = ClassifierModelConfig()


class ResNetConfig(ClassifierConfig):
    """One ResNet run: SGD with Nesterov momentum, as in guide 1."""

    presets: ClassVar[dict[str, dict[str, Any]]] = RESNET_PRESETS
    demo: ClassVar[dict[str, Any]] = RESNET_DEMO
    defaults: ClassVar[dict[str, Any]] = {
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.weight_decay": 1e-4,
        "optimizer.nesterov": True,
    }

    model: ResNetModelConfig = ResNetModelConfig()


class ViTConfig(ClassifierConfig):
    """One ViT run: AdamW as in DeiT (Touvron et al. 2020)."""

    presets: ClassVar[dict[str, dict[str, Any]]] = VIT_PRESETS
    demo: ClassVar[dict[str, Any]] = VIT_DEMO
    defaults: ClassVar[dict[str, Any]] = {"optimizer.lr": 5e-4, "optimizer.lr_per": 512, "optimizer.weight_decay": 0.05}

    model: ViTModelConfig = ViTModelConfig()


CLASSIFIER_SCHEMAS: dict[str, type[RunConfig]] = {
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"), ResNetConfig),
    **dict.fromkeys(("vit_s_16", "vit_b_16", "vit_l_16"), ViTConfig),
}
