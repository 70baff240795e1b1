"""Sampling: from noise of a key to images, by diffusers' DDIM or DPM-Solver++, both without further randomness.

The start is `noise` by key and place, so that a sample is the same in a batch of any size. States are fp32; only the
network runs in the plan's format.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep.models.diffusers_nets import diffusers_class
from halfstep.models.noise_schedule import NoiseSchedule, Target
from halfstep.workloads.diffusion.conditions import Conditions
from halfstep.workloads.workload import Batch

Sampler = Literal["ddim", "dpm"]
THEIR_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
THEIR_TARGETS = {"eps": "epsilon", "v": "v_prediction", "sample": "sample"}
Denoise = Callable[[Tensor, Tensor], Tensor]
"""(x_t, timestep as a 0-dim tensor) -> prediction."""


def scheduler_config(schedule: NoiseSchedule, target: Target) -> dict[str, Any]:
    """What all of diffusers' schedulers call these settings."""
    return {
        "num_train_timesteps": schedule.num_steps,
        "beta_schedule": THEIR_SCHEDULES[schedule.name],
        "beta_start": schedule.beta_start,
        "beta_end": schedule.beta_end,
        "prediction_type": THEIR_TARGETS[target],
        "rescale_betas_zero_snr": schedule.zero_terminal_snr,
        # The last timestep comes first: the model is not asked to start from what it never saw (Lin et al. 2023).
        "timestep_spacing": "trailing",
    }


def scheduler_of(name: Sampler, schedule: NoiseSchedule, target: Target, *, clips: bool) -> Any:
    """diffusers' scheduler; `clips` where samples are pixels, whose range is known."""
    if name not in get_args(Sampler):
        raise ConfigError(f"sampler {name!r} is not known", fix=" or ".join(get_args(Sampler)))
    shared = scheduler_config(schedule, target)
    if name == "ddim":
        return diffusers_class("DDIMScheduler")(**shared, clip_sample=clips)
    return diffusers_class("DPMSolverMultistepScheduler")(**shared, algorithm_type="dpmsolver++")


def check_steps(steps: int, schedule: NoiseSchedule) -> None:
    if steps > schedule.num_steps:
        raise ConfigError(
            f"{steps} sampling steps, the model knows {schedule.num_steps} timesteps",
            fix=f"at most {schedule.num_steps}: sample.steps (--steps)",
        )


@torch.no_grad()
def denoised(denoise: Denoise, scheduler: Any, start: Tensor, steps: int, kept: int = 0) -> tuple[Tensor, list[Tensor]]:
    """The samples, and `kept` states on the way there, evenly spread, the start first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # diffusers hands torch's tensors to numpy
        scheduler.set_timesteps(steps, device=start.device)
    state, path = start.float(), []
    wanted = {round(k * len(scheduler.timesteps) / max(1, kept)) for k in range(kept)}
    for number, timestep in enumerate(scheduler.timesteps):
        if number in wanted:
            path.append(state)
        prediction = denoise(state, timestep).float()
        state = scheduler.step(prediction, timestep, state).prev_sample.float()
    return state, path


def guided(model: nn.Module, conditions: Conditions, told: Batch, guidance: float) -> Denoise:
    """The model's prediction, pushed away from what it would say if told nothing (Ho and Salimans 2022)."""

    def predicted(state: Tensor, timestep: Tensor, batch: Batch) -> Tensor:
        steps = timestep.to(state.device).expand(len(state))
        found: Tensor = model(state, steps, **conditions.keywords(batch), return_dict=False)[0]
        return found.float()

    def denoise(state: Tensor, timestep: Tensor) -> Tensor:
        own = predicted(state, timestep, told)
        if guidance == 1 or not conditions.is_told:
            return own
        plain = predicted(state, timestep, conditions.nothing(len(state), state.device))
        return plain + guidance * (own - plain)

    return denoise
