"""The frozen VAE of latent diffusion: its format, what it says of images, and that on disk."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data.latent_cache import LatentCache, checksum_of, opened_or_written
from halfstep.data.loader import Samples
from halfstep.data.packed import fingerprint_of
from halfstep.errors import ConfigError
from halfstep.islands import fp32_island
from halfstep.models.diffusers_nets import decoded, encoded_moments
from halfstep.models.posterior import drawn, posterior
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import PictureData, square_pictures, unit_images
from halfstep.workloads.vae_format import computing_in
from halfstep.workloads.workload import Batch

TRIED_IMAGES = 8
ENCODED_AT_ONCE = 8


class Encoder:
    """Latents as the U-Net knows them, drawn from moments: shifted and scaled, fp32."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.scale, self.shift = float(vae.config.scaling_factor), float(vae.config.shift_factor or 0.0)

    def __call__(self, batch: Batch) -> Tensor:
        moments = batch.get("moments")
        if moments is None:
            with torch.no_grad(), fp32_island():
                moments = encoded_moments(self.vae, batch["image"])
        mean, logvar = posterior(moments)
        return (drawn(mean, logvar, batch["posterior_noise"]) - self.shift) * self.scale


def some_images(samples: Samples, device: torch.device, num: int = TRIED_IMAGES) -> Tensor:
    """A few pictures of the whole set, in -1..1."""
    places = [k * len(samples) // min(num, len(samples)) for k in range(min(num, len(samples)))]
    bytes_ = torch.stack([samples.sample(place, key=(0, 0, place))["image"] for place in places])
    return unit_images({"image": bytes_}, key=(), flip=0.0).to(device)


def round_trip(vae: Any, images: Tensor) -> Tensor:
    """Images as the means of their latents are decoded."""
    mean, _ = posterior(encoded_moments(vae, images))
    return decoded(vae, (mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor)


# --- on disk ---


def cache_path(config: DiffusionConfig, root: Path) -> Path:
    if config.data.cache_file:
        return Path(config.data.cache_file)
    return root / f".halfstep-latents-{config.data.image_size}.safetensors"


def opened_or_made(
    config: DiffusionConfig,
    data: PictureData,
    vae: Any,
    format_name: str,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[LatentCache, bool]:
    """The moments of all pictures, training ones first, and whether they were made now."""
    mark, num = fingerprint(config, data, vae, format_name), len(data.train) + len(data.val)
    views = 2 if config.data.flip else 1
    rows = partial(_encoded, config, data, vae, format_name, device, views, progress)
    return opened_or_written(cache_path(config, data.root), mark, num, rows, format=format_name)


def fingerprint(config: DiffusionConfig, data: PictureData, vae: Any, format_name: str) -> str:
    """Changes with the pictures, their size, the mirror images, the VAE and its format."""
    settings = {
        "size": config.data.image_size,
        "flips": bool(config.data.flip),
        "vae": checksum_of(vae),
        "format": format_name,
    }
    return fingerprint_of(data.root, (data.train.paths, data.val.paths), settings)


@torch.no_grad()
def _encoded(
    config: DiffusionConfig,
    data: PictureData,
    vae: Any,
    format_name: str,
    device: torch.device,
    views: int,
    progress: Callable[[int, int], None],
) -> Iterator[Tensor]:
    vae = copy.deepcopy(vae).to(device)
    listings = [square_pictures(listing, config.data.image_size) for listing in (data.train, data.val)]
    total, done = sum(map(len, listings)), 0
    for samples in listings:
        for start in range(0, len(samples), ENCODED_AT_ONCE):
            places = range(start, min(start + ENCODED_AT_ONCE, len(samples)))
            image = torch.stack([samples.sample(k, key=(0, 0, k))["image"] for k in places]).to(device)
            pixels = unit_images({"image": image}, key=(), flip=0.0)
            with computing_in(format_name, device):
                seen = [pixels, pixels.flip(-1)][:views]
                moments = torch.stack([encoded_moments(vae, one) for one in seen], dim=1).float()
            if not bool(moments.isfinite().all()):
                raise ConfigError(
                    f"the VAE gives NaN or infinity in {format_name} for {samples.name_of(start)} or one after it",
                    fix="precision.modules={vae: fp32}, or leave the picture out",
                )
            done += len(places)
            progress(done, total)
            yield moments
