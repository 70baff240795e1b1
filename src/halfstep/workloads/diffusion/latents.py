"""The frozen VAE of latent diffusion: its format, what it says of images, and that on disk."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data.latent_cache import LatentCache, checksum_of, opened_or_written
from halfstep.data.loader import Samples
from halfstep.data.packed import fingerprint_of
from halfstep.errors import ConfigError, ModelError
from halfstep.islands import fp32_island
from halfstep.models.diffusers_nets import decoded, encoded_moments
from halfstep.models.posterior import drawn, posterior
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import PictureData, square_pictures, unit_images
from halfstep.workloads.workload import Batch

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST_ERROR = 0.02
"""Of a half format's round trip, relative to how much the fp32 one's pixels vary; beyond it the VAE stays fp32."""
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


# --- its format ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A format for the VAE, and why."""

    name: str
    why: str


def chosen_format(vae: Any, samples: Samples, device: torch.device, asked: str, simulated: bool) -> Choice:
    """What `precision.modules: {vae: ...}` asks for, tried on real pictures; a format it overflows in is refused."""
    if asked not in ("auto", *HALF):
        return Choice(name=asked, why="asked for")
    if asked == "auto" and device.type == "cpu" and not simulated:
        return Choice(name="fp32", why="auto: no half format is fast on a CPU")
    images = some_images(samples, device)
    errors = round_trip_errors(vae, images, tuple(HALF) if asked == "auto" else (asked,))
    finite = {name: error for name, error in errors.items() if error is not None}
    if asked != "auto" and not finite:
        raise ConfigError(
            f"precision.modules: {{vae: {asked}}} overflows",
            why=f"the VAE gives NaN or infinity for {len(images)} of your pictures in {asked}, not in fp32",
            fix="precision.modules={vae: auto}, or bf16, or fp32",
        )
    measured = ", ".join(f"{name} {'overflows' if e is None else f'{e:.2%}'}" for name, e in errors.items())
    if asked != "auto":
        return Choice(name=asked, why=f"asked for; error of the round trip: {measured}")
    best = min(finite, key=lambda name: finite[name], default="")
    if not best or finite[best] > LARGEST_ERROR:
        return Choice(name="fp32", why=f"auto: no half format stays below {LARGEST_ERROR:.0%} ({measured})")
    return Choice(name=best, why=f"auto: the smaller error of the round trip ({measured})")


def round_trip_errors(vae: Any, images: Tensor, formats: tuple[str, ...]) -> dict[str, float | None]:
    """How far encoding and decoding in each format is from fp32's, relative to its pixels' spread; None: not finite."""
    vae = copy.deepcopy(vae).to(images.device)
    exact = _round_trip(vae, images, "fp32")
    if not bool(exact.isfinite().all()):
        raise ModelError("the VAE gives NaN or infinity for your pictures in fp32", fix="another VAE: model.vae=DIR")
    spread = float((exact - exact.mean()).square().mean().sqrt()) or 1.0
    errors: dict[str, float | None] = {}
    for name in formats:
        found = _round_trip(vae, images, name)
        error = float((found - exact).square().mean().sqrt()) / spread
        errors[name] = error if bool(found.isfinite().all()) else None
    return errors


@torch.no_grad()
def _round_trip(vae: Any, images: Tensor, format_name: str) -> Tensor:
    with computing_in(format_name, images.device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # a CPU that emulates bf16
        mean, _ = posterior(encoded_moments(vae, images))
        latents = (mean - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor
        return decoded(vae, latents)


def computing_in(format_name: str, device: torch.device) -> AbstractContextManager[Any]:
    """As a frozen part of a run computes: autocast's way, norms in fp32."""
    if format_name not in HALF:
        return fp32_island()
    return torch.autocast(device.type, dtype=HALF[format_name])


def some_images(samples: Samples, device: torch.device, num: int = TRIED_IMAGES) -> Tensor:
    """A few pictures of the whole set, in -1..1."""
    places = [k * len(samples) // min(num, len(samples)) for k in range(min(num, len(samples)))]
    bytes_ = torch.stack([samples.sample(place, key=(0, 0, place))["image"] for place in places])
    return unit_images({"image": bytes_}, key=(), flip=0.0).to(device)


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
