"""Decoupled diffusion with a constant drift (Huang et al. 2024) as used by RadioDiff, in fp32.

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
"""(x_t, times) -> predicted C and noise."""


def scale_times(uniform: Tensor) -> Tensor:
    """Map uniform draws in 0..1 to training times in (SMALLEST_TIME, 1]."""
    return uniform * (1.0 - SMALLEST_TIME) + SMALLEST_TIME


@in_fp32
def add_noise(x0: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    """Return x_t = x0 + C t + sqrt(t) noise with C = -x0."""
    t = _expand_time(time)
    return x0 - x0 * t + t.sqrt() * noise


@in_fp32
def recover_x0(x_t: Tensor, time: Tensor, drift: Tensor, noise: Tensor) -> Tensor:
    """Return the x0 implied by a prediction of C and noise."""
    t = _expand_time(time)
    return x_t - drift * t - t.sqrt() * noise


@in_fp32
def ddm_loss(drift: Tensor, noise: Tensor, x0: Tensor, true_noise: Tensor, time: Tensor, *, weighted: bool) -> Tensor:
    """Return the loss (B,): the mean of squared and absolute errors of C and noise.

    With weights, C counts 2 exp(1 - t), which falls from 5.4 to 2, and noise counts exp(sqrt(t)), which rises from 1 to
    2.7.
    """
    # The true drift is C = -x0.
    errors = (drift + x0, noise - true_noise)
    parts = [(_average(error.square()) + _average(error.abs())) / 2 for error in errors]
    weights = (2 * torch.exp(1 - time), torch.exp(time.sqrt())) if weighted else (1.0, 1.0)
    return weights[0] * parts[0] + weights[1] * parts[1]


def list_times(steps: int, *, split_last: bool = True) -> tuple[float, ...]:
    """Return the time of each network call, from 1 down.

    By default the last of the equal steps is split at SMALLEST_TIME, as in the public sampler: N steps take N + 1
    calls. Without the split, N steps take N calls.
    """
    times = tuple(1 - step / steps for step in range(steps))
    return (*times, SMALLEST_TIME) if split_last else times


@torch.no_grad()
def sample_latents(predict: Predict, start: Tensor, draws: Sequence[Tensor], times: Sequence[float]) -> Tensor:
    """Sample latents from the noise `start`; every step but the last adds one of `draws`."""
    x = start.float()
    for index, now in enumerate(times):
        after = times[index + 1] if index + 1 < len(times) else 0.0
        batch_time = torch.full((len(x),), now, device=x.device)
        drift, noise = (found.float() for found in predict(x, batch_time))
        # The predicted C and noise imply an x0; C := -x0 makes drift and state consistent, as in the public sampler.
        drift = -recover_x0(x, batch_time, drift, noise)
        s = now - after
        # One reverse step of size s; see the module docstring for the formula.
        x = x - drift * s - s / math.sqrt(now) * noise
        if after > 0:
            x = x + math.sqrt(s * after / now) * draws[index]
    return x


def _expand_time(time: Tensor) -> Tensor:
    return time.view(-1, 1, 1, 1)


def _average(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
