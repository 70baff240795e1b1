"""Stage 1: the autoencoder of gain maps, and from a step on a discriminator against it.

The loss is a sum over pixels, |error| + error², plus KL. The public loss adds LPIPS, whose VGG was trained on
photographs and has to be downloaded; it is left out. Its log-variance is not in the public optimizer and stays
0, so it is left out as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.loader import Batch
from halfstep.errors import ConfigError
from halfstep.islands import in_fp32
from halfstep.models.patch_gan import PatchGan, refuse_too_small
from halfstep.models.posterior import kl_divergence
from halfstep.models.recompute import set_recompute
from halfstep.workloads.base.adversarial import adversarial_phases, adversarial_term, judged
from halfstep.workloads.base.phase import Phase
from halfstep.workloads.base.scheduled import Scheduled
from halfstep.workloads.base.workload import Workload
from halfstep.workloads.radio.config import RadioVaeConfig
from halfstep.workloads.radio.data import RadioData, find_data, signed, unit_gain, unsigned
from halfstep.workloads.radio.first_stage import (
    MEASURED_MAPS,
    latent_shape,
    load_vae_,
    measured_scale,
    reduction_of,
    sizes_of,
    weights_to_start_from,
    write_first_stage,
)
from halfstep.workloads.radio.pictures import sample_pictures
from halfstep.workloads.radio.scores import SCORING, RadioMetrics
from halfstep.workloads.radio.vae import RadioVAE, ResidualBlock

FRAGILE = (
    "loss.reconstruction: a sum over all pixels passes fp16's largest number",
    "loss.kl: exp of the log variance",
    "latents: drawn from mean and log variance",
)


class Stage1(nn.Module):
    """The autoencoder, and the discriminator where there is one."""

    def __init__(self, vae: RadioVAE, discriminator: PatchGan | None) -> None:
        super().__init__()
        self.vae, self.discriminator = vae, discriminator


def build_vae(config: RadioVaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`."""
    weights = weights_to_start_from(config) if store is None else ""
    data = find_data(config)
    model = stage1(config)
    if weights:
        load_vae_(model.vae, weights)
    return workload_of(config, model, data)


def stage1(config: RadioVaeConfig) -> Stage1:
    sizes = sizes_of(config.model.first_stage)
    refuse_uneven(config.data.image_size, reduction_of(sizes))
    model = Stage1(RadioVAE(**sizes), critic_of(config) if has_critic(config) else None)
    set_recompute(model, "blocks" if config.train.activation_checkpointing else "none")
    return model


def critic_of(config: RadioVaeConfig) -> PatchGan:
    wish = config.model.discriminator
    refuse_too_small(config.data.image_size, wish.num_halvings, "model.discriminator.num_halvings")
    return PatchGan(image_channels=1, channels=wish.channels, num_halvings=wish.num_halvings)


def refuse_uneven(side: int, divisor: int) -> None:
    if side % divisor:
        near = max(1, round(side / divisor)) * divisor
        raise ConfigError(
            f"data.image_size={side} cannot be halved as often as the model does",
            why=f"it needs a multiple of {divisor}",
            fix=f"data.image_size={near}",
        )


def has_critic(config: RadioVaeConfig) -> bool:
    """One that would start after the last step is not built: then the loss is plain, and compiles."""
    wish, last = config.model.discriminator, config.train.max_steps
    return wish.enabled and (last == 0 or wish.start < last)


def workload_of(config: RadioVaeConfig, model: Stage1, data: RadioData) -> Workload:
    steps = Reconstruction(config)

    def pictures(model: nn.Module, key: tuple[int, ...]) -> dict[str, Any]:
        return sample_pictures(data.val, model, workload, key)

    workload = Workload(
        name=config.workload,
        model=model,
        train_samples=data.train,
        val_samples=data.val,
        prepare=steps.prepare,
        forward=steps.forward,
        loss=steps.loss,
        metrics=RadioMetrics,
        metric="nmse",
        mode="min",
        fragile=FRAGILE,
        blocks={ResidualBlock: ResidualBlock.forward},
        scoring=f"of reconstructions: {SCORING}",
        store={"sizes": steps.sizes, "image_size": config.data.image_size},
        notes=data.notes,
        val_names=data.val_names(),
        about=(*data.about, *_about_critic(config)),
        phases=steps.phases(),
        values={"started": steps.started} if has_critic(config) else {},
        ema_parts=("vae",),
        sample=pictures,
    )
    return workload


def _about_critic(config: RadioVaeConfig) -> tuple[tuple[str, str], ...]:
    wish = config.model.discriminator
    if has_critic(config):
        said = f"from step {wish.start:,}; the autoencoder's loss takes gradients itself and is not compiled"
        return (("discriminator", said),)
    why = "starts after the last step" if wish.enabled else "model.discriminator.enabled=false"
    return (("discriminator", f"none: {why}"),)


class Reconstruction:
    """One step's arithmetic: bytes to maps, what comes back of them, and the losses."""

    def __init__(self, config: RadioVaeConfig) -> None:
        self.config, self.wish, self.sizes = config, config.model, sizes_of(config.model.first_stage)
        start = self.wish.discriminator.start
        self.started = Scheduled(lambda step: float(step >= start))

    def phases(self) -> tuple[Phase, ...]:
        if not has_critic(self.config):
            return ()
        return adversarial_phases(
            name="autoencoder",
            loss=self.against_discriminator,
            reconstruct=lambda model, batch: cast(Stage1, model).vae(batch["map"], batch["noise"])[0],
            truth="map",
            start=self.wish.discriminator.start,
        )

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        truth = unit_gain(batch["gain"], self.config.data.threshold)
        shape = latent_shape(self.sizes, self.config.data.image_size)
        drawn = noise.normal(key, len(truth), shape, truth.device, stream="posterior")
        return batch | {"truth": truth, "map": signed(truth), "noise": drawn}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        reconstruction, mean, log_variance = cast(Stage1, model).vae(batch["map"], batch["noise"])
        found = {"reconstruction": reconstruction, **loss_parts(reconstruction, batch["map"], mean, log_variance)}
        if not model.training:
            return found | {"map": unsigned(reconstruction)}
        return found | judged(model, reconstruction, self.started.value) if has_critic(self.config) else found

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        """All but the discriminator's part."""
        return autoencoder_loss(outputs, self.wish.kl_weight), len(batch["map"])

    def against_discriminator(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        side, weight = self.config.data.image_size, self.wish.discriminator.weight
        plain, nll = autoencoder_loss(outputs, self.wish.kl_weight), outputs["nll"].mean()
        term = adversarial_term(outputs, nll, self.started.value, weight=weight, scales=(1 / side, float(side)))
        return plain + term, len(batch["map"])


@in_fp32
def loss_parts(reconstruction: Tensor, truth: Tensor, mean: Tensor, log_variance: Tensor) -> dict[str, Tensor]:
    """Of each sample (B): sums over pixels, KL; `error_*` are counted as metrics."""
    error = (truth - reconstruction).flatten(1)
    nll = (error.abs() + error.square()).sum(1)
    kl = kl_divergence(mean, log_variance)
    return {"nll": nll, "kl": kl, "error_l1": error.detach().abs().mean(1), "error_kl": kl.detach()}


@in_fp32
def autoencoder_loss(outputs: Mapping[str, Tensor], kl_weight: float) -> Tensor:
    return outputs["nll"].mean() + kl_weight * outputs["kl"].mean()


def export(model: nn.Module, config: RadioVaeConfig, store: Mapping[str, Any], folder: Path) -> None:
    """The autoencoder with its sizes and the scale of its latents: what stage 2 starts from."""
    vae = cast(Stage1, model).vae
    scale = measured_scale(
        vae,
        find_data(config).train,
        count=MEASURED_MAPS,
        threshold=config.data.threshold,
        source="this run",
    )
    write_first_stage(vae, store["sizes"], scale, folder)
