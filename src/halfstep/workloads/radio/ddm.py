"""Decoupled diffusion with a constant drift (Huang et al. 2024), as RadioDiff trains it, all in fp32.

The drift C = -x0 attenuates a latent x0 while noise grows: x_t = x0 + C t + sqrt(t) eps for t in (0, 1]. The network
predicts C and eps. A reverse step of size s uses x0 = x_t - C t - sqrt(t) eps and sets C := -x0:

    x_{t-s} = x_t - C s - s / sqrt(t) eps + sqrt(s (t - s) / t) draw

The last step has s = t and no draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep.islands import in_fp32

SMALLEST_TIME = 1e-4

Predict = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x_t, times) -> C, noise."""


def scale_times(uniform: Tensor, smallest: float = SMALLEST_TIME) -> Tensor:
    """Map uniform draws in 0..1 to training times in (smallest, 1]."""
    return uniform * (1.0 - smallest) + smallest


@in_fp32
def add_noise(x0: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    t = _as_column(time)
    return x0 - x0 * t + t.sqrt() * noise


@in_fp32
def recover_x0(x_t: Tensor, time: Tensor, drift: Tensor, noise: Tensor) -> Tensor:
    """Return the x0 implied by a prediction of C and noise."""
    t = _as_column(time)
    return x_t - drift * t - t.sqrt() * noise


@in_fp32
def ddm_loss(
    drift: Tensor, noise: Tensor, x0: Tensor, true_noise: Tensor, time: Tensor, *, weighted: bool, with_l1: bool
) -> Tensor:
    """Return the loss (B,): the squared errors of C and of the noise, or the mean of squared and absolute errors.

    The weights 2 exp(1 - t) in 2..5.4 and exp(sqrt(t)) in 1..2.7 favour C at early times and noise at late ones.
    """
    # The true drift is C = -x0.
    errors = (drift + x0, noise - true_noise)
    parts = [_mean(error.square()) for error in errors]
    if with_l1:
        parts = [(part + _mean(error.abs())) / 2 for part, error in zip(parts, errors, strict=True)]
    weights = (2 * torch.exp(1 - time), torch.exp(time.sqrt())) if weighted else (1.0, 1.0)
    return weights[0] * parts[0] + weights[1] * parts[1]


def list_times(steps: int, *, split_last: bool = True, smallest: float = SMALLEST_TIME) -> tuple[float, ...]:
    """Return the time of each network call, from 1 down.

    By default the last of the equal steps is split at `smallest`, as in the public sampler: N steps take N + 1 calls.
    Without the split, N steps take N calls.
    """
    times = tuple(1 - step / steps for step in range(steps))
    return (*times, smallest) if split_last else times


@torch.no_grad()
def sample_latents(predict: Predict, start: Tensor, draws: Sequence[Tensor], times: Sequence[float]) -> Tensor:
    """Return the latents sampled from the noise `start`; every call but the last uses one of `draws`."""
    x = start.float()
    for place, now in enumerate(times):
        after = times[place + 1] if place + 1 < len(times) else 0.0
        batch_time = torch.full((len(x),), now, device=x.device)
        drift, noise = (found.float() for found in predict(x, batch_time))
        # The predicted C and noise imply an x0; C := -x0 makes drift and state consistent, as in the public sampler.
        drift = -recover_x0(x, batch_time, drift, noise)
        s = now - after
        # One reverse step of size s; see the module docstring for the formula.
        x = x - drift * s - s / math.sqrt(now) * noise
        if after > 0:
            x = x + math.sqrt(s * after / now) * draws[place]
    return x


def _as_column(time: Tensor) -> Tensor:
    return time.view(-1, 1, 1, 1)


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
