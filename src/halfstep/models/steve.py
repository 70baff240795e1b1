"""STEVE (Singh et al. 2022): objects in video, found by predicting each frame's words from its slots; upstream's names.

Three parts train together: a discrete VAE that makes words of frames, an encoder that makes slots of them, and a
decoder that predicts the words from the slots. Upstream's weights load but for its masks, which are a flag here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep.islands import fp32_island, to_fp32
from halfstep.models.cross_attention import linear
from halfstep.models.dvae import ConvRelu, DVae, convolution, words_grid
from halfstep.models.slot_video import SlotAttentionVideo
from halfstep.models.word_decoder import WordDecoder
from halfstep.models.words_loss import words_loss

WORD_SIDE = 4
"""Pixels of a word's side."""
KEPT_SIZE = 64
"""At this image size the encoder keeps it; all others are halved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteveSize:
    """Upstream's defaults."""

    image_size: int = 128
    vocabulary: int = 4096
    num_slots: int = 15
    slot_dim: int = 192
    num_iterations: int = 2
    cnn_channels: int = 64
    mlp_dim: int = 192
    predictor_blocks: int = 1
    predictor_heads: int = 4
    dim: int = 192
    decoder_blocks: int = 8
    decoder_heads: int = 4
    dropout: float = 0.1


class Seen(NamedTuple):
    """What a forward pass gives; losses are sums over pixels or words of a frame, averaged over frames."""

    mse: Tensor
    cross_entropy: Tensor
    slots: Tensor
    """(B, T, slots, slot_dim), before projection."""
    attention: Tensor
    """Which slot each position went to: (B, T, slots, rows, columns)."""
    reconstruction: Tensor
    """By the VAE alone, (B, T, channels, H, W), not clamped."""
    words: Tensor
    """(B · T, positions)."""


class GridPositions(nn.Module):
    """A projection of where a pixel is, measured from all four sides, added to it."""

    pe: Tensor

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.projection = convolution(4, dim, 1)
        edges = torch.linspace(0.0, 1.0, side + 1)
        y, x = torch.meshgrid(*[(edges[:-1] + edges[1:]) / 2] * 2, indexing="ij")
        self.register_buffer("pe", torch.stack([x, y, 1 - x, 1 - y]).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.projection(self.pe)
        return out


class SteveEncoder(nn.Module):
    """Frames (B, T, 3, H, W) to slots and attention."""

    def __init__(self, size: SteveSize) -> None:
        super().__init__()
        stride = 1 if size.image_size == KEPT_SIZE else 2
        channels = size.cnn_channels
        self.cnn = nn.Sequential(
            ConvRelu(3, channels, 5, stride, 2),
            *(ConvRelu(channels, channels, 5, 1, 2) for _ in range(2)),
            convolution(channels, size.dim, 5, 1, 2),
        )
        self.pos = GridPositions(size.dim, size.image_size // stride)
        self.layer_norm = nn.LayerNorm(size.dim)
        self.mlp = nn.Sequential(linear(size.dim, size.dim, before_relu=True), nn.ReLU(), linear(size.dim, size.dim))
        self.savi = SlotAttentionVideo(
            size.dim,
            num_slots=size.num_slots,
            slot_dim=size.slot_dim,
            mlp_dim=size.mlp_dim,
            num_iterations=size.num_iterations,
            predictor_blocks=size.predictor_blocks,
            predictor_heads=size.predictor_heads,
        )
        self.slot_proj = linear(size.slot_dim, size.dim, bias=False)

    def forward(self, video: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Slots (B, T, slots, slot_dim) and attention as masks (B, T, slots, rows, columns)."""
        maps = self.pos(self.cnn(video.flatten(0, 1)))
        rows = maps.permute(0, 2, 3, 1).flatten(1, 2)
        features = self.mlp(self.layer_norm(rows)).unflatten(0, video.shape[:2])
        slots, shares = self.savi(features, draw)
        return slots, shares.transpose(2, 3).unflatten(3, maps.shape[2:])


class Steve(nn.Module):
    """Video (B, T, 3, H, W) in 0…1 to losses, slots and masks."""

    def __init__(self, size: SteveSize, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.size = size
        self.grid = words_grid(size.image_size, size.image_size, WORD_SIDE)
        self.dvae = DVae(size.vocabulary, checkpointing=checkpointing)
        self.steve_encoder = SteveEncoder(size)
        self.steve_decoder = WordDecoder(
            size.vocabulary,
            self.grid[0] * self.grid[1],
            dim=size.dim,
            num_blocks=size.decoder_blocks,
            heads=size.decoder_heads,
            dropout=size.dropout,
            checkpointing=checkpointing,
        )

    def forward(
        self,
        video: Tensor,
        tau: Tensor | float,
        *,
        soft_noise: Tensor,
        word_noise: Tensor,
        slot_draw: Tensor,
        hard: bool = False,
    ) -> Seen:
        """The noise of B · T frames (`DVae.forward`), and a normal draw (B, slots, slot_dim) that slots start from."""
        frames = video.flatten(0, 1)
        coded = self.dvae(frames, tau, soft_noise, word_noise, hard=hard)
        with fp32_island():
            mse = (to_fp32(coded.reconstruction) - frames).square().sum() / len(frames)
        reconstruction = coded.reconstruction.unflatten(0, video.shape[:2])
        slots, attention = self.steve_encoder(video, slot_draw)
        hidden = self.steve_decoder(coded.words, self.steve_encoder.slot_proj(slots).flatten(0, 1))
        # Last, as the compiler ends its region there.
        cross_entropy = words_loss(hidden, self.steve_decoder.head.weight, coded.words) / len(frames)
        return Seen(mse, cross_entropy, slots, attention, reconstruction, coded.words)

    def imagined(self, slots: Tensor) -> Tensor:
        """Images (N, 3, H, W) of slots (N, slots, slot_dim), word after word."""
        words = self.steve_decoder.greedy(self.steve_encoder.slot_proj(slots))
        return to_fp32(self.dvae.image_of(words, self.grid)).clamp(0.0, 1.0)
