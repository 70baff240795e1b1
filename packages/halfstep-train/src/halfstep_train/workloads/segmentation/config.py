"""Settings of the U-Net, with the defaults and presets of guide 0."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from halfstep_train.config.schema import BuiltModelConfig, DataConfig, RunConfig
from halfstep_train.config.section import FilePath, Fraction, Positive, PositiveCount, Section, setting


class UNetAugmentConfig(Section):
    """Strength of the training augmentation of image and mask; 0 disables a change."""

    flip: Fraction = setting(0.5, "Probability of a horizontal flip, and of a vertical flip")
    rotate_degrees: float = setting(15.0, "Largest rotation in degrees, in either direction", ge=0, le=180)
    scale: float = setting(0.1, "Largest relative change of size", ge=0, lt=1)
    crop: float = setting(0.0, "Largest fraction of each side that a random crop removes", ge=0, lt=1)
    brightness: float = setting(0.1, "Largest relative change of brightness and contrast; image only", ge=0, le=1)


class UNetDataConfig(DataConfig):
    """Image and mask pairs."""

    image_size: PositiveCount = setting(
        512, "Side of the square images the model sees; unset: 512 pixels, or less if the images are smaller"
    )
    images: str = setting(
        "", "Folder of the images below data.dir, or a pattern: scans/{id}_t1.png; empty: imgs, images, image"
    )
    masks: str = setting(
        "", "Folder of the masks, or a pattern: truth/**/{id}_seg.png; empty: masks, mask, labels or label"
    )
    val_images: str = setting(
        "", "Folder or pattern of the validation images; empty: the usual val folders, or val_fraction"
    )
    val_masks: str = setting("", "Folder or pattern of the validation masks")
    channels: Literal["auto", 1, 3] = setting("auto", "Channels of the images; auto: as in the files")
    scale: Literal["auto"] | Positive = setting(
        "auto",
        "What float and 32-bit images are divided by, so that white is 1; auto: 1, 255 or the largest "
        "value that is not an outlier, whichever fits the files",
    )
    val_list: FilePath = setting(None, "Text file with the validation images, one name per line; replaces val_fraction")
    train_list: FilePath = setting(None, "Text file with the training images; default: all others")
    augment: UNetAugmentConfig = UNetAugmentConfig()

    @model_validator(mode="after")
    def check_validation(self) -> Self:
        if bool(self.val_images) != bool(self.val_masks):
            raise ValueError("data.val_images and data.val_masks belong together: set both, or neither")
        return self


class UNetModelConfig(BuiltModelConfig):
    """The milesial U-Net at any width and depth."""

    base_channels: PositiveCount = setting(64, "Channels of the first level; each level doubles them")
    depth: int = setting(4, "Number of times the image is halved", ge=1, le=7)
    bilinear: bool = setting(False, "Bilinear upsampling instead of transposed convolutions: fewer parameters")
    classes: Literal["auto"] | PositiveCount = setting("auto", "Classes, background included; auto: from the masks")
    background: Literal["first"] | int | tuple[int, int, int] | None = setting(
        "first",
        "Mask value that iou and dice leave out (iou_all and dice_all never do); first: the smallest; "
        "null: none, all classes count",
    )
    dice_weight: float = setting(1.0, "Weight of the Dice loss", ge=0)
    class_weights: tuple[float, ...] = setting((), "Weight of each class in the cross-entropy; empty: all equal")
    ignore_index: Literal["auto"] | int | tuple[int, int, int] | None = setting(
        "auto",
        "Mask value (number or colour) that counts neither in loss nor metrics; auto: the data set's "
        "value if known (VOC: 255), or 255 if the other values are 0, 1, 2, ...; null: none",
    )


class UNetConfig(RunConfig):
    """One U-Net run."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "fast": {"precision.default": "bf16", "train.batch_size": 16, "train.epochs": 50},
        "quality": {
            "precision.default": "bf16",
            "train.batch_size": 8,
            "train.epochs": 100,
            "train.early_stopping_patience": 20,
            "ema.enabled": True,
        },
        # For 4 GB: half the batch size, accumulated to 8, for which the optimizer was tuned.
        "lowmem": {**RunConfig.presets["lowmem"], "train.batch_size": 4, "train.accumulate": 2},
        "stable": RunConfig.presets["stable"],
        "debug": {**RunConfig.presets["debug"], "train.batch_size": 2, "train.epochs": 5},
    }

    # 100 small images: less than two minutes on two CPU cores.
    demo: ClassVar[dict[str, Any]] = {
        "data.image_size": 64,
        "data.val_fraction": 0.2,
        "data.num_workers": 0,
        "model.base_channels": 8,
        "model.depth": 3,
        "optimizer.lr": 5e-3,
        "schedule.name": "onecycle",
        "train.epochs": 16,
    }

    # A short warmup: the first steps in fp16 are the most fragile ones.
    defaults: ClassVar[dict[str, Any]] = {"schedule.warmup_epochs": 1.0}

    data: UNetDataConfig = UNetDataConfig()
    model: UNetModelConfig = UNetModelConfig()
