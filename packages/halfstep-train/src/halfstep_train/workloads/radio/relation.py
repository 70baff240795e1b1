"""Cross-attention between window means of condition and features, through which the condition enters the U-Net."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 8


class Relation(nn.Module):
    """Project condition and features, and combine them by attention."""

    def __init__(
        self, condition_dim: int, dim: int, windows: tuple[Sequence[int], Sequence[int]], dropout: float
    ) -> None:
        super().__init__()
        self.input_conv1, self.input_conv2 = _make_normed_conv(condition_dim, dim), _make_normed_conv(dim, dim)
        self.attention = WindowMeanAttention(dim, windows, dropout)

    def forward(self, condition: Tensor, features: Tensor) -> Tensor:
        return self.attention(self.input_conv1(condition), self.input_conv2(features))


def _make_normed_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs, momentum=0.03, eps=1e-3))


class WindowMeanAttention(nn.Module):
    """Attention from the condition's window means (queries) to those of the features (keys, values), interpolated to
    the size of the features.
    """

    def __init__(self, dim: int, windows: tuple[Sequence[int], Sequence[int]], dropout: float) -> None:
        super().__init__()
        self.windows = tuple((rows, columns) for rows, columns in windows)
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
        means = _average_windows(condition, self.windows[0])
        means = means + self._attend(means, _average_windows(features, self.windows[1]))
        means = means + self.mlp(means)
        return shortcut + self.out_conv(_resize(means, size))

    def _attend(self, condition_means: Tensor, feature_means: Tensor) -> Tensor:
        queries, keys = _make_tokens(condition_means), _make_tokens(feature_means)
        # Each (B, heads, tokens, head dim).
        q, k, v = (
            part(tokens).unflatten(-1, (HEADS, -1)).transpose(1, 2)
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
