"""Stage 1: the autoencoder of gain maps, and from a step on a discriminator against it.

The loss is a sum over pixels, |error| + error², plus KL. The public loss adds LPIPS, whose VGG was trained on
photographs and has to be downloaded; it is left out. Its log-variance is not in the public optimizer and stays
0, so it is left out as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.loader import Batch
from halfstep.errors import ConfigError
from halfstep.islands import in_fp32
from halfstep.models.patch_gan import PatchGan
from halfstep.models.posterior import kl_divergence
from halfstep.models.radio_names import vae_name
from halfstep.models.radio_vae import RadioVAE, ResidualBlock
from halfstep.models.recompute import set_recompute
from halfstep.models.weights import load_weights_, read_weights
from halfstep.workloads.adversarial import adaptive_weight, hinge_discriminator_loss, hinge_generator_loss
from halfstep.workloads.phase import Phase
from halfstep.workloads.radio.config import RadioVaeConfig
from halfstep.workloads.radio.data import RadioData, find_data, signed, unit_gain, unsigned
from halfstep.workloads.radio.first_stage import MEASURED_MAPS, measured_scale, sizes_of, vae_of, write_first_stage
from halfstep.workloads.radio.pictures import sample_pictures
from halfstep.workloads.radio.scores import SCORING, RadioMetrics
from halfstep.workloads.scheduled import Scheduled
from halfstep.workloads.workload import Workload

FRAGILE = (
    "loss.reconstruction: a sum over all pixels passes fp16's largest number",
    "loss.kl: exp of the log variance",
    "latents: drawn from mean and log variance",
)
AUTOENCODER = ("vae",)


class Stage1(nn.Module):
    """The autoencoder, and the discriminator where there is one."""

    def __init__(self, vae: RadioVAE, discriminator: PatchGan | None) -> None:
        super().__init__()
        self.vae, self.discriminator = vae, discriminator


def build_vae(config: RadioVaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`."""
    data = find_data(config)
    model = stage1(config)
    if store is None and config.model.weights:
        weights, _ = read_weights(Path(config.model.weights))
        named = {own: value for name, value in weights.items() if (own := vae_name(name)) is not None}
        load_weights_(model.vae, named, source=config.model.weights)
    return workload_of(config, model, data)


def stage1(config: RadioVaeConfig) -> Stage1:
    sizes = sizes_of(config.model.first_stage)
    refuse_uneven(config.data.image_size, 2 ** (len(sizes["multipliers"]) - 1))
    model = Stage1(vae_of(sizes), critic_of(config) if has_critic(config) else None)
    set_recompute(model, "blocks" if config.train.activation_checkpointing else "none")
    return model


def critic_of(config: RadioVaeConfig) -> PatchGan:
    wish, side = config.model.discriminator, config.data.image_size
    if side < (least := 2 ** (wish.num_halvings + 2)):
        raise ConfigError(
            f"data.image_size={side} is too small for a discriminator that halves it {wish.num_halvings} times",
            why="nothing is left to judge",
            fix=f"data.image_size={least} or more, or a smaller model.discriminator.num_halvings",
        )
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
    threshold, latent = config.data.threshold, latent_shape(config)

    def prepare(batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        truth = unit_gain(batch["gain"], threshold)
        drawn = noise.normal(key, len(truth), latent, truth.device, stream="posterior")
        return batch | {"truth": truth, "map": signed(truth), "noise": drawn}

    def forward(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        reconstruction, mean, log_variance = cast(Stage1, model).vae(batch["map"], batch["noise"])
        found = {"reconstruction": reconstruction, **loss_parts(reconstruction, batch["map"], mean, log_variance)}
        return found if model.training else found | {"map": unsigned(reconstruction)}

    def loss(outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        return autoencoder_loss(outputs, config.model.kl_weight), len(batch["map"])

    def pictures(model: nn.Module, key: tuple[int, ...]) -> dict[str, Any]:
        return sample_pictures(data.val, model, workload, key)

    started = Scheduled(lambda step: float(step >= config.model.discriminator.start))
    workload = Workload(
        name=config.workload,
        model=model,
        train_samples=data.train,
        val_samples=data.val,
        prepare=prepare,
        forward=forward,
        loss=loss,
        metrics=RadioMetrics,
        metric="nmse",
        mode="min",
        fragile=FRAGILE,
        blocks={ResidualBlock: ResidualBlock.forward},
        scoring=f"of reconstructions: {SCORING}",
        store={"sizes": sizes_of(config.model.first_stage), "image_size": config.data.image_size},
        notes=data.notes,
        val_names=data.val_names(),
        about=(*data.about, *_about_critic(config)),
        phases=phases_of(config, started) if has_critic(config) else (),
        values={"started": started} if has_critic(config) else {},
        ema_parts=AUTOENCODER,
        sample=pictures,
    )
    return workload


def latent_shape(config: RadioVaeConfig) -> tuple[int, int, int]:
    sizes = config.model.first_stage
    side = config.data.image_size // 2 ** (len(sizes.multipliers) - 1)
    return sizes.latent_channels, side, side


def _about_critic(config: RadioVaeConfig) -> tuple[tuple[str, str], ...]:
    wish = config.model.discriminator
    if has_critic(config):
        said = f"from step {wish.start:,}; the autoencoder's loss takes gradients itself and is not compiled"
        return (("discriminator", said),)
    why = "starts after the last step" if wish.enabled else "model.discriminator.enabled=false"
    return (("discriminator", f"none: {why}"),)


# --- losses ---


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


def phases_of(config: RadioVaeConfig, started: Scheduled) -> tuple[Phase, ...]:
    """Two steps an iteration, each with its own verdict and clipping."""
    wish = config.model

    def judged(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        stage = cast(Stage1, model)
        reconstruction, mean, log_variance = stage.vae(batch["map"], batch["noise"])
        found = {"reconstruction": reconstruction, **loss_parts(reconstruction, batch["map"], mean, log_variance)}
        assert stage.discriminator is not None
        return found | {"fake": stage.discriminator(reconstruction), "last_layer": stage.vae.decoder.conv_out.weight}

    def generator_loss(outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        plain = autoencoder_loss(outputs, wish.kl_weight)
        adversarial = hinge_generator_loss(outputs["fake"])
        scales = (1 / config.data.image_size, float(config.data.image_size))
        weight = adaptive_weight(outputs["nll"].mean(), adversarial, outputs["last_layer"], scales=scales)
        # Selected, not multiplied by 0: a discriminator that has not started must not matter even if it overflows.
        term = torch.where(started.value > 0, wish.discriminator.weight * weight * adversarial, 0.0)
        return plain + term, len(batch["map"])

    def both(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        stage = cast(Stage1, model)
        assert stage.discriminator is not None
        with torch.no_grad():
            reconstruction, _, _ = stage.vae(batch["map"], batch["noise"])
        return {"real": stage.discriminator(batch["map"]), "fake": stage.discriminator(reconstruction.detach())}

    def critic_loss(outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, float]:
        return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(batch["map"])

    return (
        Phase(
            name="autoencoder",
            parameters=AUTOENCODER,
            forward=judged,
            loss=generator_loss,
            compiles=False,
            counted=True,
        ),
        Phase(
            name="discriminator",
            parameters=("discriminator",),
            forward=both,
            loss=critic_loss,
            from_step=wish.discriminator.start,
        ),
    )


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
