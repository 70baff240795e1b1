"""The latent of a VAE as a diagonal Gaussian, in fp32: exp(20), its largest variance, is 7,000 times fp16's range."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.islands import fp32_island, to_fp32

SMALLEST_LOGVAR, LARGEST_LOGVAR = -30.0, 20.0


def posterior(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log-variance (N, C, h, w) of moments (N, 2C, h, w)."""
    mean, logvar = to_fp32(moments).chunk(2, dim=1)
    return mean, logvar.clamp(SMALLEST_LOGVAR, LARGEST_LOGVAR)


def drawn(mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """A sample of it; the noise comes from outside."""
    with fp32_island():
        return mean + torch.exp(0.5 * logvar) * noise


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """(N,): from the standard normal distribution, summed over a latent."""
    with fp32_island():
        return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).flatten(1).sum(1)
