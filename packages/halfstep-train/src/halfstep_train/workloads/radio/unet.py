"""RadioDiff's denoiser: a U-Net with one encoder and two decoders, for the drift C and the noise of a latent.

Features of the condition (swin.py) enter every level through window attention. The decoders split at the
bottleneck; each starts with its own Fourier filter. Their outputs h1 and h2 are mixed with the noisy latent x at
time t: C = (1 - t) x + t h1 / sqrt(t² + 1), noise = sqrt(t) x + sqrt(1 - t) h2 / sqrt(t² + 1).

The public code chooses epsilons by the input's dtype (1e-3 for anything but fp32), so autocast changes the function.
Here epsilons are always 1e-5, statistics are fp32, and the Fourier filter runs in an fp32 island; its size follows from
its map.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, in_fp32
from halfstep.recompute import Recomputing, choose_block_runner
from halfstep_train.kernels.group_norm import apply_group_norm_silu, can_fuse_group_norm
from halfstep_train.workloads.radio.config import RadioDiffModelConfig
from halfstep_train.workloads.radio.swin import SwinPyramid

EPSILON = 1e-5


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose weights are standardised per output channel (Qiao et al. 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, standardise(self.weight), self.bias)


@in_fp32
def standardise(weight: Tensor) -> Tensor:
    """Return the weight with mean 0 and variance 1 per output channel."""
    variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
    return (weight - mean) * (variance + EPSILON).rsqrt()


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each position, with a scale and no shift."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return _normalise_channels(x, self.g).to(x.dtype)


@in_fp32
def _normalise_channels(x: Tensor, scale: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
    return (x - mean) * (variance + EPSILON).rsqrt() * scale


class ConvNormSilu(nn.Module):
    """Convolution, GroupNorm, optional scale and shift, SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.proj = StandardisedConv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(8, outputs)

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.proj(x)
        if can_fuse_group_norm(x, self.norm):
            # The fused kernel takes scale and shift as (B, C); None is a bias that it could add.
            between = (None, *(part.flatten(1) for part in scale_shift)) if scale_shift else ()
            return apply_group_norm_silu(self.norm, x, *between)
        x = self.norm(x)
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return F.silu(x)


class TimedBlock(nn.Module):
    """Two convolutions and a shortcut; the time embedding scales and shifts the output of the first norm."""

    def __init__(self, inputs: int, outputs: int, time_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, 2 * outputs))
        self.block1, self.block2 = ConvNormSilu(inputs, outputs), ConvNormSilu(outputs, outputs)
        self.res_conv = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        # (B, 2 · outputs) as two maps (B, outputs, 1, 1).
        scale, shift = self.mlp(time)[:, :, None, None].chunk(2, dim=1)
        h = self.block2(self.block1(x, (scale, shift)))
        return h + self.res_conv(x)


HEADS, HEAD_DIM = 4, 32


class LinearAttention(nn.Module):
    """Attention whose cost is linear in the number of positions (Shen et al. 2021)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.to_qkv = nn.Conv2d(channels, 3 * HEADS * HEAD_DIM, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(HEADS * HEAD_DIM, channels, 1), ChannelNorm(channels))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        # Each (B, heads, head dim, positions).
        q, k, v = self.to_qkv(self.norm(x)).view(batch, 3, HEADS, HEAD_DIM, height * width).unbind(1)
        found = linear_attention(q, k, v).to(q.dtype)
        return x + self.to_out(found.reshape(batch, HEADS * HEAD_DIM, height, width))


@in_fp32
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute linear attention of inputs (B, heads, dim, positions) in fp32.

    Keys are near 1 / positions and values are divided by positions: their products fall below fp16's smallest number.
    """
    # Softmax over channels for queries and over positions for keys. Without a joint softmax, (q kᵀ) v = q (kᵀ v), and
    # the context kᵀ v is only dim × dim.
    q = q.softmax(dim=-2) * q.shape[-2] ** -0.5
    context = k.softmax(dim=-1) @ (v / v.shape[-1]).transpose(-2, -1)
    return context.transpose(-2, -1) @ q


class MultiHeadPositionAttention(nn.Module):
    """Self-attention over all positions, with four heads and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = ChannelNorm(channels)
        self.to_qkv = nn.Conv2d(channels, 3 * HEADS * HEAD_DIM, 1, bias=False)
        self.to_out = nn.Conv2d(HEADS * HEAD_DIM, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        qkv = self.to_qkv(self.norm(x)).view(batch, 3, HEADS, HEAD_DIM, height * width)
        # Each (B, heads, positions, head dim), as the fused kernel expects.
        q, k, v = qkv.transpose(-2, -1).unbind(1)
        found = F.scaled_dot_product_attention(q, k, v).transpose(-2, -1)
        return x + self.to_out(found.reshape(batch, HEADS * HEAD_DIM, height, width))


class FourierFilter(nn.Module):
    """Multiply each frequency of each channel by a learned factor: irfft2(rfft2(x) * weight).

    The weight covers the half spectrum of the map, (H, W // 2 + 1). The transforms are products with sine and cosine
    matrices: bottleneck maps are only about 8×8, and complex numbers cause graph breaks in compiled code. After the
    product the spectrum is not Hermitian, and cuFFT and the CPU treat such spectra differently. This code ignores the
    imaginary parts that no real map has, as torch's FFT does on a CPU.
    """

    def __init__(self, channels: int, size: Sequence[int]) -> None:
        super().__init__()
        self.size = (size[0], size[1])
        self.complex_weight = nn.Parameter(0.02 * torch.randn(channels, size[0], size[1] // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[2:] == self.size, f"a filter for maps of {self.size} got {tuple(x.shape[2:])}"
        return apply_filter(x, self.complex_weight).to(x.dtype)


@in_fp32
def apply_filter(x: Tensor, weight: Tensor) -> Tensor:
    """Compute irfft2(rfft2(x) * weight) with matmuls.

    Transposing puts the axis to transform last, so that each transform is one matmul over all maps.
    """
    height, width = x.shape[2:]
    half = weight.shape[2]
    (cos_h, sin_h), (cos_w, sin_w) = _make_waves(height, height, x.device), _make_waves(width, half, x.device)
    # Forward transform exp(-iwx) = cos - i sin over the width, then over the height.
    real, imaginary = (x @ cos_w).mT, -(x @ sin_w).mT
    real, imaginary = real @ cos_h + imaginary @ sin_h, imaginary @ cos_h - real @ sin_h
    # Complex product with the weight a + ib.
    a, b = weight.unbind(-1)
    real, imaginary = real * a.mT - imaginary * b.mT, real * b.mT + imaginary * a.mT
    # Inverse transform exp(+iwx) over the height; the width follows below, real part only.
    real, imaginary = (real @ cos_h - imaginary @ sin_h).mT, (imaginary @ cos_h + real @ sin_h).mT
    # The half spectrum holds one of each conjugate pair, so all frequencies but 0 and Nyquist count twice.
    frequency = torch.arange(half, device=x.device)
    count = torch.where((frequency == 0) | (2 * frequency == width), 1.0, 2.0) / (height * width)
    return (real * count) @ cos_w.T - (imaginary * count) @ sin_w.T


def _make_waves(length: int, num_frequencies: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (length, frequencies). Angles are reduced modulo a full turn as integers, which is
    exact."""
    positions, frequencies = torch.arange(length, device=device), torch.arange(num_frequencies, device=device)
    angle = (positions[:, None] * frequencies[None, :] % length).float() * (2 * math.pi / length)
    return angle.cos(), angle.sin()


class TimeEmbedding(nn.Module):
    """Embed the time: random Fourier features of log(t) / 4, then two linear layers."""

    W: Tensor

    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.register_buffer("W", torch.randn(dim // 2) * scale)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, 4 * dim))

    def forward(self, time: Tensor) -> Tensor:
        # Angles reach hundreds of radians: in bf16 they would be off by whole turns.
        with fp32_island():
            angle = (time.float().log() / 4)[:, None] * self.W.float()[None, :] * (2 * math.pi)
            waves = torch.cat([angle.sin(), angle.cos()], dim=-1)
        return self.mlp(waves)


# --- how the condition enters the U-Net ---


RELATION_HEADS = 8


class Relation(nn.Module):
    """Project condition and features, and combine them by attention."""

    def __init__(self, condition_dim: int, dim: int, window: tuple[int, int], dropout: float) -> None:
        super().__init__()
        self.input_conv1, self.input_conv2 = _make_normed_conv(condition_dim, dim), _make_normed_conv(dim, dim)
        self.attention = WindowMeanAttention(dim, window, dropout)

    def forward(self, condition: Tensor, features: Tensor) -> Tensor:
        return self.attention(self.input_conv1(condition), self.input_conv2(features))


def _make_normed_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs, momentum=0.03, eps=1e-3))


class WindowMeanAttention(nn.Module):
    """Attention from the condition's window means (queries) to those of the features (keys, values), interpolated to
    the size of the features.
    """

    def __init__(self, dim: int, window: tuple[int, int], dropout: float) -> None:
        super().__init__()
        self.window = window
        self.q_lin, self.k_lin, self.v_lin = (nn.Linear(dim, dim) for _ in range(3))
        self.mlp = Mlp(dim, 2 * dim, dropout)
        self.concat_conv, self.out_conv = nn.Conv2d(2 * dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.gn = nn.GroupNorm(8, dim)
        self.apply(_initialise)

    def forward(self, condition: Tensor, features: Tensor) -> Tensor:
        size = features.shape[2:]
        # The shortcut sees the condition at full resolution; attention only its window means.
        both = torch.cat([_resize(condition, size), features], dim=1)
        shortcut = self.gn(features + self.concat_conv(both))
        means = _average_windows(condition, self.window)
        means = means + self._attend(means, _average_windows(features, self.window))
        means = means + self.mlp(means)
        return shortcut + self.out_conv(_resize(means, size))

    def _attend(self, condition_means: Tensor, feature_means: Tensor) -> Tensor:
        queries, keys = _make_tokens(condition_means), _make_tokens(feature_means)
        # Each (B, heads, tokens, head dim).
        q, k, v = (
            part(tokens).unflatten(-1, (RELATION_HEADS, -1)).transpose(1, 2)
            for part, tokens in ((self.q_lin, queries), (self.k_lin, keys), (self.v_lin, keys))
        )
        # scale=1: the public weights were trained with unscaled logits.
        found = F.scaled_dot_product_attention(q, k, v, scale=1.0)
        return found.transpose(1, 2).flatten(2).transpose(1, 2).reshape(condition_means.shape)


class Mlp(nn.Module):
    """Two 1×1 convolutions with ReLU and dropout."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(dim, hidden, 1), nn.Conv2d(hidden, dim, 1)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(F.relu(self.fc1(x)))))


def _average_windows(x: Tensor, window: tuple[int, int]) -> Tensor:
    rows, columns = window
    x = F.pad(x, (0, -x.shape[3] % columns, 0, -x.shape[2] % rows))
    return F.avg_pool2d(x, (rows, columns))


def _make_tokens(x: Tensor) -> Tensor:
    """Return tokens (B, positions, C) with sine position embeddings."""
    return x.flatten(2).transpose(1, 2) + make_sine_positions(x.shape[2], x.shape[3], x.shape[1], x.device).to(x.dtype)


def make_sine_positions(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Return (positions, channels): half of the channels encode the row and half the column, both counted from 1."""
    pair = torch.arange(channels // 4, device=device)
    # 10000^(-4 pair / channels): the usual sine embedding, with half of the channels for each axis.
    frequencies = torch.exp(pair * (-4 * math.log(10000) / channels))

    def make_waves(length: int) -> Tensor:
        angle = torch.arange(1, length + 1, device=device)[:, None] * frequencies
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

    rows = make_waves(height)[:, None].expand(-1, width, -1)
    columns = make_waves(width)[None].expand(height, -1, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


def _resize(x: Tensor, size: torch.Size) -> Tensor:
    return x if x.shape[2:] == size else F.interpolate(x, size=size, mode="bilinear", align_corners=True)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_normal_(module.weight)
    if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
        nn.init.zeros_(module.bias)


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
        windows: Sequence[tuple[int, int]],
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
                Relation(dims[i], dims[i + 1], windows[i], dropout),
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


class RadioUNet(Recomputing):
    """Predict C and noise, both in fp32, from the noisy latent, the time, and the condition as a full-size image."""

    def __init__(
        self, settings: RadioDiffModelConfig, *, channels: int, latent_size: Sequence[int], patch: int = 4
    ) -> None:
        """Build the layers; `patch` is the side of the Swin transformer's patches."""
        super().__init__()
        dim, windows, dropout = settings.width, settings.windows, settings.dropout
        dims, time_dim = [dim, *(dim * factor for factor in settings.multipliers)], 4 * dim
        num_levels = len(settings.multipliers)
        self.condition = condition = SwinPyramid(settings.pyramid, patch=patch)
        self.stem = nn.Sequential(
            nn.Conv2d(channels + condition.widths[0], dim, 7, padding=3), nn.GroupNorm(min(dim // 4, 8), dim)
        )
        self.projections = nn.ModuleList(
            nn.Conv2d(width, level_dim, 1) for width, level_dim in zip(condition.widths, dims, strict=False)
        )
        self.time = TimeEmbedding(dim, settings.fourier_scale)
        self.levels = nn.ModuleList(
            Level(
                TimedBlock(dims[i], dims[i], time_dim),
                Relation(dims[i], dims[i], windows[i], dropout),
                TimedBlock(dims[i], dims[i], time_dim),
                # All levels but the last halve the map.
                nn.Conv2d(dims[i], dims[i + 1], *((4, 2, 1) if i < num_levels - 1 else (3, 1, 1))),
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
