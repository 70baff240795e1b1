"""Stage 1: the autoencoder of gain maps, trained against a discriminator from a given step on.

The loss is |error| + error², summed over pixels, plus KL. Two terms of the public loss are left out: LPIPS, whose VGG
was trained on photographs and would have to be downloaded, and a learned log-variance, which the public code does not
pass to its optimizer, so that it stays 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.islands import in_fp32
from halfstep.recompute import set_recompute
from halfstep.tensor_files import take
from halfstep_train.data.loader import Batch
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.models.patch_gan import build_discriminator
from halfstep_train.models.weights import stream_weights
from halfstep_train.workloads.base.vae_trainer import Critic, Outputs, VaeNet, VaeTrainer
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.radio.config import FirstStageConfig, RadioVaeConfig
from halfstep_train.workloads.radio.first_stage import (
    MEASURED_MAPS,
    get_latent_shape,
    get_reduction,
    load_vae_,
    measure_scale,
    write_first_stage,
)
from halfstep_train.workloads.radio.maps import RadioData, find_data, scale_gain, to_signed, to_unsigned
from halfstep_train.workloads.radio.pictures import make_sampler
from halfstep_train.workloads.radio.scores import SCORING, RadioMetrics
from halfstep_train.workloads.radio.vae import CODEC, RadioVAE, ResidualBlock

FRAGILE = (
    "loss.reconstruction: a sum over all pixels exceeds fp16's largest number",
    "loss.kl: exp of the log variance",
    "latents: drawn from mean and log variance",
)


def build_vae(config: RadioVaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`."""
    data = find_data(config)
    model = build_model(config)
    if store is None and config.model.weights:
        load_vae_(model.vae, config.model.weights)
    return make_workload(config, model, data)


def build_model(config: RadioVaeConfig) -> VaeNet:
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


def make_workload(config: RadioVaeConfig, model: VaeNet, data: RadioData) -> Workload:
    """Build the workload from its model and data."""
    trainer = MapVaeTrainer(config)

    return trainer.build_workload(
        model,
        name=config.workload,
        train_samples=data.train,
        val_samples=data.val,
        metrics=RadioMetrics,
        metric="nmse",
        mode="min",
        fragile=FRAGILE,
        blocks={ResidualBlock: ResidualBlock.forward},
        scoring=f"of reconstructions: {SCORING}",
        store={"sizes": config.model.first_stage.model_dump(mode="json"), "image_size": config.data.image_size},
        notes=data.notes,
        val_names=data.list_val_names(),
        about=(*data.about, *_describe_critic(config)),
        sample=make_sampler(data.val, trainer.prepare, trainer.forward),
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


def export(
    weights: Mapping[str, Tensor], config: RadioVaeConfig, store: Mapping[str, Any], folder: Path, device: torch.device
) -> None:
    """Export the autoencoder with its sizes and latent scale, for stage 2."""
    weights, maps = take(weights, "vae.", torch.float32), find_data(config).train
    with torch.device("meta"):
        vae = RadioVAE(FirstStageConfig(**store["sizes"])).eval()
    with stream_weights(vae, weights, device):
        scale = measure_scale(
            vae, maps, count=MEASURED_MAPS, threshold=config.data.threshold, source="this run", device=device
        )
    write_first_stage(weights, store["sizes"], scale, folder)
