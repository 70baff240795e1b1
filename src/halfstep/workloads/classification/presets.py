"""Presets of the classifiers: five purposes that every workload has, recipes from published work, and the demo.

The numbers of a recipe are its source's. What a source does beyond our settings is said beside it.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]

PURPOSES: dict[str, Preset] = {
    # Half of the default batch, accumulated to the default's 64.
    "lowmem": {
        "precision.default": "bf16",
        "train.batch_size": 32,
        "train.accumulate": 2,
        "train.activation_checkpointing": True,
    },
    "stable": {"precision.default": "fp32", "train.fast": "off", "guard.on_fault": "rollback"},
    "debug": {
        "precision.default": "fp32",
        "train.batch_size": 8,
        "train.epochs": 1,
        "train.max_steps": 20,
        "train.fast": "off",
        "data.num_workers": 0,
        "schedule.warmup_epochs": 0.0,
    },
}

# Guide 1's project (mohantee/Imagenet, src/main.py and src/train.py): lr 0.1 scaled by batch / 256, decay on every
# parameter, clipping to 1, one of CutMix and mixup on every batch. Its RandAugment is not built.
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
    "data.augment.cutmix_share": 0.5,
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
# trained at 176 pixels and evaluated at 224 of 232. Its average takes in (1 - 0.99998) · 1024 · 32 / 600 every 32
# steps, which is the decay below at every step. Its repeated augmentation (4 views of an image a batch) is not built.
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

# A few thousand images: small crops that keep most of the object (as fastai's Imagenette script does: 128 pixels, at
# least 0.35 of the area), twenty epochs, more decay since every image is seen at once. Not a published recipe.
QUICK: Preset = {
    "train.epochs": 20,
    "train.batch_size": 64,
    "schedule.warmup_epochs": 2.0,
    "data.image_size": 128,
    "data.augment.crop_area": (0.35, 1.0),
}

RESNET_PRESETS: dict[str, Preset] = {
    # NVIDIA's optimizer for half of the time: fewer epochs on fewer pixels, evaluated larger (FixRes).
    "fast": {**NVIDIA_90_EPOCHS, **TRAIN_176_EVALUATE_224, "precision.default": "bf16", "train.epochs": 50},
    "quality": TORCHVISION_V2,
    **PURPOSES,
    "guide": GUIDE,
    "nvidia90": NVIDIA_90_EPOCHS,
    "quick": {**QUICK, "optimizer.weight_decay": 5e-4},
}

# DeiT (Touvron et al. 2020, table 9; facebookresearch/deit main.py): 300 epochs, mixup 0.8 or CutMix 1.0 on every
# batch, erasing 0.25, average 0.99996, no clipping. Its stochastic depth, RandAugment and repeated augmentation are
# not built, so a ViT-B from scratch will stay below its 81.8 %.
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

# 1000 images of 64 pixels. Measured once: its ResNet-18 takes 65 s of one CPU core (Neoverse-N1), reaches 95 %.
DEMO: Preset = {
    "data.image_size": 48,
    "data.num_workers": 0,
    "data.eval_crop_ratio": 1.0,
    "data.augment.crop_area": (0.7, 1.0),
    "train.batch_size": 32,
    "train.epochs": 10,
    "schedule.warmup_epochs": 1.0,
}
RESNET_DEMO: Preset = {**DEMO, "model.width": 16, "model.blocks": (1, 1, 1, 1), "optimizer.weight_decay": 5e-4}
SMALL_VIT: Preset = {"model.depth": 4, "model.heads": 3, "model.dim": 96, "model.patch": 8}
VIT_DEMO: Preset = {**DEMO, **SMALL_VIT, "optimizer.lr": 1e-3, "optimizer.lr_per": 0}
