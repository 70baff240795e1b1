"""A discriminator beside a reconstruction loss: hinge losses, and how much the discriminator may say (VQGAN).

The model holds an autoencoder, `vae`, and a `discriminator`. Each has a phase of its own. The autoencoder's takes
gradients inside its loss, for the weight that balances both, so it is not compiled; the discriminator's is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, in_fp32
from halfstep.workloads.base import over_ranks
from halfstep.workloads.base.phase import Phase
from halfstep.workloads.base.workload import Batch, Loss

LARGEST_WEIGHT = 1e4
SMALLEST_NORM = 1e-4
"""Added to the discriminator's, which is 0 where it judges nothing."""
Outputs = Mapping[str, Tensor]


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Of logits, any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    return -fake.mean()


def judged(model: nn.Module, image: Tensor, started: Tensor) -> dict[str, Tensor]:
    """What the discriminator says of a reconstruction, and the layer at which both losses pull.

    Selected, not multiplied by 0: before it has started no gradient passes, even if it overflows.
    """
    net = cast(Any, model)
    seen = torch.where(started > 0, image, image.detach())
    return {"fake": net.discriminator(seen), "last_layer": net.vae.decoder.conv_out.weight}


def adversarial_term(
    outputs: Outputs, reconstruction: Tensor, started: Tensor, *, weight: float, scales: tuple[float, float]
) -> Tensor:
    """The discriminator's part of the autoencoder's loss; 0 before it has started."""
    doubt = hinge_generator_loss(outputs["fake"])
    balance = adaptive_weight(reconstruction, doubt, outputs["last_layer"], scales=scales)
    with fp32_island():
        return torch.where(started > 0, weight * balance * doubt, 0.0)


def adaptive_weight(
    reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor, *, scales: tuple[float, float]
) -> Tensor:
    """Makes both losses pull equally at the last layer: the ratio of their gradients' norms there, without gradient.

    Each loss is multiplied by its scale while its gradient is taken, and the norm divided by it: in fp16 the gradient
    of a sum over pixels overflows, that of a mean over patches vanishes. Gradients are those of the whole batch,
    whichever processes have its samples.
    """
    of_reconstruction, of_adversarial = (
        over_ranks.mean(torch.autograd.grad(loss * scale, last_layer, retain_graph=True)[0].float()).norm() / scale
        for loss, scale in zip((reconstruction, adversarial), scales, strict=True)
    )
    weight: Tensor = of_reconstruction / (of_adversarial + SMALLEST_NORM)
    return weight.clamp(0, LARGEST_WEIGHT).detach()


def adversarial_phases(
    *,
    name: str,
    loss: Loss,
    reconstruct: Callable[[nn.Module, Batch], Tensor],
    truth: str,
    start: int,
    optimizer: Mapping[str, Any] | None = None,
) -> tuple[Phase, Phase]:
    """The autoencoder by the workload's own forward pass, and its discriminator on `batch[truth]` and what
    `reconstruct` makes of it, which gets no gradient."""

    def both(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        with torch.no_grad():
            fake = reconstruct(model, batch)
        discriminator = cast(Any, model).discriminator
        return {"real": discriminator(batch[truth]), "fake": discriminator(fake)}

    return (
        Phase(name=name, parameters=("vae",), loss=loss, compiles=False),
        Phase(
            name="discriminator",
            parameters=("discriminator",),
            forward=both,
            loss=discriminator_loss,
            from_step=start,
            optimizer=optimizer or {},
        ),
    )


def discriminator_loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, float]:
    return hinge_discriminator_loss(outputs["real"], outputs["fake"]), len(outputs["real"])
