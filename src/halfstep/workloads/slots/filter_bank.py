"""A backbone that nobody has trained: soft colour histograms and edge strengths of patches, and where they are.

For demos and tests where no weights of a real one are at hand. Like parts of a frame get like features, and every patch
knows its place, as a transformer's does: slots could not say otherwise where their object is. What it lacks is any
notion of what things are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32

LEVELS = (0.15, 0.5, 0.85)
"""Red, green and blue of the colours that pixels are compared with: 27 in all."""
SHARPNESS = 12.0
WAVES = (1, 2, 3, 4)
"""Half periods over a frame of the cosines that say where a patch is."""
SPREAD = 0.06
"""Deviation of a channel between the patches of a frame, about; features are divided by it."""


class FilterBank(nn.Module):
    """Images (N, 3, H, W) in 0..1 to features (N, patches, 40): 27 colours, 5 of edges, 8 of the place."""

    look_dim = len(LEVELS) ** 3 + 5
    dim = look_dim + 2 * len(WAVES)

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        diagonal = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]) / 8
        edges = torch.stack([sobel, sobel.T, diagonal, diagonal.flip(1)])
        self.register_buffer("levels", torch.tensor(LEVELS).view(-1, 1, 1))
        self.register_buffer("edges", edges.unsqueeze(1))

    def forward(self, images: Tensor) -> Tensor:
        with fp32_island():
            images = to_fp32(images)
            levels, edges = self.get_buffer("levels").float(), self.get_buffer("edges").float()
            # Colours are all triples of levels, so a softmax over them is the product of one for each channel.
            nearness = torch.softmax(-SHARPNESS * (images.unsqueeze(2) - levels).square(), dim=2)
            red, green, blue = nearness.unbind(1)
            nearness = _products(_products(red, green), blue)
            grey = images.mean(1, keepdim=True)
            strength = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), edges).abs()
            pooled = F.avg_pool2d(torch.cat([nearness, 4 * strength, grey], dim=1), self.patch)
            # Against the frame's own mean: what it is all made of tells nothing apart.
            looks = (pooled - pooled.mean((2, 3), keepdim=True)) / SPREAD
            places = _places(looks.shape[2], looks.shape[3], looks.device).expand(len(looks), -1, -1, -1)
            return torch.cat([looks, places], dim=1).flatten(2).transpose(1, 2)


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Every channel of (N, C, H, W) times every one of (N, D, H, W): (N, C · D, H, W)."""
    return (one.unsqueeze(2) * other.unsqueeze(1)).flatten(1, 2)


def _places(rows: int, columns: int, device: torch.device) -> Tensor:
    """Cosines (1, 8, rows, columns) of where a patch is, down and across."""
    down, across = ((torch.arange(count, device=device) + 0.5) / count for count in (rows, columns))
    waves = [torch.cos(math.pi * wave * down).view(-1, 1).expand(rows, columns) for wave in WAVES]
    waves += [torch.cos(math.pi * wave * across).expand(rows, columns) for wave in WAVES]
    return torch.stack(waves).unsqueeze(0)
