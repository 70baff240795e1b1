"""The diagonal Gaussian that a variational encoder gives: moments, draws, KL. Everything here is fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.islands import in_fp32

LOG_VARIANCE_RANGE = (-30.0, 20.0)
"""LDM's: exp of the upper end is 5e8, which fp16 does not hold; hence fp32."""


@dataclass(frozen=True, slots=True)
class Gaussian:
    """Mean and log variance of each latent value."""

    mean: Tensor
    log_variance: Tensor

    @classmethod
    def of_moments(cls, moments: Tensor) -> Gaussian:
        """Of an encoder's output: mean and log variance stacked along the channels."""
        mean, log_variance = moments.float().chunk(2, dim=1)
        return cls(mean, log_variance.clamp(*LOG_VARIANCE_RANGE))

    def draw(self, noise: Tensor) -> Tensor:
        """One draw, for standard normal `noise`."""
        return self.mean + torch.exp(0.5 * self.log_variance) * noise

    def kl(self) -> Tensor:
        """KL to the standard normal (B), summed over a sample's values."""
        return kl_to_standard_normal(self.mean, self.log_variance)


@in_fp32
def kl_to_standard_normal(mean: Tensor, log_variance: Tensor) -> Tensor:
    return 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).flatten(1).sum(1)
