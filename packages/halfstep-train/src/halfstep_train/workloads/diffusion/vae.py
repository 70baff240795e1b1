"""The workload of the VAE: train an AutoencoderKL on images, optionally with a perceptual loss and a discriminator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.models.layers import LEVELS_HALVE, divide_side
from halfstep_train.models.patch_gan import VggDistance, build_discriminator
from halfstep_train.models.weights import read_weights
from halfstep_train.workloads.base.frozen_vae import Critic, Outputs, VaeNet, VaeTrainer
from halfstep_train.workloads.base.workload import Batch, FrozenPart, OpenedData, Workload
from halfstep_train.workloads.diffusion.config import VaeConfig
from halfstep_train.workloads.diffusion.data import make_square_samples, open_diffusion_data, scale_images
from halfstep_train.workloads.diffusion.diffusers_blocks import find_blocks
from halfstep_train.workloads.diffusion.diffusers_nets import (
    CODEC,
    VAE,
    Net,
    build_net,
    count_halvings,
    dump_config,
    find_net_folder,
    get_latent_shape,
    make_vae_config,
    open_net,
)
from halfstep_train.workloads.diffusion.scores import ReconstructionMetrics

FRAGILE = (
    "vae.posterior: exp of log-variances up to 20",
    "loss.kl: sums over a whole latent",
    "loss.reconstruction: means over all pixels",
)


def build(config: VaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """Build the workload for `config.data.dir`; the `store` of an earlier run fixes the VAE's config."""
    data = open_diffusion_data(config.data)
    model = build_model(config, store)
    train, val = (make_square_samples(listing, config.data.image_size) for listing in (data.train, data.val))
    found = {"vae": dump_config(model.vae)}
    return make_workload(
        config, model, OpenedData(train=train, val=val, store=found, notes=data.notes, about=data.about)
    )


def make_workload(config: VaeConfig, model: VaeNet, data: OpenedData) -> Workload:
    """Build the workload from its model and samples."""
    trainer = PictureVaeTrainer(config, model.vae)
    return trainer.build_workload(
        model,
        name=config.workload,
        metrics=ReconstructionMetrics,
        metric="psnr",
        mode="max",
        scoring="psnr: values clipped to -1..1, over all pixels of the held-out set",
        fragile=FRAGILE,
        blocks=find_blocks(model.vae),
        frozen={"vgg": FrozenPart(module=trainer.vgg, source=str(config.model.vgg_weights))} if trainer.vgg else {},
        **data.to_fields(),
    )


def build_model(config: VaeConfig, store: Mapping[str, Any] | None = None) -> VaeNet:
    """Build the VAE (with the config of a stored run, from a folder with weights, or new) and its discriminator."""
    settings, side = config.model, config.data.image_size
    if store:
        vae = build_net(store["vae"])
    elif settings.weights:
        vae = open_net(find_net_folder(settings.weights, "vae", "model.weights"), [VAE])
    else:
        sizes = settings.model_dump(include={"channels", "layers", "latent_channels"})
        vae = build_net(make_vae_config(**sizes, image_size=side))
    divide_side(side, 2 ** count_halvings(vae.config), LEVELS_HALVE)
    if config.train.activation_checkpointing:
        vae.enable_gradient_checkpointing()
    if not settings.gan_weight:
        return VaeNet(vae, CODEC)
    return VaeNet(vae, CODEC, build_discriminator(side))


class PictureVaeTrainer(VaeTrainer):
    """VAE training with the mean pixel error and, optionally, that of VGG16's features (LPIPS without its linear
    layers)."""

    def __init__(self, config: VaeConfig, vae: Net) -> None:
        settings = config.model
        pixels = 3.0 * config.data.image_size**2
        # Both losses are means: multiplied by the number of pixels, their gradients stay within the range of fp16.
        critic = Critic(start=settings.gan_from_step, weight=settings.gan_weight, scales=(pixels, pixels))
        super().__init__(
            phase="vae",
            latent_shape=get_latent_shape(vae, config.data.image_size),
            kl_weight=settings.kl_weight,
            critic=critic if settings.gan_weight else None,
        )
        self.settings, self.flip = settings, config.data.flip
        self.vgg: VggDistance | None = None
        if settings.perceptual_weight and settings.vgg_weights:
            self.vgg = VggDistance().requires_grad_(False).eval()
            self.vgg.load_(read_weights(Path(settings.vgg_weights))[0], settings.vgg_weights)

    def make_images(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Return images in -1..1, flipped at random in training."""
        return {"image": scale_images(batch, key=key, flip=self.flip if training else 0.0)}

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the pixel error, plus the weighted perceptual distance if there is a VGG."""
        with fp32_island():
            difference = to_fp32(outputs["image"]) - batch["image"]
            loss = (difference.abs() if self.settings.loss == "l1" else difference.square()).mean()
            if self.vgg is None:
                return loss
            distance: Tensor = self.vgg(outputs["image"], batch["image"])
            return loss + self.settings.perceptual_weight * distance.mean()
