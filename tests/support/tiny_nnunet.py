"""A tiny preprocessed nnU-Net dataset (2D, two labels) and trainers on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATASET = "Dataset901_Tiny"
CASES = [f"case_{number}" for number in range(5)]
SIDE = 32


def make_plans() -> dict[str, Any]:
    architecture = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {
            "n_stages": 3, "features_per_stage": [4, 8, 8], "conv_op": "torch.nn.modules.conv.Conv2d",
            "kernel_sizes": [[3, 3]] * 3, "strides": [[1, 1], [2, 2], [2, 2]], "n_conv_per_stage": [1, 1, 1],
            "n_conv_per_stage_decoder": [1, 1], "conv_bias": True,
            "norm_op": "torch.nn.modules.batchnorm.BatchNorm2d", "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None, "dropout_op_kwargs": None, "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }  # fmt: skip
    configuration = {
        "data_identifier": "nnUNetPlans_2d", "preprocessor_name": "DefaultPreprocessor", "batch_size": 2,
        "patch_size": [SIDE, SIDE], "median_image_size_in_voxels": [SIDE, SIDE], "spacing": [1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"], "use_mask_for_norm": [False], "batch_dice": True,
        "architecture": architecture,
    }  # fmt: skip
    return {
        "dataset_name": DATASET, "plans_name": "nnUNetPlans", "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2], "transpose_backward": [0, 1, 2], "configurations": {"2d": configuration},
        "original_median_spacing_after_transp": [1.0, 1.0, 1.0], "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager", "foreground_intensity_properties_per_channel": {},
    }  # fmt: skip


def write_dataset(folder: Path) -> None:
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetBlosc2

    base = folder / DATASET
    data = base / "nnUNetPlans_2d"
    data.mkdir(parents=True)
    (base / "nnUNetPlans.json").write_text(json.dumps(make_plans()))
    description = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "disc": 1}, "file_ending": ".nii.gz"}
    (base / "dataset.json").write_text(json.dumps({**description, "numTraining": len(CASES)}))
    (base / "dataset_fingerprint.json").write_text("{}")
    (base / "splits_final.json").write_text(json.dumps([{"train": CASES[:4], "val": CASES[4:]}]))
    draw = np.random.default_rng(0)
    for case in CASES:
        middle = draw.uniform(10, 22, 2)
        y, x = np.mgrid[:SIDE, :SIDE]
        disc = ((y - middle[0]) ** 2 + (x - middle[1]) ** 2 < 36)[None, None]
        image = (disc + 0.1 * draw.standard_normal(disc.shape)).astype(np.float32)
        properties = {"class_locations": {1: np.argwhere(disc).astype(np.int64)}}
        nnUNetDatasetBlosc2.save_case(image, disc.astype(np.int16), properties, str(data / case))


def make_trainer(folder: Path, kind: type, *, continue_training: bool = False) -> Any:
    """Make a trainer with a seeded network, for a few short epochs."""
    base = folder / DATASET
    plans = {**make_plans(), "continue_training": continue_training}
    torch.manual_seed(0)
    trainer = kind(plans, "2d", 0, json.loads((base / "dataset.json").read_text()), torch.device("cpu"))
    trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch, trainer.num_epochs = 4, 1, 2
    trainer.initialize()
    return trainer
