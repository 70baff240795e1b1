"""RadioDiff at a size that trains in seconds: settings, data and a first stage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep_train.config.load import Loaded
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.radio.config import FirstStageConfig
from halfstep_train.workloads.radio.demo import write_demo
from halfstep_train.workloads.radio.first_stage import write_first_stage
from halfstep_train.workloads.radio.vae import RadioVAE

SIDE = 16
SIZES = {"width": 8, "multipliers": [1, 2], "num_blocks": 1, "latent_channels": 2}
SHARED: dict[str, Any] = {
    "data.image_size": SIDE, "data.num_workers": 0, "train.batch_size": 4, "train.report_every": 1, "device": "cpu",
    "precision.default": "fp32", "log.quiet": True, "train.fast": "off", "train.epochs": 1000,
    "train.validate_every": 1000,
    **{f"model.first_stage.{name}": value for name, value in SIZES.items()},
}  # fmt: skip
VAE: dict[str, Any] = {**SHARED, "model.discriminator.enabled": False, "optimizer.lr": 3e-3}
DIFFUSION: dict[str, Any] = {
    **SHARED, "model.width": 8, "model.multipliers": [1], "model.windows": [[2, 2]],
    "model.pyramid.width": 8, "model.pyramid.depths": [1], "model.pyramid.num_heads": [2], "model.pyramid.window": 4,
    "model.scale_factor": 0.5, "optimizer.lr": 3e-3, "schedule.name": "constant",
}  # fmt: skip


def write_tiny_demo(folder: Path) -> Path:
    """12 training and 4 validation samples."""
    write_demo(folder, side=SIDE, num_maps={"train": 3, "val": 1, "test": 1}, num_transmitters=4)
    return folder


def write_tiny_vae(folder: Path, change: Any = None) -> Path:
    """A first stage as an ended run leaves it, of random weights and little variance, changed by `change(vae)`."""
    torch.manual_seed(0)
    vae = RadioVAE(FirstStageConfig(width=8, multipliers=(1, 2), num_blocks=1, latent_channels=2))
    with torch.no_grad():
        vae.quant_conv.weight[:2] *= 4
        vae.quant_conv.weight[2:] = 0
        vae.quant_conv.bias[2:] = -8
        if change is not None:
            change(vae)
    (folder / "model").mkdir(parents=True)
    write_first_stage(vae.state_dict(), SIZES, 0.5, folder / "model")
    return folder


def settings(workload: str, data: Path, base: Mapping[str, Any], **more: Any) -> Loaded:
    values = {**base, "data.dir": str(data), **{name.replace("__", "."): value for name, value in more.items()}}
    return load(workload, overrides=[f"{key}={json.dumps(value)}" for key, value in values.items()])


def train_vae(out: Path, data: Path, workload: str = "radiodiff_vae", **more: Any) -> Path:
    return train(settings(workload, data, VAE, **more), out=out)


def train_diffusion(out: Path, data: Path, vae: Path, workload: str = "radiodiff", **more: Any) -> Path:
    return train(settings(workload, data, {**DIFFUSION, "model.vae": str(vae)}, **more), out=out)
