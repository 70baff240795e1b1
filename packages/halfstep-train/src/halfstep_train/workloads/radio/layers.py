"""Layers of RadioDiff's U-Net.

The public code chooses epsilons by the input's dtype (1e-3 for anything but fp32), so autocast changes the function.
Here epsilons are always 1e-5, statistics are fp32, and the Fourier filter runs in an fp32 island; its size follows from
its map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, in_fp32
from halfstep_train.kernels.group_norm import apply_group_norm_silu, can_fuse_group_norm

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
