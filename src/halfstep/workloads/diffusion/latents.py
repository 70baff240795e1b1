"""The frozen VAE of latent diffusion: its format, what it says of images, that on disk, and the samples made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data.latent_cache import (
    CachedLatents,
    LatentCache,
    WithColumn,
    checksum_of,
    opened_or_written,
    told_of_pack,
    told_of_resume,
)
from halfstep.data.loader import Samples
from halfstep.data.packed import PackingBar, compute_fingerprint
from halfstep.errors import ConfigError, ModelError, format_count
from halfstep.islands import fp32_island
from halfstep.models.posterior import drawn, posterior
from halfstep.workloads.base.vae_format import Choice, chosen_format, computing_in, training_device
from halfstep.workloads.base.workload import Batch
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import PictureData, open_pictures, square_pictures, unit_images
from halfstep.workloads.diffusion.diffusers_nets import decoded, encoded_moments
from halfstep.workloads.diffusion.networks import Conditions, Parts, TextConditions, open_parts
from halfstep.workloads.diffusion.weights_settings import adopted

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
    return compute_fingerprint(data.root, (data.train.paths, data.val.paths), settings)


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


Store = Mapping[str, Any]
Tokens = list[Tensor] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSamples:
    """Both splits, and what was found on the way."""

    train: Samples
    val: Samples
    about: tuple[tuple[str, str], ...] = ()
    settled: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, str] = field(default_factory=dict)
    """Of latents on disk: their checksum, that of the VAE, and its format."""


def open_samples(config: DiffusionConfig, data: PictureData, parts: Parts, store: Store | None) -> OpenedSamples:
    """As the config asks for them; the VAE's format is decided once, when a run is new."""
    tokens = _tokens(data, parts.conditions)
    train, val = (square_pictures(listing, config.data.image_size) for listing in (data.train, data.val))
    plain: list[Samples] = [train, val]
    if tokens is not None:
        plain = [WithColumn(part, "tokens", words) for part, words in zip(plain, tokens, strict=True)]
    if parts.vae is None:
        return OpenedSamples(train=plain[0], val=plain[1], about=(("diffuses", "pixels"),))
    about = [("diffuses", f"latents of {parts.vae_source}")]
    modules = dict(config.precision.modules)
    if store is None:
        choice = vae_choice(config, data, parts)
        modules.pop("vae", None)
        about.append(("VAE's format", f"{choice.name}: {choice.why}"))
        form = choice.name
    else:
        form = store.get("vae_format") or modules.pop("vae", "fp32")
    if config.data.cache == "off":
        settled = {"precision.modules": {**modules, "vae": form}}
        return OpenedSamples(train=plain[0], val=plain[1], about=tuple(about), settled=settled)
    found = _cached(config, data, parts, form, store, tokens)
    return replace(found, about=(*about, *found.about), settled={"precision.modules": modules})


def vae_choice(config: DiffusionConfig, data: PictureData, parts: Parts) -> Choice:
    """The VAE's format: as asked, else that of a run in fp32 or TF32, else the better half one."""
    asked, default = config.precision.modules.get("vae"), config.precision.default
    if asked is None and default in ("fp32", "tf32"):
        return Choice(name=default, why="as the run")
    device = training_device(config)
    samples = square_pictures(data.train, config.data.image_size)
    return chosen_format(
        parts.vae, round_trip, lambda: some_images(samples, device), device, asked or "auto", config.precision
    )


def _cached(
    config: DiffusionConfig, data: PictureData, parts: Parts, form: str, store: Store | None, tokens: Tokens
) -> OpenedSamples:
    path, own = cache_path(config, data.root), checksum_of(parts.vae)
    stored = {name: str((store or {}).get(name, "")) for name in ("latents_sha256", "vae_sha256")}
    if stored["vae_sha256"] not in ("", own):
        raise ModelError(
            f"{parts.vae_source} is not the VAE of this run",
            why=f"SHA-256 of its weights {own[:12]}… instead of {stored['vae_sha256'][:12]}…",
            fix="put it back, or start a new run",
        )
    with PackingBar(path) as bar:
        cache, is_new = opened_or_made(config, data, parts.vae, form, training_device(config), bar)
    line = f"cached in {path}, " + ("with mirror images" if cache.moments.shape[1] > 1 else "without augmentation")
    line += told_of_resume(cache, stored["latents_sha256"], is_new=is_new)
    split = len(data.train)
    extra: list[dict[str, Tensor]] = [{"label": torch.tensor(part.labels)} for part in (data.train, data.val)]
    for part, words in zip(extra, tokens or (), strict=tokens is not None):
        part["tokens"] = words
    return OpenedSamples(
        train=CachedLatents(cache.moments[:split], flip=config.data.flip, extra=extra[0]),
        val=CachedLatents(cache.moments[split:], extra=extra[1]),
        about=(("latents", line),),
        store={"latents_sha256": cache.checksum, "vae_sha256": own, "vae_format": form},
    )


def _tokens(data: PictureData, conditions: Conditions) -> Tokens:
    if not isinstance(conditions, TextConditions):
        return None
    return [conditions.tokens(captions) for captions in data.captions]


def told_of_captions(data: PictureData, conditions: Conditions) -> tuple[str, ...]:
    """A note where captions are too long."""
    if not isinstance(conditions, TextConditions):
        return ()
    cut = sum(map(conditions.num_cut, data.captions))
    return (f"cut: {format_count(cut, 'caption')} of more than {conditions.length} tokens",) if cut else ()


def pack(config: DiffusionConfig) -> dict[str, object]:
    """Encode every picture, unless that was done; what was made, for people and programs."""
    if config.data.cache != "latents":
        raise ConfigError(
            "data.cache is off in this config", why="there are no latents to pack", fix="data.cache=latents"
        )
    config = adopted(config).config
    data = open_pictures(config.data, config.model.conditioning)
    parts = open_parts(config, data.classes)
    choice = vae_choice(config, data, parts)
    path = cache_path(config, data.root)
    with PackingBar(path) as bar:
        cache, is_new = opened_or_made(config, data, parts.vae, choice.name, training_device(config), bar)
    views = "with mirror images" if cache.moments.shape[1] > 1 else "without augmentation"
    text = f"latents of {format_count(len(cache.moments), 'picture')}, {views}, encoded in {choice.name} ({choice.why})"
    return told_of_pack(cache, text, is_new=is_new, format=choice.name)
