"""The forward process of diffusion models, x_t = signal · x0 + sigma · noise, always in fp32.

In bf16, alpha_bar would round to 1 for the first ten of DDPM's thousand timesteps: no noise would be added, although
the model has to predict it. Tables, noising and targets are therefore fp32, and only the network's input is cast. The
tables are those of diffusers' schedulers, which sample from the models trained here.

Coefficients and loss weights are looked up outside the compiled region and passed in the batch, so that the region
contains no table. In validation, sample i gets a timestep of bucket i mod NUM_BUCKETS: every bucket is evaluated, and
two runs are compared on the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep.islands import fp32_island
from halfstep_train.data import noise
from halfstep_train.workloads.base.workload import Batch
from halfstep_train.workloads.diffusion.config import DiffusionConfig, NoiseConfig
from halfstep_train.workloads.diffusion.diffusers_nets import import_diffusers_class

Target = Literal["eps", "v", "sample"]

THEIR_SCHEDULES = {"linear": "linear", "scaled_linear": "scaled_linear", "cosine": "squaredcos_cap_v2"}
THEIR_TARGETS = {"eps": "epsilon", "v": "v_prediction", "sample": "sample"}


def make_scheduler_config(settings: NoiseConfig, target: Target) -> dict[str, Any]:
    """Return schedule and target as settings of diffusers' schedulers."""
    return {
        "num_train_timesteps": settings.steps,
        "beta_schedule": THEIR_SCHEDULES[settings.schedule],
        "beta_start": settings.beta_start,
        "beta_end": settings.beta_end,
        "prediction_type": THEIR_TARGETS[target],
        "rescale_betas_zero_snr": settings.zero_terminal_snr,
        # Sampling starts at the last timestep, the only one at which pure noise occurs in training (Lin et al. 2023).
        "timestep_spacing": "trailing",
    }


def compute_alpha_bar(settings: NoiseConfig) -> Tensor:
    """Return the fraction of the image's variance that remains at each timestep, (steps,) in fp32."""
    with torch.device("cpu"):  # while costs are estimated, the default device is meta
        scheduler = import_diffusers_class("DDPMScheduler")(**make_scheduler_config(settings, "eps"))
    alpha_bar: Tensor = scheduler.alphas_cumprod
    return alpha_bar


def compute_snr(alpha_bar: Tensor) -> Tensor:
    """Return the signal-to-noise ratio of each timestep."""
    return alpha_bar / (1 - alpha_bar)


def add_noise(x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t in fp32; `signal` and `sigma` are (N,)."""
    with fp32_island():
        return _broadcast(signal, x0) * x0.float() + _broadcast(sigma, x0) * noise.float()


def make_target(kind: Target, x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """Return the target of the network in fp32: the noise, the velocity (Salimans and Ho 2022) or the image."""
    if kind == "eps":
        return noise.float()
    if kind == "sample":
        return x0.float()
    with fp32_island():
        return _broadcast(signal, x0) * noise.float() - _broadcast(sigma, x0) * x0.float()


def make_loss_weights(alpha_bar: Tensor, target: Target, gamma: float | None) -> Tensor:
    """Return the weights (steps,) of the squared error: all 1, or min-SNR weights (Hang et al. 2023).

    Min-SNR limits the weight of the error in x0 to gamma, for any target.
    """
    if gamma is None:
        return torch.ones_like(alpha_bar)
    # min-SNR weights the error of x0 by min(SNR, gamma). The error of eps is SNR times that of x0, the error of v is
    # SNR + 1 times it, so those targets divide by these factors.
    snr = compute_snr(alpha_bar)
    if target == "eps":
        return (gamma / snr).clamp(max=1)
    bounded = snr.clamp(max=gamma)
    return bounded / (snr + 1) if target == "v" else bounded


def _broadcast(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.float().view(-1, *[1] * (like.ndim - 1))


# --- draws for a batch ---


NUM_BUCKETS = 4
"""Ranges of timesteps whose validation errors are reported separately."""


class NoiseDraws:
    """Draw timesteps and noise for samples of one shape."""

    def __init__(self, config: DiffusionConfig, shape: Sequence[int]) -> None:
        alpha_bar = compute_alpha_bar(config.noise)
        self.shape, self.num_steps, self.config = tuple(shape), len(alpha_bar), config.noise
        self._tables = {
            "signal": alpha_bar.sqrt(),
            "sigma": (1 - alpha_bar).sqrt(),
            "loss_weight": make_loss_weights(alpha_bar, config.model.target, config.model.min_snr_gamma),
        }
        self._on_device: dict[torch.device, dict[str, Tensor]] = {}

    def draw(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Batch:
        """Return `timestep`, `noise`, and the coefficients of the model's input and loss.

        `index` holds the indices of validation samples; None in training.
        """
        timestep = self._draw_timesteps(num, key=key, device=device, index=index)
        tables = self._get_tables(device)
        eps = noise.normal(key, num, self.shape, device, stream="eps")
        if self.config.offset:
            # Offset noise: one more random number per channel, so that the model learns to change the mean brightness.
            channel = noise.normal(key, num, (self.shape[0], 1, 1), device, stream="offset")
            eps = eps + self.config.offset * channel
        return {"timestep": timestep, "noise": eps} | {name: table[timestep] for name, table in tables.items()}

    def _get_tables(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tables on a device. They are copied once: a copy in every step would synchronise."""
        if device not in self._on_device:
            self._on_device[device] = {name: table.to(device) for name, table in self._tables.items()}
        return self._on_device[device]

    def _draw_timesteps(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Tensor:
        if index is None:
            return noise.integers(key, num, self.num_steps, device, stream="timestep")
        # Validation: uniform within the bucket of this sample, in whole timesteps.
        starts, bucket = torch.tensor(list_bucket_starts(self.num_steps), device=device), index % NUM_BUCKETS
        fraction = noise.uniform(key, num, (), device, stream="timestep")
        return starts[bucket] + (fraction * (starts[bucket + 1] - starts[bucket])).long()


def list_bucket_starts(num_steps: int) -> list[int]:
    """Return the first timestep of each bucket, and the end of the last one."""
    # Rounded up, so that t · NUM_BUCKETS // num_steps gives the bucket of every t.
    return [-(-bucket * num_steps // NUM_BUCKETS) for bucket in range(NUM_BUCKETS + 1)]


def list_bucket_names(num_steps: int) -> list[str]:
    """Return a name for each bucket: its first and last timestep, as "FIRST-LAST"."""
    starts = list_bucket_starts(num_steps)
    return [f"{start}-{end - 1}" for start, end in zip(starts[:-1], starts[1:], strict=True)]
