"""A backbone that nobody has trained: soft colour histograms and edge strengths of patches, all fixed.

For demos and tests where no weights of a real one are at hand. Objects that look alike get like features, which is all
that slots need; what it lacks is any notion of what things are.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32

LEVELS = (0.15, 0.5, 0.85)
"""Red, green and blue of the colours that pixels are compared with: 27 in all."""
SHARPNESS = 12.0


class FilterBank(nn.Module):
    """Images (N, 3, H, W) in 0..1 to features (N, patches, 32): nearness to 27 colours, and 5 of edges."""

    dim = len(LEVELS) ** 3 + 5

    def __init__(self, patch: int) -> None:
        super().__init__()
        self.patch = patch
        colours = torch.tensor(list(itertools.product(LEVELS, repeat=3)))
        sobel = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        diagonal = torch.tensor([[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 1.0, 2.0]]) / 8
        edges = torch.stack([sobel, sobel.T, diagonal, diagonal.flip(1)])
        self.register_buffer("colours", colours)
        self.register_buffer("edges", edges.unsqueeze(1))

    def forward(self, images: Tensor) -> Tensor:
        with fp32_island():
            images = to_fp32(images)
            colours, edges = self.get_buffer("colours").float(), self.get_buffer("edges").float()
            # Of the squared distance, what is the same for all colours does not matter to the softmax.
            likeness = F.conv2d(images, 2 * colours[..., None, None], -colours.square().sum(1))
            nearness = torch.softmax(SHARPNESS * likeness, dim=1)
            grey = images.mean(1, keepdim=True)
            strength = F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), edges).abs()
            pooled = F.avg_pool2d(torch.cat([nearness, 4 * strength, grey], dim=1), self.patch)
            features = pooled.flatten(2).transpose(1, 2)
            # About unit variance in each channel, as a normalised feature has.
            return (features - 1 / len(colours)) * 5
