"""AutoencoderKL on a folder of pictures: reconstruction, KL, and where asked a perceptual loss and a discriminator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from halfstep.data import noise
from halfstep.data.loader import Samples
from halfstep.islands import fp32_island, to_fp32
from halfstep.models.patch_gan import PatchGan, VggDistance, refuse_too_small
from halfstep.models.posterior import drawn, kl_divergence, posterior
from halfstep.models.weights import read_weights
from halfstep.workloads.base.adversarial import adversarial_phases, adversarial_term, judged
from halfstep.workloads.base.parts import FrozenPart
from halfstep.workloads.base.phase import Phase
from halfstep.workloads.base.scheduled import Scheduled
from halfstep.workloads.base.workload import Batch, Workload
from halfstep.workloads.diffusion.config import VaeConfig
from halfstep.workloads.diffusion.data import open_pictures, square_pictures, unit_images
from halfstep.workloads.diffusion.diffusers_blocks import blocks_of
from halfstep.workloads.diffusion.diffusers_nets import (
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
from halfstep.workloads.diffusion.scores import ReconstructionMetrics

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
        """Reconstruction, latent and KL."""
        mean, logvar = posterior(self.vae.encode(image).latent_dist.parameters)
        latent = drawn(mean, logvar, posterior_noise)
        return {"image": self.vae.decode(latent).sample, "latent": latent, "kl": kl_divergence(mean, logvar)}


def build(config: VaeConfig, store: Mapping[str, Any] | None = None) -> Workload:
    """The workload for `config.data.dir`; `store` of an earlier run fixes the VAE's form."""
    data = open_pictures(config.data)
    model = model_of(config, store)
    pictures = [square_pictures(listing, config.data.image_size) for listing in (data.train, data.val)]
    found = {"vae": config_of(model.vae)}
    about = {"notes": data.notes, "val_names": data.val_names, "about": data.about}
    return workload_of(config, model, pictures[0], pictures[1], found, **about)


def workload_of(
    config: VaeConfig, model: VaeNet, train: Samples, val: Samples, store: Mapping[str, Any], **about: Any
) -> Workload:
    steps = Reconstruction(config, model.vae)
    return Workload(
        name=config.workload,
        model=model,
        train_samples=train,
        val_samples=val,
        prepare=steps.prepare,
        forward=steps.forward,
        loss=steps.loss,
        metrics=ReconstructionMetrics,
        metric="psnr",
        mode="max",
        scoring="psnr of values cut to -1..1, over all pixels of the held-out set",
        fragile=FRAGILE,
        blocks=blocks_of(model.vae),
        store=store,
        phases=steps.phases(),
        values={"gan": steps.gan_on} if config.model.gan_weight else {},
        frozen=steps.frozen(),
        ema_parts=("vae",),
        **about,
    )


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
    check_side(side, halvings(vae.config), "the VAE halves them", "data.image_size")
    set_checkpointing(vae, config.train.activation_checkpointing)
    if not wish.gan_weight:
        return VaeNet(vae)
    refuse_too_small(side, wish.gan_layers, "model.gan_layers")
    return VaeNet(vae, PatchGan(channels=wish.gan_channels, num_halvings=wish.gan_layers))


def latent_shape(form: Mapping[str, Any], image: Tensor) -> tuple[int, int, int]:
    """Of one latent, by the VAE's config."""
    height, width = (side >> halvings(form) for side in image.shape[2:])
    return int(form["latent_channels"]), height, width


class Reconstruction:
    """One step's arithmetic: what is drawn, what comes back, and the parts of the loss as the config weighs them."""

    def __init__(self, config: VaeConfig, vae: Net) -> None:
        self.wish, self.flip, self.form = config.model, config.data.flip, dict(vae.config)
        start = self.wish.gan_from_step
        self.gan_on = Scheduled(lambda step: float(step >= start))
        self.vgg = _vgg(self.wish.vgg_weights) if self.wish.perceptual_weight and self.wish.vgg_weights else None

    def frozen(self) -> dict[str, FrozenPart]:
        return {"vgg": FrozenPart(module=self.vgg, source=str(self.wish.vgg_weights))} if self.vgg is not None else {}

    def phases(self) -> tuple[Phase, ...]:
        if not self.wish.gan_weight:
            return ()
        return adversarial_phases(
            name="vae",
            loss=self.against_discriminator,
            reconstruct=lambda model, batch: reconstruct(model, batch)["image"],
            truth="image",
            start=self.wish.gan_from_step,
            optimizer={"lr": self.wish.gan_lr} if self.wish.gan_lr else {},
        )

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Images in -1..1, mirrored by chance in training, and the noise of their latents."""
        image = unit_images(batch, key=key, flip=self.flip if training else 0.0)
        shape = latent_shape(self.form, image)
        drawn_noise = noise.normal(key, len(image), shape, image.device, stream="posterior")
        return batch | {"image": image, "posterior_noise": drawn_noise}

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found = reconstruct(model, batch)
        return (
            found | judged(model, found["image"], self.gan_on.value)
            if self.wish.gan_weight and model.training
            else found
        )

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """All but the discriminator's part; what validation reports."""
        return self._likeness(outputs, batch) + self.wish.kl_weight * outputs["kl"].mean(), len(batch["image"])

    def against_discriminator(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """With the discriminator's part, weighed so that its gradient is as long as the reconstruction's."""
        likeness, pixels = self._likeness(outputs, batch), float(batch["image"][0].numel())
        term = adversarial_term(
            outputs, likeness, self.gan_on.value, weight=self.wish.gan_weight, scales=(pixels, pixels)
        )
        return likeness + self.wish.kl_weight * outputs["kl"].mean() + term, len(batch["image"])

    def _likeness(self, outputs: Outputs, batch: Batch) -> Tensor:
        with fp32_island():
            difference = to_fp32(outputs["image"]) - batch["image"]
            loss = (difference.abs() if self.wish.loss == "l1" else difference.square()).mean()
            if self.vgg is None:
                return loss
            distance: Tensor = self.vgg(outputs["image"], batch["image"])
            return loss + self.wish.perceptual_weight * distance.mean()


def reconstruct(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    return model(batch["image"], batch["posterior_noise"])


def _vgg(path: str) -> VggDistance:
    vgg = VggDistance()
    vgg.load_(read_weights(Path(path))[0], path)
    return freeze_(vgg)
