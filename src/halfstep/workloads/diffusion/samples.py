"""Samples of a diffusion model: pictures, or their latents from disk; and the format of the VAE that made them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.data.latent_cache import CachedLatents, WithColumn, checksum_of, told_of_resume
from halfstep.data.loader import Samples
from halfstep.data.pack_folder import PackingBar
from halfstep.errors import ModelError
from halfstep.workloads.diffusion.conditions import Conditions, TextConditions
from halfstep.workloads.diffusion.config import DiffusionConfig
from halfstep.workloads.diffusion.data import PictureData, square_pictures
from halfstep.workloads.diffusion.latents import cache_path, opened_or_made, round_trip, some_images
from halfstep.workloads.diffusion.networks import Parts
from halfstep.workloads.vae_format import Choice, chosen_format, training_device

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
    """The VAE's format: as asked, fp32 in a run that computes so, else the better half one."""
    is_full = config.precision.default in ("fp32", "tf32")
    asked = config.precision.modules.get("vae", "fp32" if is_full else "auto")
    device, simulated = training_device(config), config.precision.simulate
    samples = square_pictures(data.train, config.data.image_size)
    return chosen_format(
        parts.vae, round_trip, lambda: some_images(samples, device), device, asked, simulated=simulated
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
