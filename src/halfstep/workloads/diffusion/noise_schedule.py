"""The forward process of diffusion models: x_t = signal · x0 + sigma · noise, in fp32 whatever the dtype of x0.

In bf16, alpha_bar would round to 1 for the first ten of DDPM's thousand timesteps: no noise would be added, while the
model is asked to predict it. So tables, noising and targets are always fp32, and only the network's input is cast.
Tables are bit-identical to those of diffusers' schedulers, which sample from the models trained here.

Coefficients and loss weights are looked up outside the compiled region and travel in the batch: the region then holds
no table. In validation, sample i gets a timestep of bucket i mod NUM_BUCKETS, so that every bucket is evaluated and two
runs are compared on the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from halfstep.data import noise
from halfstep.errors import ConfigError
from halfstep.islands import fp32_island
from halfstep.workloads.base.workload import Batch
from halfstep.workloads.diffusion.config import DiffusionConfig

ScheduleName = Literal["linear", "scaled_linear", "cosine"]
Target = Literal["eps", "v", "sample"]

LARGEST_BETA = 0.999
"""The largest beta of the cosine schedule, whose last one would be 1 (Nichol and Dhariwal 2021)."""


@dataclass(frozen=True, kw_only=True)
class NoiseSchedule:
    """The share of the image's variance that remains after each of `num_steps` timesteps."""

    name: ScheduleName = "linear"
    num_steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    zero_terminal_snr: bool = False
    """Whether the last step holds no image at all (Lin et al. 2023)."""

    @cached_property
    def alpha_bar(self) -> Tensor:
        """Return (num_steps,): the share of the image's variance that remains."""
        betas = self._betas()
        if self.zero_terminal_snr:
            betas = _rescale(betas)
        return torch.cumprod(1 - betas, dim=0)

    @cached_property
    def snr(self) -> Tensor:
        """Return the signal-to-noise ratio (num_steps,): alpha_bar / (1 - alpha_bar)."""
        return self.alpha_bar / (1 - self.alpha_bar)

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """Return signal and sigma of every timestep, (num_steps,) each."""
        return self.alpha_bar.sqrt(), (1 - self.alpha_bar).sqrt()

    def _betas(self) -> Tensor:
        # On the CPU whatever the default device is: models are built on meta to count what they cost.
        if self.name == "linear":
            return torch.linspace(self.beta_start, self.beta_end, self.num_steps, device="cpu")
        if self.name == "scaled_linear":
            return torch.linspace(self.beta_start**0.5, self.beta_end**0.5, self.num_steps, device="cpu") ** 2
        # Nichol & Dhariwal 2021: beta_t = 1 - alpha_bar_t / alpha_bar_{t-1}, capped because alpha_bar ends at 0.
        left = [_cosine(step / self.num_steps) for step in range(self.num_steps + 1)]
        ratios = zip(left[1:], left[:-1], strict=True)
        return torch.tensor([min(1 - later / earlier, LARGEST_BETA) for later, earlier in ratios], device="cpu")


def _cosine(share: float) -> float:
    # The offset 0.008 keeps the first betas from vanishing.
    return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2


def _rescale(betas: Tensor) -> Tensor:
    """Rescale the schedule so that its last timestep is pure noise and its first is unchanged (Lin et al. 2023)."""
    root = torch.cumprod(1 - betas, dim=0).sqrt()
    first, last = root[0].clone(), root[-1].clone()
    # Shift sqrt(alpha_bar) so that the last one is 0, then scale so that the first one is unchanged.
    alpha_bar = ((root - last) * (first / (first - last))) ** 2
    # Undo the cumulative product: alpha_t = alpha_bar_t / alpha_bar_{t-1}.
    return 1 - torch.cat([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])


def add_noise(x0: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """Return x_t in fp32; `signal` and `sigma` hold one number per sample."""
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
    """Return (num_steps,) weights of the squared error: all 1, or min-SNR (Hang et al. 2023), which bounds the weight
    that any target puts on the error of x0."""
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
            raise eps_without_signal()
        return (gamma / snr).clamp(max=1)
    bounded = snr.clamp(max=gamma)
    return bounded / (snr + 1) if target == "v" else bounded


def eps_without_signal() -> ConfigError:
    """Return the error for target `eps` with a zero-terminal-SNR schedule, whose last x_t is the noise itself."""
    return ConfigError(
        "model.target=eps with noise.zero_terminal_snr=true",
        why="the last timestep is pure noise: predicting it teaches nothing, and its SNR of 0 would divide by zero",
        fix="model.target=v",
    )


def _broadcast(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.float().view(-1, *[1] * (like.ndim - 1))


# --- draws for a batch ---


NUM_BUCKETS = 4


def make_schedule(config: DiffusionConfig) -> NoiseSchedule:
    asked = config.noise
    return NoiseSchedule(
        name=asked.schedule,
        num_steps=asked.steps,
        beta_start=asked.beta_start,
        beta_end=asked.beta_end,
        zero_terminal_snr=asked.zero_terminal_snr,
    )


class NoiseDraws:
    """Draw timesteps and noise for samples of one shape."""

    def __init__(self, config: DiffusionConfig, shape: Sequence[int]) -> None:
        schedule = make_schedule(config)
        self.shape, self.num_steps, self.asked = tuple(shape), schedule.num_steps, config.noise
        self.target: Target = config.model.target
        signal, sigma = schedule.coefficients()
        weights = make_loss_weights(schedule, self.target, config.model.min_snr_gamma)
        self._tables = {"signal": signal, "sigma": sigma, "loss_weight": weights}
        self._placed: dict[torch.device, dict[str, Tensor]] = {}

    def draw(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Batch:
        """Return `timestep`, `noise`, and the coefficients of the model's input and loss; `index` identifies validation
        samples."""
        timestep = self._draw_timesteps(num, key=key, device=device, index=index)
        tables = self._on(device)
        eps = noise.normal(key, num, self.shape, device, stream="eps")
        if self.asked.offset:
            # Offset noise: one more number per channel, so that the model also learns to change the mean brightness.
            channel = noise.normal(key, num, (self.shape[0], 1, 1), device, stream="offset")
            eps = eps + self.asked.offset * channel
        drawn = {"timestep": timestep, "noise": eps} | {name: table[timestep] for name, table in tables.items()}
        if self.asked.input_perturbation and index is None:
            # Input perturbation (Ning et al. 2023): the network sees more noise than the target has, in training only.
            more = noise.normal(key, num, self.shape, device, stream="perturbation")
            drawn["input_noise"] = eps + self.asked.input_perturbation * more
        return drawn

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tables on a device, copied once: a copy per step would make the host wait for the device."""
        if device not in self._placed:
            self._placed[device] = {name: table.to(device) for name, table in self._tables.items()}
        return self._placed[device]

    def _draw_timesteps(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Tensor:
        if index is None:
            return noise.integers(key, num, self.num_steps, device, stream="timestep")
        # Validation: uniform within the bucket of this sample, in whole timesteps.
        starts, bucket = torch.tensor(list_bucket_starts(self.num_steps), device=device), index % NUM_BUCKETS
        share = noise.uniform(key, num, (), device, stream="timestep")
        return starts[bucket] + (share * (starts[bucket + 1] - starts[bucket])).long()


def list_bucket_starts(num_steps: int) -> list[int]:
    """Return the first timestep of each bucket, and the end: t is in bucket t · NUM_BUCKETS // num_steps."""
    # Rounded up, so that t · NUM_BUCKETS // num_steps gives the bucket of every t.
    return [-(-bucket * num_steps // NUM_BUCKETS) for bucket in range(NUM_BUCKETS + 1)]


def list_bucket_names(num_steps: int) -> list[str]:
    """Return "FIRST-LAST" timesteps of each bucket."""
    starts = list_bucket_starts(num_steps)
    return [f"{start}-{end - 1}" for start, end in zip(starts[:-1], starts[1:], strict=True)]
