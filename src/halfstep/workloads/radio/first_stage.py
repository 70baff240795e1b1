"""The autoencoder as a file: what stage 1 leaves for stage 2, and where stage 2 finds it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from halfstep.data.radio_maps import RadioMaps
from halfstep.disk import write_whole
from halfstep.errors import ConfigError, ModelError
from halfstep.models.posterior import latent_scale
from halfstep.models.radio_names import vae_name
from halfstep.models.radio_vae import RadioVAE
from halfstep.models.weights import load_weights_, read_weights
from halfstep.workloads.radio.config import FirstStageConfig, RadioDiffConfig
from halfstep.workloads.radio.data import signed, unit_gain

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


def load_vae_(vae: RadioVAE, path: Path) -> None:
    """Weights of ours, or of a public checkpoint."""
    weights, _ = read_weights(path)
    named = {own: value for name, value in weights.items() if (own := vae_name(name)) is not None}
    load_weights_(vae, named, source=str(path))


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
    load_vae_(vae, path)
    return FirstStage(
        vae=vae.eval(), source=str(path.resolve()), sizes=facts["sizes"], scale_factor=facts["scale_factor"]
    )


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {"sizes": sizes_of(FirstStageConfig(**found["sizes"])), "scale_factor": found["scale_factor"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot read {path}: {error}", why="it says how large the autoencoder is", fix="export the run again"
        ) from error


def write_first_stage(vae: RadioVAE, sizes: Mapping[str, Any], scale_factor: float, folder: Path) -> None:
    tensors = {name: value.detach().float().cpu().contiguous() for name, value in vae.state_dict().items()}
    save_file(tensors, folder / WEIGHTS)
    write_whole(folder / FACTS, json.dumps({"sizes": dict(sizes), "scale_factor": scale_factor}, indent=1))


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
