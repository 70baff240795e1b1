"""Samples of latent diffusion: choose the format of the frozen VAE, and cache latents on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ModelError, format_count
from halfstep_train.data.loader import Samples
from halfstep_train.workloads.base.frozen_vae import (
    CachedLatents,
    LatentCache,
    WithColumn,
    choose_vae_format,
    describe_pack,
    describe_resume,
    hash_weights,
    open_or_encode,
    refuse_uncached,
)
from halfstep_train.workloads.diffusion.config import DiffusionConfig
from halfstep_train.workloads.diffusion.data import (
    DiffusionData,
    make_square_samples,
    open_diffusion_data,
    scale_images,
)
from halfstep_train.workloads.diffusion.diffusers_nets import CODEC
from halfstep_train.workloads.diffusion.networks import (
    Conditions,
    DiffusionParts,
    TextConditions,
    adopt_settings,
    open_parts,
)

TRIED_IMAGES = 8
"""Images on which the formats of the VAE are compared."""


def pick_images(samples: Samples, num: int = TRIED_IMAGES) -> Tensor:
    """Return a few images spread over the whole set, in -1..1."""
    indices = [k * len(samples) // min(num, len(samples)) for k in range(min(num, len(samples)))]
    bytes_ = torch.stack([samples.sample(index, key=(0, 0, index))["image"] for index in indices])
    return scale_images({"image": bytes_}, key=(), flip=0.0)


def open_latents(config: DiffusionConfig, data: DiffusionData, vae: Any, format_name: str) -> LatentCache:
    """Open the latents of all images, first training, then validation; encode them if necessary."""
    splits = (data.train, data.val)
    return open_or_encode(
        config,
        data.root,
        [make_square_samples(listing, config.data.image_size) for listing in splits],
        [listing.paths for listing in splits],
        "image",
        lambda image: scale_images({"image": image}, key=(), flip=0.0),
        vae,
        CODEC,
        format=format_name,
        flips=bool(config.data.flip),
    )


Store = Mapping[str, Any]
Tokens = list[Tensor] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedSamples:
    """Samples of both splits, with facts for the run's header and store."""

    train: Samples
    val: Samples
    about: tuple[tuple[str, str], ...] = ()
    settled: Mapping[str, Any] = field(default_factory=dict)
    store: Mapping[str, str] = field(default_factory=dict)
    """With cached latents: their checksum, that of the VAE, and the VAE's format."""


def open_samples(
    config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts, store: Store | None
) -> OpenedSamples:
    """Open samples of images or cached latents. The VAE's format is chosen once, when a run starts."""
    tokens = None
    listings = (data.train, data.val)
    plain: list[Samples] = [make_square_samples(listing, config.data.image_size) for listing in listings]
    if isinstance(parts.conditions, TextConditions):
        tokens = [parts.conditions.tokenize(captions) for captions in data.captions]
        plain = [WithColumn(part, "tokens", words) for part, words in zip(plain, tokens, strict=True)]
    if parts.vae is None:
        return OpenedSamples(train=plain[0], val=plain[1], about=(("diffuses", "pixels"),))
    about = [("diffuses", f"latents of {parts.vae_source}")]
    modules = dict(config.precision.modules)
    if store is None:
        form, why = choose_format(config, data, parts)
        # Added again below, unless latents are cached: then the VAE is not a module of the run.
        modules.pop("vae", None)
        about.append(("VAE's format", f"{form}: {why}"))
    else:
        # A resumed run keeps the format it was started with, whatever this device would choose.
        form = store.get("vae_format") or modules.pop("vae", "fp32")
    if config.data.cache == "off":
        settled = {"precision.modules": {**modules, "vae": form}}
        return OpenedSamples(train=plain[0], val=plain[1], about=tuple(about), settled=settled)
    found = _open_cached(config, data, parts, form, store, tokens)
    return replace(found, about=(*about, *found.about), settled={"precision.modules": modules})


def choose_format(config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts) -> tuple[str, str]:
    """Choose the format of the VAE: as requested, else fp32 or TF32 if the run uses it, else the more accurate half
    format. Return its name, and the reason."""
    requested, default = config.precision.modules.get("vae"), config.precision.default
    if requested is None and default in ("fp32", "tf32"):
        return default, "the format of the run"
    samples = make_square_samples(data.train, config.data.image_size)
    return choose_vae_format(config, parts.vae, CODEC.decode_means, lambda: pick_images(samples), requested or "auto")


def _open_cached(
    config: DiffusionConfig, data: DiffusionData, parts: DiffusionParts, form: str, store: Store | None, tokens: Tokens
) -> OpenedSamples:
    """Open cached latents as samples; refuse another VAE than that of the stored run."""
    own = hash_weights(parts.vae)
    stored = {name: str((store or {}).get(name, "")) for name in ("latents_sha256", "vae_sha256")}
    if stored["vae_sha256"] not in ("", own):
        raise ModelError(
            f"{parts.vae_source} is not the VAE of this run",
            why=f"SHA-256 of its weights {own[:12]}… instead of {stored['vae_sha256'][:12]}…",
            fix="restore that VAE, or start a new run",
        )
    cache = open_latents(config, data, parts.vae, form)
    line = f"cached in {cache.path}, {_describe_views(cache)}"
    line += describe_resume(cache, stored["latents_sha256"])
    # One cache holds both splits, training images first.
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


def describe_truncated_captions(data: DiffusionData, conditions: Conditions) -> tuple[str, ...]:
    """Return a note if some captions are too long for the text encoder."""
    if not isinstance(conditions, TextConditions):
        return ()
    num = sum(map(conditions.count_truncated, data.captions))
    return (f"truncated: {format_count(num, 'caption')} of more than {conditions.length} tokens",) if num else ()


def pack(config: DiffusionConfig) -> dict[str, object]:
    """Encode all images unless a matching cache exists; return the summary for `halfstep pack`."""
    refuse_uncached(config)
    config = adopt_settings(config).config
    data = open_diffusion_data(config.data, config.model.conditioning)
    parts = open_parts(config, data.classes)
    form, why = choose_format(config, data, parts)
    cache = open_latents(config, data, parts.vae, form)
    images = format_count(len(cache.moments), "image")
    text = f"latents of {images}, {_describe_views(cache)}, encoded in {form} ({why})"
    return describe_pack(cache, text, format=form)


def _describe_views(cache: LatentCache) -> str:
    return "with flips" if cache.moments.shape[1] > 1 else "without augmentation"
