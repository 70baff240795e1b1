"""What is drawn for a batch of diffusion: timesteps, noise and all that follows from them, in fp32, by the key alone.

Coefficients and weights are looked up here, outside the compiled region, and ride in the batch: the region then holds
no table. In validation sample i belongs to bucket i mod NUM_BUCKETS of the timesteps, so that every bucket is seen and
two runs compare noise by noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep.data import noise
from halfstep.workloads.base.workload import Batch
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.noise_schedule import NoiseSchedule, Target, loss_weights

NUM_BUCKETS = 4


def schedule_of(config: DiffusionConfig) -> NoiseSchedule:
    asked = config.noise
    return NoiseSchedule(
        name=asked.schedule,
        num_steps=asked.steps,
        beta_start=asked.beta_start,
        beta_end=asked.beta_end,
        zero_terminal_snr=asked.zero_terminal_snr,
    )


class Noising:
    """Draws for samples of one shape."""

    def __init__(self, config: DiffusionConfig, shape: Sequence[int]) -> None:
        schedule = schedule_of(config)
        self.shape, self.num_steps, self.asked = tuple(shape), schedule.num_steps, config.noise
        self.target: Target = config.model.target
        signal, sigma = schedule.coefficients()
        weights = loss_weights(schedule, self.target, config.model.min_snr_gamma)
        self._tables = {"signal": signal, "sigma": sigma, "loss_weight": weights}
        self._placed: dict[torch.device, dict[str, Tensor]] = {}

    def draw(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Batch:
        """`timestep`, `noise` and what the model's input and loss need; `index` says which validation samples."""
        timestep = self.timesteps(num, key=key, device=device, index=index)
        tables = self._on(device)
        eps = noise.normal(key, num, self.shape, device, stream="eps")
        if self.asked.offset:
            channel = noise.normal(key, num, (self.shape[0], 1, 1), device, stream="offset")
            eps = eps + self.asked.offset * channel
        drawn = {"timestep": timestep, "noise": eps} | {name: table[timestep] for name, table in tables.items()}
        if self.asked.input_perturbation and index is None:
            more = noise.normal(key, num, self.shape, device, stream="perturbation")
            drawn["input_noise"] = eps + self.asked.input_perturbation * more
        return drawn

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """The tables there, copied once: a copy from the host would wait for the device at every step."""
        if device not in self._placed:
            self._placed[device] = {name: table.to(device) for name, table in self._tables.items()}
        return self._placed[device]

    def timesteps(self, num: int, *, key: tuple[int, ...], device: torch.device, index: Tensor | None) -> Tensor:
        if index is None:
            return noise.integers(key, num, self.num_steps, device, stream="timestep")
        starts, bucket = torch.tensor(bucket_starts(self.num_steps), device=device), index % NUM_BUCKETS
        share = noise.uniform(key, num, (), device, stream="timestep")
        return starts[bucket] + (share * (starts[bucket + 1] - starts[bucket])).long()


def bucket_starts(num_steps: int) -> list[int]:
    """First timestep of each bucket, and the end: t is in bucket t · NUM_BUCKETS // num_steps."""
    return [-(-bucket * num_steps // NUM_BUCKETS) for bucket in range(NUM_BUCKETS + 1)]


def bucket_names(num_steps: int) -> list[str]:
    """First and last timestep of each bucket."""
    starts = bucket_starts(num_steps)
    return [f"{start}-{end - 1}" for start, end in zip(starts[:-1], starts[1:], strict=True)]
