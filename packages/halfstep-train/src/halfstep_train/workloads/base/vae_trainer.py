"""Training of a VAE, alone or against a PatchGAN discriminator (VQGAN, Esser et al. 2021).

The model holds an autoencoder, `vae`, and optionally a `discriminator`; then each trains in its own phase. The loss of
the VAE's phase computes gradients itself, for the weight that balances reconstruction and discriminator, so it is not
compiled; the discriminator's phase is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, in_fp32
from halfstep_train.data import noise
from halfstep_train.models.patch_gan import PatchGan
from halfstep_train.models.posterior import Codec
from halfstep_train.workloads.base.over_ranks import average_over_ranks
from halfstep_train.workloads.base.workload import Batch, Phase, Scheduled, Workload

LARGEST_WEIGHT = 1e4
"""Upper limit of the adaptive weight, as in taming-transformers."""
SMALLEST_NORM = 1e-4
"""Added to the norm of the discriminator's gradient, which can be 0."""
Outputs = Mapping[str, Tensor]


class VaeNet(nn.Module):
    """A VAE and, for training, the discriminator that judges its reconstructions."""

    def __init__(self, vae: Any, codec: Codec, discriminator: PatchGan | None = None) -> None:
        super().__init__()
        self.vae, self.codec, self.discriminator = vae, codec, discriminator

    def forward(self, image: Tensor, posterior_noise: Tensor) -> dict[str, Tensor]:
        """Return the reconstructed `image`, the drawn `latent` and its `kl` divergence."""
        return self.codec.reconstruct(self.vae, image, posterior_noise)

    def decode_means(self, image: Tensor) -> Tensor:
        """Return reconstructions from the means of the latents, without random draws."""
        return self.codec.decode_means(self.vae, image)


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """Settings for training against a discriminator."""

    start: int
    """First step in which it trains and contributes to the VAE's loss."""
    weight: float
    scales: tuple[float, float]
    """Factors applied to reconstruction and adversarial loss while their gradients are compared
    (`compute_adaptive_weight`)."""


class VaeTrainer:
    """Training of a VaeNet. A family subclasses it and defines `make_images` and `score`."""

    def __init__(
        self, *, phase: str, latent_shape: tuple[int, ...], kl_weight: float, critic: Critic | None = None
    ) -> None:
        self.phase, self.latent_shape, self.kl_weight, self.critic = phase, latent_shape, kl_weight, critic
        self.gan_on = Scheduled(lambda step: float(critic is not None and step >= critic.start))

    def make_images(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Convert a batch as loaded; the result holds at least `image` (N, channels, H, W) in -1..1."""
        raise NotImplementedError

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the reconstruction loss, a scalar in fp32."""
        raise NotImplementedError

    def build_workload(self, model: VaeNet, **settings: Any) -> Workload:
        """Return a Workload that trains a VaeNet; `settings` are further fields of it."""
        return Workload(
            model=model,
            prepare=self.prepare,
            forward=self.forward,
            loss=self.compute_loss,
            phases=self.make_phases(),
            values={"gan": self.gan_on} if self.critic else {},
            ema_parts=("vae",),
            **settings,
        )

    def prepare(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        made = self.make_images(batch, key=key, training=training)
        num, device = len(made["image"]), made["image"].device
        made["posterior_noise"] = noise.normal(key, num, self.latent_shape, device, stream="posterior")
        return batch | made

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        found: dict[str, Tensor] = model(batch["image"], batch["posterior_noise"])
        if self.critic is None or not model.training:
            return found
        net = cast(Any, model)
        # Before the discriminator starts, no gradient of it may reach the VAE. Multiplying by 0 would let inf and NaN
        # through; selecting the detached image does not.
        seen = torch.where(self.gan_on.value > 0, found["image"], found["image"].detach())
        # The last layer is where both losses' gradients are compared.
        return found | {"fake": net.discriminator(seen), "last_layer": net.vae.decoder.conv_out.weight}

    def compute_loss(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """Return the loss without the discriminator, which validation reports, and the number of images."""
        return self._add_kl(self.score(outputs, batch), outputs), len(batch["image"])

    def compute_loss_with_critic(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """Return reconstruction + KL + weighted adversarial loss, and the number of images."""
        critic = self.critic
        assert critic is not None
        score = self.score(outputs, batch)
        adversarial = hinge_generator_loss(outputs["fake"])
        balance = compute_adaptive_weight(score, adversarial, outputs["last_layer"], scales=critic.scales)
        with fp32_island():
            term = torch.where(self.gan_on.value > 0, critic.weight * balance * adversarial, 0.0)
        return self._add_kl(score, outputs) + term, len(batch["image"])

    def _add_kl(self, score: Tensor, outputs: Outputs) -> Tensor:
        """Return the reconstruction loss plus the weighted KL divergence."""
        with fp32_island():
            return score + self.kl_weight * outputs["kl"].mean()

    def make_phases(self) -> tuple[Phase, ...]:
        """Return the phases; none without a discriminator: the workload's forward and loss then train the VAE."""
        if self.critic is None:
            return ()
        return (
            Phase(name=self.phase, parameters=("vae",), loss=self.compute_loss_with_critic, compiles=False),
            Phase(
                name="discriminator",
                parameters=("discriminator",),
                forward=judge_both,
                loss=compute_discriminator_loss,
                from_step=self.critic.start,
            ),
        )


def judge_both(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the discriminator's logits for images and their reconstructions, without gradients for the VAE."""
    with torch.no_grad():
        fake = model(batch["image"], batch["posterior_noise"])["image"]
    discriminator = cast(Any, model).discriminator
    return {"real": discriminator(batch["image"]), "fake": discriminator(fake)}


def compute_discriminator_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
    return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(outputs["real"])


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return the hinge loss of the discriminator's logits, which may have any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    """Return the generator's hinge loss of the discriminator's logits."""
    return -fake.mean()


def compute_adaptive_weight(
    reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor, *, scales: tuple[float, float]
) -> Tensor:
    """Return the ratio of both losses' gradient norms at the last layer, detached (Esser et al. 2021, eq. 7).

    Each loss is multiplied by its scale before its gradient is computed, and the norm is divided by it: in fp16 the
    gradient of a sum over pixels would overflow, and that of a mean over patches would underflow. The gradients are
    averaged over all ranks.
    """
    reconstruction_norm, adversarial_norm = (
        average_over_ranks(torch.autograd.grad(loss * scale, last_layer, retain_graph=True)[0].float()).norm() / scale
        for loss, scale in zip((reconstruction, adversarial), scales, strict=True)
    )
    weight: Tensor = reconstruction_norm / (adversarial_norm + SMALLEST_NORM)
    return weight.clamp(0, LARGEST_WEIGHT).detach()
