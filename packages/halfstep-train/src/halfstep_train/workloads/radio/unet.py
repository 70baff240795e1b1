"""RadioDiff's denoiser: a U-Net with one encoder and two decoders, for the drift C and the noise of a latent.

Features of the condition (swin.py) enter every level through window attention (relation.py). The decoders split at the
bottleneck; each starts with its own Fourier filter. Their outputs h1 and h2 are mixed with the noisy latent x at
time t: C = (1 - t) x + t h1 / sqrt(t² + 1), noise = sqrt(t) x + sqrt(1 - t) h2 / sqrt(t² + 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import in_fp32
from halfstep.recompute import Recomputing, choose_block_runner
from halfstep_train.workloads.radio.layers import (
    FourierFilter,
    LinearAttention,
    MultiHeadPositionAttention,
    TimedBlock,
    TimeEmbedding,
)
from halfstep_train.workloads.radio.relation import Relation
from halfstep_train.workloads.radio.swin import SwinPyramid

Windows = Sequence[Sequence[int]]
WINDOWS = ((8, 8), (4, 4), (2, 2), (1, 1))


class Level(nn.Module):
    """Modules of one level: block, relation to the condition, block, attention, convolution to the next level."""

    def __init__(self, block1: TimedBlock, relation: Relation, block2: TimedBlock, end: nn.Module, dim: int) -> None:
        super().__init__()
        self.block1, self.relation, self.block2 = block1, relation, block2
        self.attention = LinearAttention(dim)
        self.end = end


def _get_levels(part: nn.Module) -> list[Level]:
    return list(cast("Iterable[Level]", part.levels))


class DenoisingDecoder(Recomputing):
    """Decode from the bottleneck to the latent's size; `dims` are the channels of stem and levels, finest first."""

    def __init__(
        self,
        dims: Sequence[int],
        out_channels: int,
        size: tuple[int, int],
        windows: tuple[Windows, Windows],
        dropout: float,
    ) -> None:
        super().__init__()
        mid, time_dim = dims[-1], 4 * dims[0]
        self.filter = nn.Sequential(
            nn.GroupNorm(min(mid // 4, 8), mid), nn.Conv2d(mid, mid, 3, padding=1), FourierFilter(mid, size)
        )
        self.levels = nn.ModuleList(
            Level(
                TimedBlock(dims[i + 1] + dims[i], dims[i + 1], time_dim),
                Relation(dims[i], dims[i + 1], (windows[0][i], windows[1][i]), dropout),
                TimedBlock(dims[i + 1] + dims[i], dims[i + 1], time_dim),
                _make_up(dims[i + 1], dims[i], doubles=i > 0),
                dims[i + 1],
            )
            for i in reversed(range(len(dims) - 1))
        )
        self.final_block = TimedBlock(2 * dims[0], dims[0], time_dim)
        self.final_conv = nn.Conv2d(dims[0], out_channels, 1)

    def forward(
        self, x: Tensor, stem: Tensor, skips: Sequence[Tensor], conditions: Sequence[Tensor], time: Tensor
    ) -> Tensor:
        # Every encoder level left two maps, which are used in reverse order.
        x, remaining, run = x + self.filter(x), list(skips), choose_block_runner(self.recompute)
        for level, condition in zip(_get_levels(self), reversed(conditions), strict=True):
            x = run(level.block1, torch.cat([x, remaining.pop()], dim=1), time)
            x = run(level.relation, condition, x)
            x = run(level.block2, torch.cat([x, remaining.pop()], dim=1), time)
            x = level.end(run(level.attention, x))
        return self.final_conv(self.final_block(torch.cat([x, stem], dim=1), time))


def _make_up(inputs: int, outputs: int, *, doubles: bool) -> nn.Sequential:
    """Return the convolution to the next finer level. It has index 1 with and without upsampling, so that its
    parameters always have the same names."""
    first = nn.Upsample(scale_factor=2, mode="nearest") if doubles else nn.Identity()
    return nn.Sequential(first, nn.Conv2d(inputs, outputs, 3, padding=1))


def _make_down(inputs: int, outputs: int, *, halves: bool) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 4, 2, 1) if halves else nn.Conv2d(inputs, outputs, 3, padding=1)


class RadioUNet(Recomputing):
    """Predict C and noise, both in fp32, from the noisy latent, the time, and the condition as a full-size image."""

    def __init__(
        self,
        condition: SwinPyramid,
        *,
        channels: int = 3,
        dim: int = 128,
        multipliers: Sequence[int] = (1, 2, 4, 4),
        latent_size: Sequence[int] = (64, 64),
        windows: tuple[Windows, Windows] = (WINDOWS, WINDOWS),
        fourier_scale: float = 16.0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        dims, time_dim = [dim, *(dim * factor for factor in multipliers)], 4 * dim
        num_levels = len(multipliers)
        assert len(condition.widths) == num_levels, "one condition map for each level"
        self.condition = condition
        self.stem = nn.Sequential(
            nn.Conv2d(channels + condition.widths[0], dim, 7, padding=3), nn.GroupNorm(min(dim // 4, 8), dim)
        )
        self.projections = nn.ModuleList(
            nn.Conv2d(width, level_dim, 1) for width, level_dim in zip(condition.widths, dims, strict=False)
        )
        self.time = TimeEmbedding(dim, fourier_scale)
        self.levels = nn.ModuleList(
            Level(
                TimedBlock(dims[i], dims[i], time_dim),
                Relation(dims[i], dims[i], (windows[0][i], windows[1][i]), dropout),
                TimedBlock(dims[i], dims[i], time_dim),
                _make_down(dims[i], dims[i + 1], halves=i < num_levels - 1),
                dims[i],
            )
            for i in range(num_levels)
        )
        self.mid_block1, self.mid_block2 = (TimedBlock(dims[-1], dims[-1], time_dim) for _ in range(2))
        self.mid_attention = MultiHeadPositionAttention(dims[-1])
        halvings = 2 ** (num_levels - 1)
        mid_size = (latent_size[0] // halvings, latent_size[1] // halvings)
        self.decoders = nn.ModuleList(DenoisingDecoder(dims, channels, mid_size, windows, dropout) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        return self.denoise(x, time, self.condition(image))

    def denoise(self, x: Tensor, time: Tensor, features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return C and noise from the condition's features, which a sampler computes once for all steps."""
        embedded = self.time(time)
        finest = features[0]  # another size only if the Swin patch differs from the first stage's reduction
        if finest.shape[2:] != x.shape[2:]:
            finest = F.interpolate(finest, size=x.shape[2:], mode="bilinear")
        stem = self.stem(torch.cat([x.to(finest.dtype), finest], dim=1))
        conditions = [project(feature) for project, feature in zip(self.projections, features, strict=True)]
        h, skips, run = stem, [], choose_block_runner(self.recompute)
        for level, condition in zip(_get_levels(self), conditions, strict=True):
            h = run(level.block1, h, embedded)
            skips.append(h)
            h = run(level.block2, run(level.relation, condition, h), embedded)
            h = run(level.attention, h)
            skips.append(h)
            h = level.end(h)
        h = self.mid_block2(self.mid_attention(self.mid_block1(h, embedded)), embedded)
        # Both decoders start from the same bottleneck and use the same skips.
        h1, h2 = (decoder(h, stem, skips, conditions, embedded) for decoder in self.decoders)
        return mix_outputs(x, time, h1, h2)


@in_fp32
def mix_outputs(x: Tensor, time: Tensor, h1: Tensor, h2: Tensor) -> tuple[Tensor, Tensor]:
    """Return C and noise, mixed from the noisy latent and the outputs of the decoders (formula above)."""
    t = time.view(-1, 1, 1, 1)
    scale = (t.square() + 1).rsqrt()
    return (1 - t) * x + t * scale * h1, t.sqrt() * x + (1 - t).sqrt() * scale * h2
