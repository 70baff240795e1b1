"""The first stage on disk: its export by stage 1, its import by stage 2, and cached latents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.disk import parse_json, write_atomically
from halfstep.errors import ConfigError, ModelError, format_count
from halfstep.tensor_files import take, write_tensors
from halfstep_train.models.weights import load_weights_file_
from halfstep_train.workloads.base.frozen_vae import (
    MOMENTS,
    Encoding,
    WithColumn,
    describe_pack,
    describe_resume,
    refuse_uncached,
)
from halfstep_train.workloads.radio.config import FirstStageConfig, RadioDiffConfig
from halfstep_train.workloads.radio.maps import RadioData, RadioMaps, RadioTree, find_data, scale_gain, to_signed
from halfstep_train.workloads.radio.names import drop_loss_weights
from halfstep_train.workloads.radio.vae import CODEC, RadioVAE

WEIGHTS, FACTS = "vae.safetensors", "vae.json"
MEASURED_MAPS = 32
"""Training maps over which the scale of the latents is measured when stage 1 ends."""
MEASURED_ON_HOST = 4
"""The same for a first stage without a measured scale; fewer, as a full-size encoder takes seconds per map on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstStage:
    """A trained autoencoder."""

    vae: RadioVAE
    source: str
    sizes: dict[str, Any]
    scale_factor: float | None
    """The latent scale that its run measured; None if it was loaded from a bare weights file."""


def get_reduction(sizes: Mapping[str, Any]) -> int:
    """Return how many pixels of a map one position of its latent covers, along one side."""
    return int(2 ** (len(sizes["multipliers"]) - 1))


def get_latent_shape(sizes: Mapping[str, Any], image_size: int) -> tuple[int, int, int]:
    side = image_size // get_reduction(sizes)
    return sizes["latent_channels"], side, side


def load_vae_(vae: RadioVAE, path: str) -> None:
    """Load weights from our files or from a public checkpoint."""
    load_weights_file_(vae, path, drop_loss_weights)


def open_first_stage(config: RadioDiffConfig) -> FirstStage:
    """Load the autoencoder of `model.vae`: a stage 1 run, its export, or a weights file."""
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
        # A run keeps its export in model/; the export itself may be named, too.
        folder = next((candidate for candidate in (path / "model", path) if (candidate / WEIGHTS).is_file()), None)
        if folder is None:
            raise ModelError(
                f"no first stage in {path}",
                why=f"a radiodiff_vae run writes model/{WEIGHTS} when it ends",
                fix="finish that run (halfstep train --resume RUN), or name a file with weights",
            )
        path, facts = folder / WEIGHTS, _read_facts(folder / FACTS)
    else:
        # A bare file has no sizes: the config gives them, and the scale is measured from the data.
        facts = {"sizes": config.model.first_stage.model_dump(mode="json"), "scale_factor": None}
    vae = RadioVAE(FirstStageConfig(**facts["sizes"]))
    load_vae_(vae, str(path))
    return FirstStage(
        vae=vae.eval(), source=str(path.resolve()), sizes=facts["sizes"], scale_factor=facts["scale_factor"]
    )


def _read_facts(path: Path) -> dict[str, Any]:
    """Read the sizes and the latent scale of an exported first stage."""
    try:
        found = parse_json(path.read_text())
        return {
            "sizes": FirstStageConfig(**found["sizes"]).model_dump(mode="json"),
            "scale_factor": found["scale_factor"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"cannot read {path}: {error}", why="it contains the size of the autoencoder", fix="export the run again"
        ) from error


def write_first_stage(
    weights: Mapping[str, Tensor], sizes: Mapping[str, Any], scale_factor: float, folder: Path
) -> None:
    """Write weights, sizes and latent scale in the form that `open_first_stage` reads."""
    write_tensors(folder / WEIGHTS, take(weights, dtype=torch.float32))
    write_atomically(folder / FACTS, json.dumps({"sizes": dict(sizes), "scale_factor": scale_factor}, indent=1))


def measure_scale(
    vae: RadioVAE, maps: RadioMaps, *, count: int, threshold: float, source: str, device: str | torch.device = "cpu"
) -> float:
    """Return 1 / standard deviation of the latents of some training maps."""
    some = (gain.to(device) for gain in read_some_maps(maps, count, threshold))
    return CODEC.measure_scale(vae, some, source=source)


def read_some_maps(maps: RadioMaps, count: int, threshold: float) -> Iterator[Tensor]:
    """Yield maps (1, 1, H, W) in -1..1, spread over the whole set."""
    # Evenly spaced: samples are sorted by map, and transmitters of one map look alike.
    for index in range(0, len(maps), max(1, len(maps) // count)):
        yield to_signed(scale_gain(maps.sample(index, key=(0, 0, index))["gain"][None], threshold))


LATENTS_CHECKSUM = "latents_sha256"


def add_latents(
    config: RadioDiffConfig, data: RadioData, vae: RadioVAE, store: Mapping[str, Any]
) -> tuple[RadioData, dict[str, Any]]:
    """If latents are cached, add them to the training samples and their checksum to the store."""
    if config.data.cache == "off":
        return data, dict(store)
    cache = make_encoding(config, data.train, vae).open_or_encode()
    line = f"cached in {cache.path}" + describe_resume(cache, str(store.get(LATENTS_CHECKSUM, "")))
    # View 0 is the only one: radio maps are not flipped.
    train = WithColumn(data.train, MOMENTS, cache.moments[:, 0])
    found = replace(data, train=train, about=(*data.about, ("encoded maps", line)))
    return found, {**store, LATENTS_CHECKSUM: cache.checksum}


def make_encoding(config: RadioDiffConfig, maps: RadioMaps, vae: RadioVAE) -> Encoding:
    """Describe the encoding of training maps in fp32. Validation maps are not cached: validation runs the first stage
    anyway, to decode samples."""
    threshold = config.data.threshold
    return Encoding(
        config=config,
        root=RadioTree.open(config.data).root,
        samples=[maps],
        files=[[item.gain for item in maps.items if item.gain is not None]],
        column="gain",
        to_images=lambda gain: to_signed(scale_gain(gain, threshold)),
        vae=vae,
        codec=CODEC,
        settings={"threshold": threshold},
    )


def pack(config: RadioDiffConfig) -> dict[str, object]:
    """Encode all training maps unless a matching cache exists; return the summary for `halfstep pack`."""
    refuse_uncached(config)
    cache = make_encoding(config, find_data(config).train, open_first_stage(config).vae).open_or_encode()
    return describe_pack(cache, f"latents of {format_count(len(cache.moments), 'map')}")
