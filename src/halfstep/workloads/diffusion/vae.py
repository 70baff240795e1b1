"""AutoencoderKL on a folder of pictures: reconstruction, KL, and where asked a perceptual loss and a discriminator.

With a discriminator there are two phases. The VAE's takes gradients inside its loss, for the weight that balances both
(Esser et al. 2021), so it is not compiled; the discriminator's is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.data import noise
from halfstep.islands import fp32_island, to_fp32
from halfstep.models.diffusers_blocks import blocks_of
from halfstep.models.diffusers_nets import (
    VAE,
    Net,
    build_net,
    check_side,
    config_of,
    freeze_,
    halvings,
    net_folder,
    open_net,
    set_checkpointing,
    vae_config,
)
from halfstep.models.patch_gan import PatchGan, VggDistance
from halfstep.models.posterior import drawn, kl_divergence, posterior
from halfstep.models.weights import read_weights
from halfstep.workloads.adversarial import adaptive_weight, hinge_discriminator_loss, hinge_generator_loss
from halfstep.workloads.diffusion.config import VaeConfig
from halfstep.workloads.diffusion.data import open_pictures, square_pictures, unit_images
from halfstep.workloads.diffusion.scores import ReconstructionMetrics
from halfstep.workloads.parts import FrozenPart
from halfstep.workloads.phase import Phase
from halfstep.workloads.scheduled import Scheduled
from halfstep.workloads.workload import Batch, Workload

FRAGILE = (
    "vae.posterior: exp of log-variances up to 20",
    "loss.kl: sums over a whole latent",
    "loss.reconstruction: means over all pixels",
)
Outputs = Mapping[str, Tensor]


class VaeNet(nn.Module):
    """The VAE, and the discriminator that judges it in training."""

    def __init__(self, vae: Net, discriminator: PatchGan | None = None) -> None:
        super().__init__()
        self.vae, self.discriminator = vae, discriminator

    def forward(self, image: Tensor, posterior_noise: Tensor) -> dict[str, Tensor]:
        """Reconstruction, latent and KL; where a discriminator is trained, what it says, and the last weights."""
        mean, logvar = posterior(self.vae.encode(image).latent_dist.parameters)
        latent = drawn(mean, logvar, posterior_noise)
        found = {"image": self.vae.decode(latent).sample, "latent": latent, "kl": kl_divergence(mean, logvar)}
        if self.discriminator is None or not self.training:
            return found
        return found | {"fake": self.discriminator(found["image"]), "last": self.vae.decoder.conv_out.weight}


def build(config: VaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`; `store` of an earlier run fixes the VAE's form."""
    data = open_pictures(config.data)
    model = model_of(config, store)
    losses = VaeLoss(config)
    return Workload(
        name=config.workload,
        model=model,
        train_samples=square_pictures(data.train, config.data.image_size),
        val_samples=square_pictures(data.val, config.data.image_size),
        prepare=Prepared(config, model.vae),
        forward=reconstruct,
        loss=losses.reconstruction,
        metrics=ReconstructionMetrics,
        metric="psnr",
        mode="max",
        scoring="psnr of values cut to -1..1, over all pixels of the held-out set",
        fragile=FRAGILE,
        blocks=blocks_of(model.vae),
        store={"vae": config_of(model.vae)},
        notes=data.notes,
        val_names=data.val_names,
        about=data.about,
        phases=losses.phases(),
        values={"gan": losses.gan_on} if config.model.gan_weight else {},
        frozen=losses.frozen(),
        ema_parts=("vae",),
    )


def reconstruct(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    found: dict[str, Tensor] = model(batch["image"], batch["posterior_noise"])
    return found


def model_of(config: VaeConfig, store: Mapping[str, Any] | None = None) -> VaeNet:
    """The VAE: of a stored run in its form, of a folder with its weights, or new; and its discriminator."""
    wish, side = config.model, config.data.image_size
    if store:
        vae = build_net(store["vae"])
    elif wish.weights:
        vae = open_net(net_folder(wish.weights, "vae", "model.weights"), [VAE])
    else:
        vae = build_net(
            vae_config(
                channels=wish.channels, layers=wish.layers, latent_channels=wish.latent_channels, image_size=side
            )
        )
    check_side(side, halvings(vae.config), "images", "data.image_size")
    set_checkpointing(vae, config.train.activation_checkpointing)
    if not wish.gan_weight:
        return VaeNet(vae)
    check_side(side, wish.gan_layers + 2, "images that a discriminator sees", "data.image_size, fewer model.gan_layers")
    return VaeNet(vae, PatchGan(channels=wish.gan_channels, num_halvings=wish.gan_layers))


def latent_shape(form: Mapping[str, Any], image: Tensor) -> tuple[int, int, int]:
    """Of one latent, by the VAE's config."""
    height, width = (side >> halvings(form) for side in image.shape[2:])
    return int(form["latent_channels"]), height, width


class Prepared:
    """Images in -1..1, mirrored by chance in training, and the noise of their latents."""

    def __init__(self, config: VaeConfig, vae: Net) -> None:
        self.flip, self.form = config.data.flip, dict(vae.config)

    def __call__(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        image = unit_images(batch, key=key, flip=self.flip if training else 0.0)
        shape = latent_shape(self.form, image)
        drawn_noise = noise.normal(key, len(image), shape, image.device, stream="posterior")
        return batch | {"image": image, "posterior_noise": drawn_noise}


class VaeLoss:
    """The parts of the loss as the config weighs them."""

    def __init__(self, config: VaeConfig) -> None:
        self.wish = config.model
        start = self.wish.gan_from_step
        self.gan_on = Scheduled(lambda step: float(step >= start))
        self.vgg = _vgg(self.wish.vgg_weights) if self.wish.perceptual_weight and self.wish.vgg_weights else None

    def frozen(self) -> dict[str, FrozenPart]:
        return {"vgg": FrozenPart(module=self.vgg, source=str(self.wish.vgg_weights))} if self.vgg is not None else {}

    def phases(self) -> tuple[Phase, ...]:
        if not self.wish.gan_weight:
            return ()
        return (
            Phase(name="vae", parameters=("vae",), loss=self.against_discriminator, compiles=False),
            Phase(
                name="discriminator",
                parameters=("discriminator",),
                forward=judged,
                loss=hinge_loss,
                from_step=self.wish.gan_from_step,
                optimizer={"lr": self.wish.gan_lr} if self.wish.gan_lr else {},
            ),
        )

    def reconstruction(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """All but the discriminator's part; what validation reports."""
        likeness, kl = self._likeness(outputs, batch), outputs["kl"].mean()
        return likeness + self.wish.kl_weight * kl, len(batch["image"])

    def against_discriminator(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """With the discriminator's part, weighed so that its gradient is as long as the reconstruction's."""
        likeness, kl = self._likeness(outputs, batch), outputs["kl"].mean()
        doubt, pixels = hinge_generator_loss(outputs["fake"]), float(batch["image"][0].numel())
        balance = adaptive_weight(likeness, doubt, outputs["last"], scales=(pixels, pixels))
        with fp32_island():
            whole = likeness + self.wish.kl_weight * kl + self.gan_on.value * self.wish.gan_weight * balance * doubt
        return whole, len(batch["image"])

    def _likeness(self, outputs: Outputs, batch: Batch) -> Tensor:
        with fp32_island():
            difference = to_fp32(outputs["image"]) - batch["image"]
            loss = (difference.abs() if self.wish.loss == "l1" else difference.square()).mean()
            if self.vgg is None:
                return loss
            distance: Tensor = self.vgg(outputs["image"], batch["image"])
            return loss + self.wish.perceptual_weight * distance.mean()


def judged(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """What the discriminator says of images and of their reconstructions, which get no gradient."""
    assert isinstance(model, VaeNet)
    with torch.no_grad():
        fake = reconstruct(model, batch)["image"]
    assert model.discriminator is not None
    return {"real": model.discriminator(batch["image"]), "fake": model.discriminator(fake)}


def hinge_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
    return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(batch["image"])


def _vgg(path: str) -> VggDistance:
    vgg = VggDistance()
    vgg.load_(read_weights(Path(path))[0], path)
    found: VggDistance = freeze_(vgg)
    return found
