"""The autoencoder as a file: what stage 1 leaves for stage 2, where stage 2 finds it, and its latents on disk.

Of training maps mean and log variance are kept, computed once and in fp32, so each step still draws its own latent.
Validation encodes as ever: it needs the first stage to decode samples.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halfstep.data.latent_cache import (
    LatentCache,
    WithColumn,
    checksum_of,
    opened_or_written,
    told_of_pack,
    told_of_resume,
)
from halfstep.data.packed import PackingBar, compute_fingerprint
from halfstep.disk import parse_json, write_atomically
from halfstep.errors import ConfigError, ModelError, format_count
from halfstep.islands import fp32_island
from halfstep.models.posterior import latent_scale
from halfstep.models.weights import load_weights_file_
from halfstep.workloads.base.vae_format import training_device
from halfstep.workloads.radio.config import FirstStageConfig, RadioDiffConfig, RadioVaeConfig
from halfstep.workloads.radio.data import RadioData, find_data, signed, tree_of, unit_gain
from halfstep.workloads.radio.maps import RadioMaps
from halfstep.workloads.radio.names import in_our_names, vae_name
from halfstep.workloads.radio.vae import RadioVAE

WEIGHTS, FACTS = "vae.safetensors", "vae.json"
MEASURED_MAPS = 32
MEASURED_ON_HOST = 4
"""Maps whose latents give the scale where nobody has measured it: a full-size encoder takes seconds for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStage:
    vae: RadioVAE
    source: str
    sizes: dict[str, Any]
    scale_factor: float | None
    """As its run has measured it."""


def sizes_of(config: FirstStageConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def reduction_of(sizes: Mapping[str, Any]) -> int:
    """Pixels of a map for each place of its latent, along a side."""
    return int(2 ** (len(sizes["multipliers"]) - 1))


def latent_shape(sizes: Mapping[str, Any], image_size: int) -> tuple[int, int, int]:
    side = image_size // reduction_of(sizes)
    return sizes["latent_channels"], side, side


def weights_to_start_from(config: RadioVaeConfig | RadioDiffConfig) -> str:
    """`model.weights`, refused before anything is built where it leads nowhere, as `ckpt_path` of public files does."""
    path = config.model.weights or ""
    if path and not Path(path).is_file():
        raise ModelError(
            f"model.weights={path}: there is no such file",
            why="training would start from it (ckpt_path in a public config)",
            fix="a file that is there, or model.weights=null to start new",
        )
    return path


def load_vae_(vae: RadioVAE, path: str) -> None:
    """Weights of ours, or of a public checkpoint."""
    load_weights_file_(vae, path, partial(in_our_names, vae_name))


def first_stage(config: RadioDiffConfig) -> FirstStage:
    """The autoencoder that `model.vae` names: a run of stage 1, what it exported, or a file with weights."""
    if config.model.vae is None:
        raise ConfigError(
            "radiodiff needs its first stage",
            why="it works on the latents of an autoencoder",
            fix="halfstep train radiodiff_vae --out runs/vae, then model.vae=runs/vae",
        )
    path = Path(config.model.vae)
    if not path.exists():
        raise ModelError(
            f"no first stage at {path}",
            why="model.vae names it",
            fix="model.vae=RUN of halfstep train radiodiff_vae, or a file with weights",
        )
    if path.is_dir():
        folder = next((place for place in (path / "model", path) if (place / WEIGHTS).is_file()), None)
        if folder is None:
            raise ModelError(
                f"no first stage in {path}",
                why=f"a radiodiff_vae run leaves model/{WEIGHTS} when it ends",
                fix="let that run end (halfstep train --resume RUN), or name a file with weights",
            )
        path, facts = folder / WEIGHTS, _facts(folder / FACTS)
    else:
        facts = {"sizes": sizes_of(config.model.first_stage), "scale_factor": None}
    vae = RadioVAE(**facts["sizes"])
    load_vae_(vae, str(path))
    return FirstStage(
        vae=vae.eval(), source=str(path.resolve()), sizes=facts["sizes"], scale_factor=facts["scale_factor"]
    )


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text())
        return {"sizes": sizes_of(FirstStageConfig(**found["sizes"])), "scale_factor": found["scale_factor"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot read {path}: {error}", why="it says how large the autoencoder is", fix="export the run again"
        ) from error


def write_first_stage(vae: RadioVAE, sizes: Mapping[str, Any], scale_factor: float, folder: Path) -> None:
    tensors = {name: value.detach().float().cpu().contiguous() for name, value in vae.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)
    write_atomically(folder / FACTS, json.dumps({"sizes": dict(sizes), "scale_factor": scale_factor}, indent=1))


@torch.no_grad()
def measured_scale(vae: RadioVAE, maps: RadioMaps, *, count: int, threshold: float, source: str) -> float:
    """Of the latents of some training maps."""
    device = next(vae.parameters()).device
    return latent_scale([vae.encode(one.to(device)) for one in some_maps(maps, count, threshold)], source=source)


def some_maps(maps: RadioMaps, count: int, threshold: float) -> Iterator[Tensor]:
    """(1, 1, H, W) in -1..1, of the whole set."""
    for place in range(0, len(maps), max(1, len(maps) // count)):
        yield signed(unit_gain(maps.sample(place, key=(0, 0, place))["gain"][None], threshold))


def round_trip(vae: RadioVAE, maps: Tensor) -> Tensor:
    """Maps as the means of their latents are decoded."""
    return vae.decode(vae.encode(maps)[0])


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
    mark = compute_fingerprint(root, [[item.gain for item in maps.items if item.gain is not None]], settings)
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
    return told_of_pack(cache, f"latents of {format_count(len(cache.moments), 'map')}", is_new=is_new)
