"""The latent of a VAE as a diagonal Gaussian, in fp32: exp(20), its largest variance, is 7,000 times fp16's range."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from halfstep.errors import ModelError
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


def latent_scale(moments: Iterable[tuple[Tensor, Tensor]], *, source: str) -> float:
    """1 / the standard deviation of latents as they are drawn (Rombach et al. 2022), in float64."""
    means, logvars = (torch.cat([part.double().flatten() for part in parts]) for parts in zip(*moments, strict=True))
    spread = float(means.std(correction=0))
    if not 0 < spread < math.inf:
        raise ModelError(
            f"the latents of {source} have a standard deviation of {spread:g}",
            why="one value everywhere holds no image, and scaling it to 1 divides by 0",
            fix="train the autoencoder longer, or with a smaller model.kl_weight; radiodiff's model.scale_factor=0.3 "
            "sets the scale",
        )
    # Of an autoencoder that has hardly trained the draws vary, and not the means.
    return 1 / math.sqrt(spread**2 + float(logvars.exp().mean()))
