"""The latent of a VAE: a diagonal Gaussian in fp32, and the interface to encode and decode images.

The largest variance, exp(20), is 7,000 times the largest number of fp16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError
from halfstep.islands import fp32_island, to_fp32

SMALLEST_LOGVAR, LARGEST_LOGVAR = -30.0, 20.0
"""Limits of the log-variance, as in LDM and diffusers."""


def split_moments(moments: Tensor) -> tuple[Tensor, Tensor]:
    """Split moments (N, 2C, h, w) into mean and clamped log-variance (N, C, h, w)."""
    mean, logvar = to_fp32(moments).chunk(2, dim=1)
    return mean, logvar.clamp(SMALLEST_LOGVAR, LARGEST_LOGVAR)


def draw_latent(mean: Tensor, logvar: Tensor, noise: Tensor) -> Tensor:
    """Draw a latent with given standard normal noise: mean + sigma · noise (Kingma and Welling 2014)."""
    with fp32_island():
        return mean + torch.exp(0.5 * logvar) * noise


def kl_divergence(mean: Tensor, logvar: Tensor) -> Tensor:
    """Return KL(N(mean, exp(logvar)) || N(0, 1)), summed over each latent: (N,)."""
    with fp32_island():
        return 0.5 * (mean.square() + logvar.exp() - 1 - logvar).flatten(1).sum(1)


def draw_and_decode(
    mean: Tensor, logvar: Tensor, noise: Tensor, decode: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Draw a latent and decode it; return `image`, `latent` and the `kl` divergence (N,)."""
    latent = draw_latent(mean, logvar, noise)
    return {"image": decode(latent), "latent": latent, "kl": kl_divergence(mean, logvar)}


class Codec:
    """Encode and decode with a VAE of ours; a subclass does so for libraries that return other forms."""

    def encode(self, vae: Any, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-variance (N, C, h, w) of the latents, in fp32."""
        found: tuple[Tensor, Tensor] = vae.encode(images)
        return found

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Return images (N, channels, H, W)."""
        found: Tensor = vae.decode(latents)
        return found

    def reconstruct(self, vae: Any, images: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Encode images, draw latents and decode them (`draw_and_decode`)."""
        mean, logvar = self.encode(vae, images)
        return draw_and_decode(mean, logvar, noise, lambda latents: self.decode(vae, latents))

    def decode_means(self, vae: Any, images: Tensor) -> Tensor:
        """Return the images decoded from the means of the latents: reconstructions without random draws."""
        return self.decode(vae, self.encode(vae, images)[0])

    @torch.no_grad()
    def measure_scale(self, vae: Any, images: Iterable[Tensor], *, source: str) -> float:
        """Return 1 / standard deviation of drawn latents over batches of images, which are on the VAE's device,
        in float64 (Rombach et al. 2022)."""
        with fp32_island():
            moments = [self.encode(vae, batch) for batch in images]
        means, logvars = (
            torch.cat([part.double().flatten() for part in parts]) for parts in zip(*moments, strict=True)
        )
        spread = float(means.std(correction=0))
        if not 0 < spread < math.inf:
            raise ModelError(
                f"the latents of {source} have a standard deviation of {spread:g}",
                why="constant latents carry no image, and scaling them to a deviation of 1 would divide by zero",
                fix="train the autoencoder longer, or with a smaller model.kl_weight; radiodiff's "
                "model.scale_factor=0.3 sets the scale",
            )
        # Law of total variance: var(latent) = var(mean) + E[var]. In an autoencoder that is hardly trained, the second
        # term dominates.
        return 1 / math.sqrt(spread**2 + float(logvars.exp().mean()))
