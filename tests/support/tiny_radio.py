"""RadioDiff at a size that trains in seconds: settings, data, a first stage, and workloads with faults planted.

`tiny_radio:FAULTY_VAE` is the family's own stage 1 with a fault in one step: `model.nan_pixel`,
`model.exploding_critic`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.config.load import Loaded
from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.base.kind import Kind
from halfstep_train.workloads.base.workload import Batch, Phase, Workload
from halfstep_train.workloads.radio import build_vae
from halfstep_train.workloads.radio.config import RadioVaeConfig, RadioVaeModelConfig
from halfstep_train.workloads.radio.demo import write_demo
from halfstep_train.workloads.radio.first_stage import write_first_stage
from halfstep_train.workloads.radio.vae import RadioVAE

SIDE = 16
SIZES = {"width": 8, "multipliers": [1, 2], "num_blocks": 1, "latent_channels": 2}
SHARED: dict[str, Any] = {
    "data.image_size": SIDE, "data.num_workers": 0, "train.batch_size": 4, "train.report_every": 1, "device": "cpu",
    "log.quiet": True, "train.fast": "off", "train.epochs": 1000, "train.validate_every": 1000,
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
    vae = RadioVAE(width=8, multipliers=(1, 2), num_blocks=1, z_channels=2, latent_channels=2)
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


# --- faults ---


class FaultyModelConfig(RadioVaeModelConfig):
    nan_pixel: int = -1
    """Step whose first map has one NaN."""
    exploding_critic: int = -1
    """Step in which the discriminator's logits are infinite."""


class FaultyVaeConfig(RadioVaeConfig):
    model: FaultyModelConfig = FaultyModelConfig()


def build_faulty(config: FaultyVaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    workload = build_vae.build_vae(config, store)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        found = workload.prepare(batch, key=key, training=training)
        step = key[1] if training else -2
        if step == config.model.nan_pixel:
            found["image"][0, 0, 3, 3] = torch.nan
        explodes = torch.tensor(step == config.model.exploding_critic)
        return found | {"explodes": explodes.expand(len(found["image"]))}

    return dataclasses.replace(workload, prepare=prepare, phases=tuple(_exploding(phase) for phase in workload.phases))


def _exploding(phase: Phase) -> Phase:
    if phase.name != "discriminator":
        return phase
    forward = phase.forward
    assert forward is not None

    def poisoned(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found = forward(model, batch)
        return found | {"real": torch.where(batch["explodes"].any(), -torch.inf, found["real"])}

    return dataclasses.replace(phase, forward=poisoned)


FAULTY_VAE = Kind(builder=build_faulty, config=FaultyVaeConfig)
