"""Sample images from a seed with diffusers' DDIM or DPM-Solver++.

Both samplers are deterministic and the initial noise is keyed by sample, so a sample is the same in a batch of any
size. States are fp32; only the network runs in the plan's format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep_train.data import noise
from halfstep_train.workloads.base.frozen_vae import use_format
from halfstep_train.workloads.base.sheets import Array, arrange_grid
from halfstep_train.workloads.base.workload import Batch
from halfstep_train.workloads.diffusion.config import DiffusionConfig
from halfstep_train.workloads.diffusion.data import to_bytes
from halfstep_train.workloads.diffusion.diffusers_nets import decode_scaled, import_diffusers_class
from halfstep_train.workloads.diffusion.networks import Conditions, DiffusionParts
from halfstep_train.workloads.diffusion.noise_schedule import make_scheduler_config

PATH_IMAGES, PATH_STATES = 4, 8
"""Samples, and intermediate states of each, in a picture of the sampling path."""
DECODED_AT_ONCE = 8
"""Latents per call of the VAE."""


class ImageSampler:
    """Samples images with a U-Net, its conditions and its VAE."""

    def __init__(self, config: DiffusionConfig, parts: DiffusionParts, store: Mapping[str, Any]) -> None:
        self.config, self.parts = config, parts
        self._form = str(store.get("vae_format", ""))
        """Format of a VAE that is not a frozen module because latents are cached; it is moved to the device only to
        decode."""

    def make_images(
        self, model: nn.Module, key: tuple[int, ...], num: int, *, conditions: Batch | None = None, kept: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Return images as bytes (N, H, W, 3), and `kept` intermediate states.

        By default samples cycle through the classes, and captions are empty.
        """
        settings, device = self.config.sample, next(model.parameters()).device
        check_steps(settings.steps, self.config)
        start = noise.normal(key, num, self.parts.shape, device, stream="start")
        # Pixels are in -1..1; latents have no such limits.
        scheduler = make_scheduler(self.config, clips=self.parts.vae is None)
        given = conditions or self._make_default_conditions(num, device)
        denoise = make_guided_denoiser(model, self.parts.conditions, given, settings.guidance)
        found, path = run_sampler(denoise, scheduler, start, settings.steps, kept)
        return self._decode_to_bytes(found), [self._decode_to_bytes(state[:PATH_IMAGES]) for state in path]

    def draw_sheet(self, model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        """Draw a grid of samples, and the paths of a few from noise to image."""
        found, path = self.make_images(model, key, self.config.sample.num, kept=PATH_STATES)
        return {
            "samples": arrange_grid(found.numpy()),
            "path": draw_path([state.numpy() for state in (*path, found[:PATH_IMAGES])]),
        }

    def decode_means(self, means: Tensor) -> Tensor:
        """Decode the means of cached latents to image bytes."""
        vae = self.parts.vae
        assert vae is not None
        return self._decode_to_bytes((means.float() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor)

    def _make_default_conditions(self, num: int, device: torch.device) -> Batch:
        batch = self.parts.conditions.make_empty(num, device)
        if "label" in batch:
            batch["label"] = torch.arange(num, device=device) % (self.parts.conditions.num_classes - 1)
        return batch

    def _decode_to_bytes(self, samples: Tensor) -> Tensor:
        if self.parts.vae is None:
            return to_bytes(samples)
        vae = self.parts.vae.to(samples.device)
        with torch.no_grad(), use_format(self._form, samples.device):
            images = to_bytes(torch.cat([decode_scaled(vae, part) for part in samples.split(DECODED_AT_ONCE)]))
        if self._form:
            vae.to("cpu")
        return images


Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t, timestep as a 0-dim tensor) -> prediction."""


def make_scheduler(config: DiffusionConfig, *, clips: bool) -> Any:
    """Return a diffusers scheduler; `clips` limits predictions to -1..1, which is correct for pixels only."""
    shared = make_scheduler_config(config.noise, config.model.target)
    if config.sample.sampler == "ddim":
        return import_diffusers_class("DDIMScheduler")(**shared, clip_sample=clips)
    return import_diffusers_class("DPMSolverMultistepScheduler")(**shared, algorithm_type="dpmsolver++")


def check_steps(steps: int, config: DiffusionConfig) -> None:
    """Refuse more sampling steps than the model has timesteps."""
    if steps > config.noise.steps:
        raise ConfigError(
            f"{steps} sampling steps, but the model has {config.noise.steps} timesteps",
            fix=f"set sample.steps (--steps) to at most {config.noise.steps}",
        )


@torch.no_grad()
def run_sampler(
    denoise: Denoise, scheduler: Any, start: Tensor, steps: int, kept: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Return the samples, and `kept` evenly spaced intermediate states, starting with the noise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # diffusers passes tensors to numpy
        scheduler.set_timesteps(steps, device=start.device)
    state, path = start.float(), []
    # Numbers of the steps before which the state is kept.
    wanted = {round(k * len(scheduler.timesteps) / max(1, kept)) for k in range(kept)}
    for number, timestep in enumerate(scheduler.timesteps):
        if number in wanted:
            path.append(state)
        prediction = denoise(state, timestep).float()
        state = scheduler.step(prediction, timestep, state).prev_sample.float()
    return state, path


def make_guided_denoiser(model: nn.Module, conditions: Conditions, given: Batch, guidance: float) -> Denoise:
    """Return a denoiser with classifier-free guidance (Ho and Salimans 2022) for the conditions `given`."""

    def predict(state: Tensor, timestep: Tensor, batch: Batch) -> Tensor:
        steps = timestep.to(state.device).expand(len(state))
        found: Tensor = model(state, steps, **conditions.make_keywords(batch), return_dict=False)[0]
        return found.float()

    def denoise(state: Tensor, timestep: Tensor) -> Tensor:
        conditional = predict(state, timestep, given)
        if guidance == 1 or not conditions.is_conditional:
            return conditional
        unconditional = predict(state, timestep, conditions.make_empty(len(state), state.device))
        # Guidance 0 gives the unconditional prediction, 1 the conditional one; above 1 it extrapolates.
        return unconditional + guidance * (conditional - unconditional)

    return denoise


def draw_path(states: Sequence[Array]) -> Array:
    """Draw one row per sample, from noise on the left to the image on the right."""
    steps = np.stack(states, axis=1)
    return arrange_grid(steps.reshape(-1, *steps.shape[2:]), columns=len(states))
