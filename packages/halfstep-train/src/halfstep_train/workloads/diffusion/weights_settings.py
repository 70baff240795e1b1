"""Adopt the settings with which the U-Net of a diffusers folder was trained: schedule, target and sample size.

A U-Net infers the noise level from the timestep: with another schedule or target, fine-tuning would silently start from
scratch. Settings that the user leaves open come from the folder; settings of the user win, and differences are
reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json
from halfstep.errors import ConfigError, ModelError
from halfstep_train.workloads.diffusion.config import DiffusionConfig, NoiseConfig
from halfstep_train.workloads.diffusion.diffusers_nets import OTHER_NAMES, count_halvings, find_net_folder
from halfstep_train.workloads.diffusion.noise_schedule import THEIR_SCHEDULES, THEIR_TARGETS

OUR_SCHEDULES = {theirs: ours for ours, theirs in THEIR_SCHEDULES.items()}
OUR_TARGETS = {theirs: ours for ours, theirs in THEIR_TARGETS.items()}
THEIR_NUMBERS = {
    "steps": "num_train_timesteps",
    "beta_start": "beta_start",
    "beta_end": "beta_end",
    "zero_terminal_snr": "rescale_betas_zero_snr",
}
"""diffusers' names, by ours; the defaults are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedSettings:
    """A config with the settings of a folder, those settings by path, and notes about differences."""

    config: DiffusionConfig
    settled: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def adopt_settings(config: DiffusionConfig) -> AdoptedSettings:
    """Return the config with settings from `model.weights` where the user left them open."""
    if not config.model.weights:
        return AdoptedSettings(config=config)
    unet = find_net_folder(config.model.weights, "unet", "model.weights")
    _refuse_latents_as_pixels(config, unet)
    schedule, notes = _read_schedule(config.model.weights, unet)
    theirs, settled = {**schedule, **_read_size(config, unet)}, {}
    for path, value in theirs.items():
        section, name = path.split(".")
        current = getattr(getattr(config, section), name)
        if name not in getattr(config, section).model_fields_set:
            settled[path] = value
        elif current != value:
            notes.append(f"{path}={current}: {unet.parent} was trained with {value}")
    changed: dict[str, dict[str, Any]] = {}
    for path, value in settled.items():
        section, name = path.split(".")
        changed.setdefault(section, {})[name] = value
    adopted, text = config.replace(**changed), ", ".join(f"{path}={value}" for path, value in settled.items())
    if why := adopted.explain_untrainable():
        raise ConfigError(
            why, why=f"the config leaves these open, so those of model.weights={config.model.weights} apply"
        )
    return AdoptedSettings(
        config=adopted,
        settled=settled,
        about=(("from the weights", text),) if text else (),
        notes=tuple(notes),
    )


def _refuse_latents_as_pixels(config: DiffusionConfig, unet: Path) -> None:
    """Refuse to train a latent U-Net on pixels: latents with three channels have the shape of an image.

    Users who do want pixels name the folder of the U-Net instead of the pipeline.
    """
    weights, pipeline = Path(str(config.model.weights)).expanduser(), unet.parent
    has_vae = any((pipeline / name / "config.json").is_file() for name in ("vae", *OTHER_NAMES["vae"]))
    if has_vae and not config.model.vae and unet != weights:
        raise ConfigError(
            f"model.weights={weights} is a latent model, and model.vae is not set",
            why="its U-Net was trained on latents, not on pixels",
            fix=f"model.vae={weights}; to train it on pixels anyway: model.weights={unet}",
        )


def _read_schedule(weights: str, unet: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the schedule of a pipeline as settings by path, and notes; empty if it has no scheduler."""
    path = unet.parent / "scheduler" / "scheduler_config.json"
    if not path.is_file():
        return {}, []
    found = _read_json(path)
    try:
        if found.get("trained_betas") is not None:
            raise ValueError("trained_betas")
        values = {name: found[key] for name, key in THEIR_NUMBERS.items() if key in found}
        noise = NoiseConfig.model_validate({"schedule": OUR_SCHEDULES[found["beta_schedule"]], **values})
        target = OUR_TARGETS[found.get("prediction_type", "epsilon")]
    except (KeyError, ValueError, TypeError) as error:
        what = f"{path} contains a diffusion process that is not supported: {' '.join(str(error).split())}"
        if unet == Path(weights).expanduser():  # the user named the U-Net, not the pipeline: ignore its schedule
            return {}, [f"{what}; noise.* and model.target are used"]
        raise ConfigError(
            what,
            why="its U-Net was trained with that process",
            fix="give the U-Net's folder (model.weights=DIR/unet) to train with noise.* and model.target",
        ) from error
    theirs = {f"noise.{name}": getattr(noise, name) for name in ("schedule", *THEIR_NUMBERS)}
    return {**theirs, "model.target": target}, []


def _read_size(config: DiffusionConfig, unet: Path) -> dict[str, Any]:
    """Return the image size that the U-Net was trained on, as a setting; empty if unknown."""
    side = _read_json(unet / "config.json").get("sample_size")
    if type(side) is not int or side < 1:
        return {}
    if config.model.vae:
        side <<= count_halvings(_read_json(find_net_folder(config.model.vae, "vae", "model.vae") / "config.json"))
    return {"data.image_size": side}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(parse_json(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"cannot read {path}", why=str(error), fix="save the model again") from error
