"""Decoupled diffusion with a constant drift (Huang et al. 2024), as RadioDiff trains it. All of it is fp32.

A latent x0 fades along C = -x0 while noise grows: x_t = x0 + C t + sqrt(t) eps for t in (0, 1]. The network predicts C
and eps. Backwards by s: with x0 = x_t - C t - sqrt(t) eps and C := -x0,
x_{t-s} = x_t - C s - s / sqrt(t) eps + sqrt(s (t - s) / t) draw; the last step has s = t and no draw.
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
    """Training times in (smallest, 1], for uniform draws in 0..1."""
    return uniform * (1.0 - smallest) + smallest


@in_fp32
def add_noise(x0: Tensor, time: Tensor, noise: Tensor) -> Tensor:
    t = _as_column(time)
    return x0 - x0 * t + t.sqrt() * noise


@in_fp32
def recover_x0(x_t: Tensor, time: Tensor, drift: Tensor, noise: Tensor) -> Tensor:
    """The x0 that a prediction of C and noise stands for."""
    t = _as_column(time)
    return x_t - drift * t - t.sqrt() * noise


@in_fp32
def ddm_loss(
    drift: Tensor, noise: Tensor, x0: Tensor, true_noise: Tensor, time: Tensor, *, weighted: bool, with_l1: bool
) -> Tensor:
    """Loss (B): errors of C and of the noise, squared, or squared and absolute by halves.

    The weights 2 exp(1 - t) in 2..5.4 and exp(sqrt(t)) in 1..2.7 favour C at early times and noise at late ones.
    """
    errors = (drift + x0, noise - true_noise)
    parts = [_mean(error.square()) for error in errors]
    if with_l1:
        parts = [(part + _mean(error.abs())) / 2 for part, error in zip(parts, errors, strict=True)]
    weights = (2 * torch.exp(1 - time), torch.exp(time.sqrt())) if weighted else (1.0, 1.0)
    return weights[0] * parts[0] + weights[1] * parts[1]


def list_times(steps: int, *, split_last: bool = True, smallest: float = SMALLEST_TIME) -> tuple[float, ...]:
    """The time of each network call, from 1 down.

    By the public sampler's default the last of the equal steps is split, and its end of `smallest` is a call of its
    own: N steps are N + 1 calls. Without the split N steps are N calls.
    """
    times = tuple(1 - step / steps for step in range(steps))
    return (*times, smallest) if split_last else times


@torch.no_grad()
def sample_latents(predict: Predict, start: Tensor, draws: Sequence[Tensor], times: Sequence[float]) -> Tensor:
    """The latent that `start` becomes; one draw a call but the last, whose draw would not count."""
    x = start.float()
    for place, now in enumerate(times):
        after = times[place + 1] if place + 1 < len(times) else 0.0
        batch_time = torch.full((len(x),), now, device=x.device)
        drift, noise = (found.float() for found in predict(x, batch_time))
        drift = -recover_x0(x, batch_time, drift, noise)
        s = now - after
        x = x - drift * s - s / math.sqrt(now) * noise
        if after > 0:
            x = x + math.sqrt(s * after / now) * draws[place]
    return x


def _as_column(time: Tensor) -> Tensor:
    return time.view(-1, 1, 1, 1)


def _mean(values: Tensor) -> Tensor:
    return values.flatten(1).mean(1)
