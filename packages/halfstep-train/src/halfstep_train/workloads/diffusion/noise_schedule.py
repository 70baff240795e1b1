"""The forward process of diffusion models, x_t = signal · x0 + sigma · noise, always in fp32.

In bf16, alpha_bar would round to 1 for the first ten of DDPM's thousand timesteps: no noise would be added, although
the model has to predict it. Tables, noising and targets are therefore fp32, and only the network's input is cast. The
tables are bit-identical to those of diffusers' schedulers, which sample from the models trained here.

Coefficients and loss weights are looked up outside the compiled region and passed in the batch, so that the region
contains no table. In validation, sample i gets a timestep of bucket i mod NUM_BUCKETS: every bucket is evaluated, and
two runs are compared on the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.islands import fp32_island
from halfstep_train.data import noise
from halfstep_train.workloads.base.workload import Batch
from halfstep_train.workloads.diffusion.config import DiffusionConfig

ScheduleName = Literal["linear", "scaled_linear", "cosine"]
Target = Literal["eps", "v", "sample"]

LARGEST_BETA = 0.999
"""Upper limit of betas in the cosine schedule, whose last beta would be 1 (Nichol and Dhariwal 2021)."""


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """A schedule of `num_steps` timesteps: how much of the image's variance remains after each."""

    name: ScheduleName = "linear"
    num_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    zero_terminal_snr: bool = False
    """Whether the last timestep is pure noise (Lin et al. 2023)."""

    @cached_property
    def alpha_bar(self) -> Tensor:
        """Return the fraction of the image's variance that remains, (num_steps,)."""
        betas = self._make_betas()
        if self.zero_terminal_snr:
            betas = _rescale(betas)
        return torch.cumprod(1 - betas, dim=0)

    @cached_property
    def snr(self) -> Tensor:
        """Return the signal-to-noise ratio (num_steps,): alpha_bar / (1 - alpha_bar)."""
        return self.alpha_bar / (1 - self.alpha_bar)

    def compute_coefficients(self) -> tuple[Tensor, Tensor]:
        """Return signal and sigma of every timestep, (num_steps,) each."""
        return self.alpha_bar.sqrt(), (1 - self.alpha_bar).sqrt()

    def _make_betas(self) -> Tensor:
        """Return the noise variance (num_steps,) that each timestep adds."""
        # Always on the CPU: while costs are estimated, the default device is meta.
        if self.name == "linear":
            return torch.linspace(self.beta_start, self.beta_end, self.num_steps, device="cpu")
        if self.name == "scaled_linear":
            return torch.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_steps, device="cpu") ** 2
        # Nichol & Dhariwal 2021: beta_t = 1 - alpha_bar_t / alpha_bar_{t-1}, capped because alpha_bar ends at 0.
        alpha_bar = [_compute_cosine(step / self.num_steps) for step in range(self.num_steps + 1)]
        ratios = zip(alpha_bar[1:], alpha_bar[:-1], strict=True)
        return torch.tensor([min(1 - later / earlier, LARGEST_BETA) for later, earlier in ratios], device="cpu")


def _compute_cosine(t: float) -> float:
    """Return the unnormalised alpha_bar of the cosine schedule at t in 0..1."""
    # The offset 0.008 keeps the first betas from vanishing.
    return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2


def _rescale(betas: Tensor) -> Tensor:
    """Rescale the schedule so that its last timestep is pure noise and its first is unchanged (Lin et al. 2023)."""
    root = torch.cumprod(1 - betas, dim=0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    # Shift sqrt(alpha_bar) so that the last one is 0, then scale so that the first one is unchanged.
    alpha_bar = ((root - last) * (first / (first - last))) ** 2
    # Undo the cumulative product: alpha_t = alpha_bar_t / alpha_bar_{t-1}.
    return 1 - torch.cat([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])


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


def make_loss_weights(schedule: NoiseSchedule, target: Target, gamma: float | None) -> Tensor:
    """Return the weights (num_steps,) of the squared error: all 1, or min-SNR weights (Hang et al. 2023).

    Min-SNR limits the weight of the error in x0 to gamma, for any target.
    """
    if gamma is None:
        return torch.ones(schedule.num_steps, device="cpu")
    if not gamma > 0:
        raise ConfigError(
            f"min-SNR with gamma={gamma:g}",
            why="every weight, and so the loss, would be 0",
            fix="model.min_snr_gamma=5, or null for no weights",
        )
    # min-SNR weights the error of x0 by min(SNR, gamma). The error of eps is SNR times that of x0, the error of v is
    # SNR + 1 times it, so those targets divide by these factors.
    snr = schedule.snr
    if target == "eps":
        if schedule.zero_terminal_snr:
            raise make_eps_error()
        return (gamma / snr).clamp(max=1)
    bounded = snr.clamp(max=gamma)
    return bounded / (snr + 1) if target == "v" else bounded


def make_eps_error() -> ConfigError:
    """Return the error for target `eps` with a zero-terminal-SNR schedule, whose last x_t is pure noise."""
    return ConfigError(
        "model.target=eps with noise.zero_terminal_snr=true",
        why="the last timestep is pure noise: predicting it teaches nothing, and its SNR of 0 would divide by zero",
        fix="model.target=v",
    )


def _broadcast(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.float().view(-1, *[1] * (like.ndim - 1))


# --- draws for a batch ---


NUM_BUCKETS = 4
"""Ranges of timesteps whose validation errors are reported separately."""


def make_schedule(config: DiffusionConfig) -> NoiseSchedule:
    """Return the noise schedule of a config."""
    settings = config.noise
    return NoiseSchedule(
        name=settings.schedule,
        num_steps=settings.steps,
        beta_start=settings.beta_start,
        beta_end=settings.beta_end,
        zero_terminal_snr=settings.zero_terminal_snr,
    )


class NoiseDraws:
    """Draw timesteps and noise for samples of one shape."""

    def __init__(self, config: DiffusionConfig, shape: Sequence[int]) -> None:
        schedule = make_schedule(config)
        self.shape, self.num_steps, self.config = tuple(shape), schedule.num_steps, config.noise
        self.target: Target = config.model.target
        signal, sigma = schedule.compute_coefficients()
        weights = make_loss_weights(schedule, self.target, config.model.min_snr_gamma)
        self._tables = {"signal": signal, "sigma": sigma, "loss_weight": weights}
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
        drawn = {"timestep": timestep, "noise": eps} | {name: table[timestep] for name, table in tables.items()}
        if self.config.input_perturbation and index is None:
            # Input perturbation (Ning et al. 2023): the network sees more noise than the target has, in training only.
            more = noise.normal(key, num, self.shape, device, stream="perturbation")
            drawn["input_noise"] = eps + self.config.input_perturbation * more
        return drawn

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
