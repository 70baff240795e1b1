"""A discriminator beside a reconstruction loss: hinge losses, and how much the discriminator may say (VQGAN)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import in_fp32

LARGEST_WEIGHT = 1e4
SMALLEST_NORM = 1e-4
"""Added to the discriminator's, which is 0 where it judges nothing."""


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Of logits, any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    return -fake.mean()


def adaptive_weight(
    reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor, *, scales: tuple[float, float]
) -> Tensor:
    """Makes both losses pull equally at the last layer: the ratio of their gradients' norms there, without gradient.

    Each loss is multiplied by its scale while its gradient is taken, and the norm divided by it: in fp16 the gradient
    of a sum over pixels overflows, that of a mean over patches vanishes.
    """
    of_reconstruction, of_adversarial = (
        torch.autograd.grad(loss * scale, last_layer, retain_graph=True)[0].float().norm() / scale
        for loss, scale in zip((reconstruction, adversarial), scales, strict=True)
    )
    weight: Tensor = of_reconstruction / (of_adversarial + SMALLEST_NORM)
    return weight.clamp(0, LARGEST_WEIGHT).detach()
