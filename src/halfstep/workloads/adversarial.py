"""A discriminator beside a reconstruction loss: hinge losses, and how much the discriminator may say (VQGAN)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import in_fp32

LARGEST_WEIGHT = 1e4
GRADIENT_SCALE = 1024.0
"""Gradients of a mean over thousands of patches would vanish in fp16; a ratio of two norms does not see the factor."""


@in_fp32
def hinge_discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Of logits, any shape."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


@in_fp32
def hinge_generator_loss(fake: Tensor) -> Tensor:
    return -fake.mean()


def adaptive_weight(reconstruction: Tensor, adversarial: Tensor, last_layer: Tensor) -> Tensor:
    """Makes both losses pull equally at the last layer: the ratio of their gradients' norms there, without gradient."""
    of_reconstruction, of_adversarial = (
        torch.autograd.grad(loss * GRADIENT_SCALE, last_layer, retain_graph=True)[0].float().norm() / GRADIENT_SCALE
        for loss in (reconstruction, adversarial)
    )
    weight: Tensor = of_reconstruction / (of_adversarial + 1e-4)
    return weight.clamp(0, LARGEST_WEIGHT).detach()
