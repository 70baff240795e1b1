"""Latents of the training maps on disk: the first stage encodes each map once, in fp32, not in every step.

Mean and log variance are kept, so each step still draws its own latent. Validation encodes as ever: it needs the first
stage to decode samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.data.latent_cache import (
    LatentCache,
    WithColumn,
    checksum_of,
    opened_or_written,
    told_of_pack,
    told_of_resume,
)
from halfstep.data.pack_folder import PackingBar
from halfstep.data.packed import fingerprint_of
from halfstep.data.radio_maps import RadioMaps
from halfstep.errors import ConfigError, counted
from halfstep.islands import fp32_island
from halfstep.models.radio_vae import RadioVAE
from halfstep.workloads.radio.config import RadioDiffConfig
from halfstep.workloads.radio.data import RadioData, find_data, signed, tree_of, unit_gain
from halfstep.workloads.radio.first_stage import first_stage
from halfstep.workloads.vae_format import training_device

ENCODED_AT_ONCE = 8
MOMENTS, CHECKSUM = "moments", "latents_sha256"


def with_latents(
    config: RadioDiffConfig, data: RadioData, vae: RadioVAE, store: Mapping[str, Any]
) -> tuple[RadioData, dict[str, Any]]:
    """The data with training latents from disk, and the store with their checksum; both as they are where none were
    asked for."""
    if config.data.cache == "off":
        return data, dict(store)
    cache, is_new = opened_or_made(config, data.train, vae)
    line = f"cached in {cache.path}" + told_of_resume(cache, str(store.get(CHECKSUM, "")), is_new=is_new)
    train = WithColumn(data.train, MOMENTS, cache.moments)
    found = replace(data, train=train, about=(*data.about, ("encoded maps", line)))
    return found, {**store, CHECKSUM: cache.checksum}


def opened_or_made(config: RadioDiffConfig, maps: RadioMaps, vae: RadioVAE) -> tuple[LatentCache, bool]:
    root = tree_of(config.data).root
    path = Path(config.data.cache_file or root / f".halfstep-latents-{config.data.image_size}.safetensors")
    settings = {"size": config.data.image_size, "threshold": config.data.threshold, "vae": checksum_of(vae)}
    mark = fingerprint_of(root, [[item.gain for item in maps.items if item.gain is not None]], settings)
    with PackingBar(path) as bar:
        return opened_or_written(path, mark, len(maps), partial(_encoded, config, maps, vae, bar))


@torch.no_grad()
def _encoded(
    config: RadioDiffConfig, maps: RadioMaps, vae: RadioVAE, progress: Callable[[int, int], None]
) -> Iterator[Tensor]:
    device = training_device(config)
    vae = copy.deepcopy(vae).to(device).eval()
    for start in range(0, len(maps), ENCODED_AT_ONCE):
        places = range(start, min(start + ENCODED_AT_ONCE, len(maps)))
        gain = torch.stack([maps.sample(place, key=(0, 0, place))["gain"] for place in places]).to(device)
        with fp32_island():
            moments = torch.cat(vae.encode(signed(unit_gain(gain, config.data.threshold))), dim=1)
        if not bool(moments.isfinite().all()):
            raise ConfigError(
                f"the first stage gives NaN or infinity for {maps.name_of(start)} or one after it",
                why="latents on disk are computed in fp32, so no format helps",
                fix="another first stage: model.vae=RUN",
            )
        progress(places.stop, len(maps))
        yield moments


def pack(config: RadioDiffConfig) -> dict[str, object]:
    """Encode every training map, unless that was done; what was made, for people and programs."""
    if config.data.cache != "latents":
        raise ConfigError(
            "data.cache is off in this config", why="there are no latents to pack", fix="data.cache=latents"
        )
    cache, is_new = opened_or_made(config, find_data(config).train, first_stage(config).vae)
    return told_of_pack(cache, f"latents of {counted(len(cache.moments), 'map')}", is_new=is_new)
