"""What a folder of diffusers' says of how its U-Net was trained: schedule, target and size of its samples.

A U-Net knows its noise by timestep: trained on with another schedule or target it would have to begin anew, and nothing
would say so. What the user did not set is taken from the folder; what they set otherwise holds, and is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.errors import ConfigError, ModelError
from halfstep.models.diffusers_nets import halvings, net_folder
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.make import THEIR_SCHEDULES, THEIR_TARGETS

OUR_SCHEDULES = {theirs: ours for ours, theirs in THEIR_SCHEDULES.items()}
OUR_TARGETS = {theirs: ours for ours, theirs in THEIR_TARGETS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """The config with the folder's settings, those by path, and what differs from it."""

    config: DiffusionConfig
    settled: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def adopted(config: DiffusionConfig) -> Adopted:
    """Settings of `model.weights` where the user named none."""
    if not config.model.weights:
        return Adopted(config=config)
    unet = net_folder(config.model.weights, "unet", "model.weights")
    schedule, notes = _schedule(config.model.weights, unet)
    theirs, settled = {**schedule, **_size(config, unet)}, {}
    for path, value in theirs.items():
        section, name = path.split(".")
        own = getattr(getattr(config, section), name)
        if name not in getattr(config, section).model_fields_set:
            settled[path] = value
        elif own != value:
            notes.append(f"{path}={own}: {unet.parent} was trained with {value}")
    checked = _checked(config, settled)
    said = ", ".join(f"{path}={value}" for path, value in settled.items())
    return Adopted(
        config=checked,
        settled=settled,
        about=(("by the weights", said),) if said else (),
        notes=tuple(notes),
    )


def _checked(config: DiffusionConfig, settled: Mapping[str, Any]) -> DiffusionConfig:
    for path, value in settled.items():
        section, name = path.split(".")
        config = config.changed(**{section: {name: value}})
    if why := config.why_untrainable():
        raise ConfigError(why, why=f"settings of model.weights={config.model.weights} hold where none are given")
    return config


def _schedule(weights: str, unet: Path) -> tuple[dict[str, Any], list[str]]:
    """By our paths, and what to note; nothing where a U-Net lies alone."""
    path = unet.parent / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        return {}, []
    found = _read(path)
    schedule, target = found.get("beta_schedule"), found.get("prediction_type", "epsilon")
    if found.get("trained_betas") is not None or schedule not in OUR_SCHEDULES or target not in OUR_TARGETS:
        what = (
            f"{path} is of a process that is not built here: {found.get('_class_name')}, "
            f"beta_schedule {schedule!r}, prediction_type {target!r}"
        )
        if unet == Path(weights).expanduser():  # whoever names the U-Net's own folder wants it without its schedule
            return {}, [f"{what}; noise.* and model.target hold"]
        raise ConfigError(
            what,
            why="its U-Net knows noise by that schedule",
            fix="name the U-Net's own folder (model.weights=DIR/unet) to train it by noise.* and model.target",
        )
    return {
        "noise.schedule": OUR_SCHEDULES[schedule],
        "noise.steps": int(found.get("num_train_timesteps", 1000)),
        "noise.beta_start": float(found.get("beta_start", 1e-4)),
        "noise.beta_end": float(found.get("beta_end", 0.02)),
        "noise.zero_terminal_snr": bool(found.get("rescale_betas_zero_snr", False)),
        "model.target": OUR_TARGETS[target],
    }, []


def _size(config: DiffusionConfig, unet: Path) -> dict[str, Any]:
    """The side of its pictures."""
    side = _read(unet / "config.json").get("sample_size")
    if not isinstance(side, int):
        return {}
    if config.model.vae:
        side <<= halvings(_read(net_folder(config.model.vae, "vae", "model.vae") / "config.json"))
    return {"data.image_size": side}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"cannot read {path}", why=str(error), fix="save the model again") from error
