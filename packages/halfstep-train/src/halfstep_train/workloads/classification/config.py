"""Settings and presets of the image classifiers, ResNet and ViT.

Every workload has the same five presets by purpose. The others are published recipes with the numbers of their sources;
comments say what a source does in addition. Learning rates of recipes are per 256 (or 512) samples of a step, as in
their sources (`optimizer.lr_per`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from halfstep_train.config.schema import BuiltModelConfig, LabelledFolderConfig, RunConfig, TransformerSize
from halfstep_train.config.section import CachePath, Fraction, OffCount, OffNumber, PositiveCount, Section, setting

Preset = dict[str, Any]

PURPOSES: dict[str, Preset] = {
    # Half of the default batch size, accumulated to the default of 64.
    "lowmem": {**RunConfig.presets["lowmem"], "train.batch_size": 32, "train.accumulate": 2},
    "stable": RunConfig.presets["stable"],
    "debug": {
        **RunConfig.presets["debug"],
        "train.batch_size": 8,
        "train.max_steps": 20,
        "schedule.warmup_epochs": 0.0,
    },
}

# Guide 1's project (mohantee/Imagenet, src/main.py and src/train.py): lr 0.1 scaled by batch / 256, decay on every
# parameter, clipping to 1, CutMix or mixup on every batch. Its RandAugment is not implemented.
GUIDE: Preset = {
    "train.epochs": 120,
    "train.batch_size": 256,
    "train.clip_norm": 1.0,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.lr_per": 256,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
    "optimizer.weight_decay": 1e-4,
    "optimizer.decay_norms_and_biases": True,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5.0,
    "model.label_smoothing": 0.1,
    "data.augment.mixup": 0.2,
    "data.augment.cutmix": 1.0,
    "data.augment.erase": 0.25,
}

# NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, README and configs.yml: 76.9 to 77.1 %
# top-1 on ImageNet, the same in TF32 and in fp16 with this loss scale. Weight decay is 1/32768.
NVIDIA_90_EPOCHS: Preset = {
    "train.epochs": 90,
    "train.batch_size": 256,
    "train.clip_norm": 0.0,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.256,
    "optimizer.lr_per": 256,
    "optimizer.momentum": 0.875,
    "optimizer.nesterov": False,
    "optimizer.weight_decay": 1 / 32768,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 8.0,
    "model.label_smoothing": 0.1,
    "scaler.init_scale": 128.0,
    "scaler.growth_interval": 100,
}

# A training crop shows an object larger than a centre crop does, so training at fewer pixels fits evaluation better
# (FixRes, Touvron et al. 2019); sizes of torchvision.
TRAIN_176_EVALUATE_224: Preset = {"data.image_size": 176, "data.eval_size": 224, "data.eval_crop_ratio": 224 / 232}

# torchvision's second ResNet-50 (pytorch/vision issue 3995; 80.86 % top-1 after 600 epochs): lr 0.5 for 1024 samples,
# trained at 176 pixels and evaluated at 224 of 232. It updates its EMA every 32 steps with a weight of
# (1 - 0.99998) · 1024 · 32 / 600, which equals the decay below in every step. Its repeated augmentation (4 views of an
# image per batch) is not implemented.
TORCHVISION_V2: Preset = {
    "precision.default": "bf16",
    "train.epochs": 600,
    "train.batch_size": 256,
    "train.clip_norm": 0.0,
    "optimizer.name": "sgd",
    "optimizer.lr": 0.5,
    "optimizer.lr_per": 1024,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": False,
    "optimizer.weight_decay": 2e-5,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5.0,
    "model.label_smoothing": 0.1,
    **TRAIN_176_EVALUATE_224,
    "data.augment.trivial": True,
    "data.augment.mixup": 0.2,
    "data.augment.cutmix": 1.0,
    "data.augment.erase": 0.1,
    "ema.enabled": True,
    "ema.decay": 0.999966,
}

# For a few thousand images: small crops that keep most of the object (as in fastai's Imagenette script: 128 pixels, at
# least 0.35 of the area), twenty epochs, and more weight decay. Not a published recipe.
QUICK: Preset = {
    "train.epochs": 20,
    "train.batch_size": 64,
    "schedule.warmup_epochs": 2.0,
    "data.image_size": 128,
    "data.augment.crop_area": (0.35, 1.0),
}

RESNET_PRESETS: dict[str, Preset] = {
    # NVIDIA's optimizer in half the time: fewer epochs with fewer pixels, evaluated at a larger size (FixRes).
    "fast": {**NVIDIA_90_EPOCHS, **TRAIN_176_EVALUATE_224, "precision.default": "bf16", "train.epochs": 50},
    "quality": TORCHVISION_V2,
    **PURPOSES,
    "guide": GUIDE,
    "nvidia90": NVIDIA_90_EPOCHS,
    "quick": {**QUICK, "optimizer.weight_decay": 5e-4},
}

# DeiT (Touvron et al. 2020, table 9; facebookresearch/deit main.py): 300 epochs, mixup 0.8 or CutMix 1.0 on every
# batch, erasing 0.25, EMA 0.99996, no clipping. Its stochastic depth, RandAugment and repeated augmentation are not
# implemented, so a ViT-B from scratch stays below its 81.8 %.
DEIT: Preset = {
    "precision.default": "bf16",
    "train.epochs": 300,
    "train.batch_size": 256,
    "train.clip_norm": 0.0,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-4,
    "optimizer.lr_per": 512,
    "optimizer.weight_decay": 0.05,
    "schedule.name": "cosine",
    "schedule.warmup_epochs": 5.0,
    "schedule.min_factor": 0.02,  # from 5e-4 to 1e-5
    "model.label_smoothing": 0.1,
    "data.augment.mixup": 0.8,
    "data.augment.cutmix": 1.0,
    "data.augment.erase": 0.25,
    "ema.enabled": True,
    "ema.decay": 0.99996,
}

VIT_PRESETS: dict[str, Preset] = {
    "fast": {"precision.default": "bf16", "train.batch_size": 256},
    "quality": DEIT,
    **PURPOSES,
    "deit": DEIT,
    "quick": QUICK,
}

# 1000 images of 64 pixels. Measured once: the ResNet-18 takes 65 s on one CPU core (Neoverse-N1) and reaches 95 %.
DEMO: Preset = {
    "data.image_size": 48,
    "data.num_workers": 0,
    "data.eval_crop_ratio": 1.0,
    "data.augment.crop_area": (0.7, 1.0),
    "data.augment.flip": 0.5,
    "train.batch_size": 32,
    "train.epochs": 10,
    "schedule.warmup_epochs": 1.0,
}
RESNET_DEMO: Preset = {**DEMO, "model.width": 16, "model.blocks": (1, 1, 1, 1), "optimizer.weight_decay": 5e-4}
SMALL_VIT: Preset = {"model.depth": 4, "model.heads": 3, "model.dim": 96, "model.patch": 8}
VIT_DEMO: Preset = {**DEMO, **SMALL_VIT, "optimizer.lr": 1e-3, "optimizer.lr_per": 0}


PositiveShare = Annotated[float, Field(gt=0, le=1)]
Shares = tuple[PositiveShare, PositiveShare]


SMALL_SIDE = 64
SMALL_CHANGES: dict[str, Any] = {"crop_area": (0.8, 1.0), "flip": 0.0}
"""Augmentation of images up to SMALL_SIDE pixels: ImageNet's crops would cut digits apart, and flips turn them into
other signs."""


class ImageAugmentConfig(Section):
    """Strength of the training augmentation; 0 disables a change."""

    crop_area: Shares = setting(
        (0.08, 1.0), "Range of a random crop's area, as a fraction of the image; up to 64 pixels: 0.8 to 1"
    )
    flip: Fraction = setting(0.5, "Probability of a horizontal flip; up to 64 pixels: 0")
    brightness: Fraction = setting(0.0, "Largest relative change of brightness, contrast and saturation")
    trivial: bool = setting(False, "Apply one more random operation out of 14 to each image (TrivialAugmentWide)")
    erase: Fraction = setting(0.0, "Probability of random erasing (a rectangle is blanked)")
    mixup: OffNumber = setting(0.0, "Alpha of mixup: two images blended; 0: off")
    cutmix: OffNumber = setting(0.0, "Alpha of CutMix: a box pasted from another image; 0: off")

    @property
    def is_mixing(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0


class ImageDataConfig(LabelledFolderConfig):
    """A folder of class folders."""

    eval_size: OffCount = setting(
        0, "Side of the images in validation; 0: image_size. A larger one often helps (FixRes, Touvron 2019)"
    )
    eval_crop_ratio: PositiveShare | None = setting(
        None, "Center crop in validation, as a fraction of the shorter side; default: 0.875, for CIFAR 1"
    )
    cache: bool = setting(False, "Decode every image once into one packed file and read that from then on")
    cache_file: CachePath = setting(None, "Path of the packed file, if data.dir is not writable; default: in data.dir")
    cache_size: PositiveCount = setting(256, "Side of the images in the packed file, in pixels")
    augment: ImageAugmentConfig = ImageAugmentConfig()

    @model_validator(mode="after")
    def choose_augmentation(self) -> Self:
        """Change small images less than ImageNet's, unless the settings are given."""
        # The model is frozen: a plain assignment would raise.
        object.__setattr__(self, "augment", self.fit_augmentation(self.image_size))
        return self

    def fit_augmentation(self, side: int) -> ImageAugmentConfig:
        """Return the augmentation for images whose longer side has this many pixels; given settings stay."""
        missing = SMALL_CHANGES.keys() - self.augment.model_fields_set if side <= SMALL_SIDE else set()
        return self.augment.model_copy(update={name: SMALL_CHANGES[name] for name in missing})

    @property
    def is_packed(self) -> bool:
        """True if images are read from a packed file: `cache` is set, or a file is named."""
        return self.cache or self.cache_file is not None


class ClassifierModelConfig(BuiltModelConfig):
    """Settings of all classifiers."""

    replace_head: bool = setting(
        False, "Replace the last layer of model.weights by a new one, for data with other classes"
    )
    label_smoothing: float = setting(0.1, "Label smoothing of the training loss", ge=0, lt=1)


class ResNetModelConfig(ClassifierModelConfig):
    """ResNet v1.5 at any width and depth."""

    width: PositiveCount = setting(64, "Channels of the first stage; each stage doubles them")
    blocks: tuple[PositiveCount, ...] = setting((), "Blocks of each stage; empty: from the workload's name")
    stem: Literal["imagenet", "small"] = setting(
        "imagenet", "First layers: imagenet downsamples by 4, small (for 32 to 64 pixels) keeps the resolution"
    )


class ViTModelConfig(TransformerSize, ClassifierModelConfig):
    """Vision transformer of any size; official weights need the defaults."""

    patch: OffCount = setting(0, "Side of a patch in pixels; 0: 16, from the workload's name")


class ClassifierConfig(RunConfig):
    """One run of an image classifier: five epochs of warmup, then a cosine, as in guide 1 and DeiT.

    A cosine schedule gives its best model at the end, so early stopping is off by default.
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
