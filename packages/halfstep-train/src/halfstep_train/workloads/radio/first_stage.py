"""Stage 1, the autoencoder of gain maps: its training, its export, its import by stage 2, and cached latents.

It is trained against a discriminator from a given step on. The loss is |error| + error², summed over pixels, plus KL.
Two terms of the public loss are left out: LPIPS, whose VGG was trained on photographs and would have to be downloaded,
and a learned log-variance, which the public code does not pass to its optimizer, so that it stays 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.disk import parse_json, write_atomically
from halfstep.errors import ConfigError, ModelError
from halfstep.islands import in_fp32
from halfstep.recompute import set_recompute
from halfstep.tensor_files import LazyTensors, take, write_tensors
from halfstep_train.data.loader import Batch
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.models.patch_gan import build_discriminator
from halfstep_train.models.weights import load_weights_file_
from halfstep_train.workloads.base.frozen_vae import (
    MOMENTS,
    Critic,
    LatentCache,
    Outputs,
    VaeNet,
    VaeTrainer,
    WithColumn,
    describe_resume,
    open_or_encode,
)
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.workload import OpenedData, Workload
from halfstep_train.workloads.radio.config import FirstStageConfig, RadioDiffConfig, RadioVaeConfig
from halfstep_train.workloads.radio.maps import (
    RadioMaps,
    RadioTree,
    find_data,
    make_sampler,
    scale_gain,
    to_signed,
    to_unsigned,
)
from halfstep_train.workloads.radio.names import drop_loss_weights
from halfstep_train.workloads.radio.scores import SCORING, RadioMetrics
from halfstep_train.workloads.radio.vae import CODEC, RadioVAE, ResidualBlock

FRAGILE = (
    "loss.reconstruction: a sum over all pixels exceeds fp16's largest number",
    "loss.kl: exp of the log variance",
    "latents: drawn from mean and log variance",
)


def build_vae(config: RadioVaeConfig, store: Store | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    data = find_data(config)
    model = build_vae_model(config)
    if store is None and config.model.weights:
        load_vae_(model.vae, config.model.weights)
    return make_vae_workload(config, model, data)


def build_vae_model(config: RadioVaeConfig) -> VaeNet:
    """Build the autoencoder and, if it takes part in training, its discriminator."""
    sizes = config.model.first_stage.model_dump(mode="json")
    divide_side(config.data.image_size, get_reduction(sizes), LEVELS_HALVE)
    vae, critic = RadioVAE(config.model.first_stage), None
    if has_critic(config):
        critic = build_discriminator(config.data.image_size, image_channels=1)
    model = VaeNet(vae, CODEC, critic)
    set_recompute(model, "blocks" if config.train.activation_checkpointing else "none")
    return model


def has_critic(config: RadioVaeConfig) -> bool:
    """True if the discriminator starts before the last step; without one, the loss can be compiled."""
    settings, last = config.model.discriminator, config.train.max_steps
    return settings.enabled and (last == 0 or settings.start < last)


def make_vae_workload(config: RadioVaeConfig, model: VaeNet, data: OpenedData) -> Workload:
    """Build the workload from its model and data."""
    trainer = MapVaeTrainer(config)
    store = {"sizes": config.model.first_stage.model_dump(mode="json"), "image_size": config.data.image_size}
    data = replace(data, store=store, about=(*data.about, *_describe_critic(config)))
    return trainer.build_workload(
        model,
        name=config.workload,
        metrics=RadioMetrics,
        metric="nmse",
        mode="min",
        fragile=FRAGILE,
        blocks={ResidualBlock: ResidualBlock.forward},
        scoring=f"of reconstructions: {SCORING}",
        sample=make_sampler(data.val, trainer.prepare, trainer.forward),
        **data.to_fields(),
    )


def _describe_critic(config: RadioVaeConfig) -> tuple[tuple[str, str], ...]:
    settings = config.model.discriminator
    if has_critic(config):
        text = f"from step {settings.start:,}; the autoencoder's loss computes gradients itself and is not compiled"
        return (("discriminator", text),)
    why = "starts after the last step" if settings.enabled else "model.discriminator.enabled=false"
    return (("discriminator", f"none: {why}"),)


class MapVaeTrainer(VaeTrainer):
    """VAE training with the loss |error| + error², summed over pixels."""

    def __init__(self, config: RadioVaeConfig) -> None:
        side, settings = config.data.image_size, config.model.discriminator
        # The reconstruction loss is a sum over side² pixels, the adversarial one a mean: these scales bring both
        # gradients into the range of fp16.
        critic = Critic(start=settings.start, weight=settings.weight, scales=(1 / side, float(side)))
        super().__init__(
            phase="autoencoder",
            latent_shape=get_latent_shape(config.model.first_stage.model_dump(mode="json"), side),
            kl_weight=config.model.kl_weight,
            critic=critic if has_critic(config) else None,
        )
        self.threshold = config.data.threshold

    def make_images(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        truth = scale_gain(batch["gain"], self.threshold)
        return {"truth": truth, "image": to_signed(truth)}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Also return the errors of each sample for the metrics and, in validation, the map in 0..1."""
        found = super().forward(model, batch)
        found |= _measure_errors(found["image"], batch["image"], found["kl"])
        return found if model.training else found | {"map": to_unsigned(found["image"])}

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        return sum_errors(outputs["image"], batch["image"]).mean()


@in_fp32
def _measure_errors(reconstruction: Tensor, image: Tensor, kl: Tensor) -> dict[str, Tensor]:
    return {"error_l1": (image - reconstruction).detach().flatten(1).abs().mean(1), "error_kl": kl.detach()}


@in_fp32
def sum_errors(reconstruction: Tensor, image: Tensor) -> Tensor:
    """Return |error| + error², summed over the pixels of each map: (N,)."""
    error = (image - reconstruction).flatten(1)
    return (error.abs() + error.square()).sum(1)


def export_vae(weights: LazyTensors, config: RadioVaeConfig, store: Store, folder: Path, device: torch.device) -> None:
    """Export the autoencoder with its sizes and latent scale, for stage 2."""
    weights, maps = take(weights, "vae.", torch.float32), find_data(config).train
    vae = RadioVAE(FirstStageConfig(**store["sizes"])).eval()
    vae.load_state_dict(weights)
    scale = measure_scale(
        vae.to(device), maps, count=MEASURED_MAPS, threshold=config.data.threshold, source="this run", device=device
    )
    write_first_stage(weights, store["sizes"], scale, folder)


# --- the first stage on disk ---

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
    if path.is_dir():
        # A run keeps its export in model/; the export itself may be named, too.
        folder = next((candidate for candidate in (path / "model", path) if (candidate / WEIGHTS).is_file()), None)
        if folder is None:
            raise ModelError(
                f"no first stage in {path}",
                why=f"a radiodiff_vae run writes model/{WEIGHTS} when it ends",
                fix="finish that run (halfstep train --resume RUN), or give a file with weights",
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
            f"cannot read {path}: {error}", why="it stores the size of the autoencoder", fix="export the run again"
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
    config: RadioDiffConfig, data: OpenedData, vae: RadioVAE, store: Mapping[str, Any]
) -> tuple[OpenedData, dict[str, Any]]:
    """If latents are cached, add them to the training samples and their checksum to the store."""
    if config.data.cache == "off":
        return data, dict(store)
    cache = open_latents(config, data.train, vae)
    line = f"cached in {cache.path}" + describe_resume(cache, str(store.get(LATENTS_CHECKSUM, "")))
    # View 0 is the only one: radio maps are not flipped.
    train = WithColumn(data.train, MOMENTS, cache.moments[:, 0])
    found = replace(data, train=train, about=(*data.about, ("encoded maps", line)))
    return found, {**store, LATENTS_CHECKSUM: cache.checksum}


def open_latents(config: RadioDiffConfig, maps: RadioMaps, vae: RadioVAE) -> LatentCache:
    """Open the latents of training maps in fp32; encode them if necessary. Validation maps are not cached: validation
    runs the first stage anyway, to decode samples."""
    threshold, root = config.data.threshold, RadioTree.open(config.data).root
    files = [item.gain for item in maps.items if item.gain is not None]

    def to_images(gain: Tensor) -> Tensor:
        return to_signed(scale_gain(gain, threshold))

    return open_or_encode(config, root, [maps], [files], "gain", to_images, vae, CODEC, threshold=threshold)
