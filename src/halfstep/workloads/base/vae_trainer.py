"""Training of a VAE, alone or against a PatchGAN discriminator (VQGAN, Esser et al. 2021).

The model holds an autoencoder, `vae`, and a `discriminator`. With a discriminator each has its own phase. The VAE's
loss takes gradients itself, for the weight that balances reconstruction and discriminator, so its phase is not
compiled; the discriminator's phase is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.data import noise
from halfstep.islands import fp32_island, in_fp32
from halfstep.models.patch_gan import PatchGan
from halfstep.models.posterior import Codec
from halfstep.workloads.base.over_ranks import average_over_ranks
from halfstep.workloads.base.scheduled import Scheduled
from halfstep.workloads.base.workload import Batch, Phase, Workload

LARGEST_WEIGHT = 1e4
SMALLEST_NORM = 1e-4
"""Added to the norm of the discriminator's gradient, which can be 0."""
Outputs = Mapping[str, Tensor]


class VaeNet(nn.Module):
    """A VAE, and the discriminator that judges its reconstructions in training."""

    def __init__(self, vae: Any, codec: Codec, discriminator: PatchGan | None = None) -> None:
        super().__init__()
        self.vae, self.codec, self.discriminator = vae, codec, discriminator

    def forward(self, image: Tensor, posterior_noise: Tensor) -> dict[str, Tensor]:
        """Return the reconstructed `image`, the drawn `latent` and its `kl` divergence."""
        return self.codec.reconstruct(self.vae, image, posterior_noise)

    def decode_means(self, image: Tensor) -> Tensor:
        return self.codec.decode_means(self.vae, image)


@dataclass(frozen=True, kw_only=True, slots=True)
class Critic:
    """How a discriminator takes part in training."""

    start: int
    """The step from which it trains and counts."""
    weight: float
    scales: tuple[float, float]
    """Factors of reconstruction and adversarial loss while their gradients are compared (`adaptive_weight`)."""
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the config's `optimizer` that differ."""


class VaeTrainer:
    """One training step of a VaeNet. A family says how batches become images and how a reconstruction is scored."""

    def __init__(
        self, *, phase: str, latent_shape: tuple[int, ...], kl_weight: float, critic: Critic | None = None
    ) -> None:
        self.phase, self.latent_shape, self.kl_weight, self.critic = phase, latent_shape, kl_weight, critic
        self.gan_on = Scheduled(lambda step: float(critic is not None and step >= critic.start))

    def make_images(self, batch: Batch, *, key: tuple[int, ...], training: bool) -> Batch:
        """Return at least `image` (N, channels, H, W) in -1..1 for a batch as loaded."""
        raise NotImplementedError

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the reconstruction loss, a scalar in fp32."""
        raise NotImplementedError

    def workload(self, model: VaeNet, **settings: Any) -> Workload:
        return Workload(
            model=model,
            prepare=self.prepare,
            forward=self.forward,
            loss=self.loss,
            phases=self.phases(),
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
        # Selected, not multiplied by 0: before it has started no gradient passes, even if it overflows.
        seen = torch.where(self.gan_on.value > 0, found["image"], found["image"].detach())
        # The last layer is where both losses' gradients are compared.
        return found | {"fake": net.discriminator(seen), "last_layer": net.vae.decoder.conv_out.weight}

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        """Return the loss without the discriminator, which validation reports, and the number of images."""
        return self._with_kl(self.score(outputs, batch), outputs), len(batch["image"])

    def loss_with_critic(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
        critic = self.critic
        assert critic is not None
        score = self.score(outputs, batch)
        doubt = hinge_generator_loss(outputs["fake"])
        balance = adaptive_weight(score, doubt, outputs["last_layer"], scales=critic.scales)
        with fp32_island():
            term = torch.where(self.gan_on.value > 0, critic.weight * balance * doubt, 0.0)
        return self._with_kl(score, outputs) + term, len(batch["image"])

    def _with_kl(self, score: Tensor, outputs: Outputs) -> Tensor:
        with fp32_island():
            return score + self.kl_weight * outputs["kl"].mean()

    def phases(self) -> tuple[Phase, ...]:
        """Return the phases; empty without a discriminator: then the workload's forward and loss train the VAE."""
        if self.critic is None:
            return ()
        return (
            Phase(name=self.phase, parameters=("vae",), loss=self.loss_with_critic, compiles=False),
            Phase(
                name="discriminator",
                parameters=("discriminator",),
                forward=judge_both,
                loss=discriminator_loss,
                from_step=self.critic.start,
                optimizer=self.critic.optimizer,
            ),
        )


def judge_both(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the discriminator's logits for images and their reconstructions, which get no gradient."""
    with torch.no_grad():
        fake = model(batch["image"], batch["posterior_noise"])["image"]
    discriminator = cast(Any, model).discriminator
    return {"real": discriminator(batch["image"]), "fake": discriminator(fake)}


def discriminator_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
    return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(outputs["real"])


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return the hinge loss of logits of any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    return -fake.mean()


def adaptive_weight(
    reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor, *, scales: tuple[float, float]
) -> Tensor:
    """Return the ratio of both losses' gradient norms at the last layer, without gradient (Esser et al. 2021, eq. 7).

    Each loss is multiplied by its scale while its gradient is taken, and the norm divided by it: in fp16 the gradient
    of a sum over pixels overflows, and that of a mean over patches underflows. Gradients are those of the whole batch,
    whichever ranks hold its samples.
    """
    of_reconstruction, of_adversarial = (
        average_over_ranks(torch.autograd.grad(loss * scale, last_layer, retain_graph=True)[0].float()).norm() / scale
        for loss, scale in zip((reconstruction, adversarial), scales, strict=True)
    )
    weight: Tensor = of_reconstruction / (of_adversarial + SMALLEST_NORM)
    return weight.clamp(0, LARGEST_WEIGHT).detach()
