"""PatchGAN (Isola et al. 2017), a discriminator that judges patches of an image, and a perceptual distance by VGG16.

The discriminator uses GroupNorm instead of BatchNorm: it runs in both phases, and batch statistics would reveal
in which.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ConfigError, ModelError
from halfstep.islands import fp32_island, to_fp32

VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512)
"""Channels of VGG16's convolutions; 0 halves the image. Features before each halving, and the last, are compared."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's channel statistics in 0..1, which official weights expect."""


class PatchGan(nn.Module):
    """Compute logits (N, 1, h, w) of images: positive where a patch looks real."""

    def __init__(self, *, image_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(image_channels, 64, 4, 2, 1), nn.LeakyReLU(0.2)]
        for before, after, stride in ((64, 128, 2), (128, 256, 2), (256, 512, 1)):
            norm = nn.GroupNorm(32, after)
            layers += [nn.Conv2d(before, after, 4, stride, 1, bias=False), norm, nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(512, 1, 4, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


LEAST_SIDE = 32


def build_discriminator(side: int, *, image_channels: int = 3) -> PatchGan:
    """Build a PatchGan for square images; refuse sides for which its output would be empty.

    It halves the side three times; then two convolutions with kernel 4, stride 1 and padding 1 each reduce it by one.
    """
    if side < LEAST_SIDE:
        raise ConfigError(
            f"data.image_size={side} is too small for the discriminator, which halves it three times",
            why="its output would be empty",
            fix=f"data.image_size={LEAST_SIDE} or more",
        )
    return PatchGan(image_channels=image_channels)


class VggDistance(nn.Module):
    """Perceptual distance of images in -1..1: squared distance of normalised VGG16 features (LPIPS without its linear
    layers)."""

    scale: Tensor
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in VGG16:
            if channels == 0:
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        self.features = nn.ModuleList(layers)
        # Map images in -1..1 to the normalisation that VGG was trained with.
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        self.register_buffer("scale", 0.5 / std, persistent=False)
        self.register_buffer("shift", (0.5 - mean) / std, persistent=False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the distances (N,) in fp32."""
        num, dtype = len(one), next(self.parameters()).dtype
        # Both images go through VGG as one batch.
        both = (torch.cat([one, other]).float() * self.scale + self.shift).to(dtype)
        distances = []
        for layer, following in zip(self.features, [*self.features[1:], None], strict=True):
            both = layer(both)
            if isinstance(layer, nn.ReLU) and (following is None or isinstance(following, nn.MaxPool2d)):
                distances.append(_compute_unit_distance(both[:num], both[num:]))
        return torch.stack(distances).sum(0)

    def load_(self, weights: Mapping[str, Tensor], source: str) -> None:
        """Load the feature layers of torchvision's vgg16."""
        own = self.state_dict()
        found = {name: weights[name] for name in own if name in weights and weights[name].shape == own[name].shape}
        if lacking := sorted(set(own) - set(found)):
            raise ModelError(
                f"{source} contains no VGG16 weights: {lacking[0]} is missing or has another shape",
                fix="torchvision's vgg16 weights (features.0.weight ...): model.vgg_weights=FILE",
            )
        self.load_state_dict(found)


def _compute_unit_distance(one: Tensor, other: Tensor) -> Tensor:
    with fp32_island():
        a, b = (F.normalize(to_fp32(features), dim=1, eps=1e-10) for features in (one, other))
        return (a - b).square().sum(1).mean((1, 2))
