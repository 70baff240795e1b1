"""STEVE (Singh et al. 2022): find objects in video by predicting the words of each frame from its slots.

Three modules train together: a discrete VAE that codes frames as words, an encoder that computes slots from frames, and
a decoder that predicts the words from the slots. Modules have upstream's names, so its weights load, except for its
stored causal masks.

The slots of one frame, passed through a predictor, initialise the next frame. Upstream's weights depend on its order
of operations: the recurrent cell takes the slots before normalisation, and the perceptron runs in all iterations but
the last. Slots stay fp32 from frame to frame, since rounding errors would add up. The softmax over slots, its
renormalisation over positions and the cell are an fp32 island: the epsilon 1e-8 vanishes in half formats, and a slot
that wins no position would be 0/0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.models.layers import divide_side
from halfstep_train.workloads.slots.config import SteveModelConfig
from halfstep_train.workloads.slots.dvae import WORDS_TILE, ConvRelu, DVae, make_convolution
from halfstep_train.workloads.slots.slot_attention import HEADS, apply_gates
from halfstep_train.workloads.slots.word_decoder import TransformerEncoder, WordDecoder, make_linear, words_loss

WORD_SIDE = 4
"""Side of a word in pixels."""
KEPT_SIZE = 64
"""The image size at which the encoder keeps the resolution; it halves all others, as upstream."""


class SteveOutputs(NamedTuple):
    """Outputs of a forward pass. Losses are sums over the pixels or words of a frame, averaged over frames."""

    mse: Tensor
    cross_entropy: Tensor
    slots: Tensor
    """(B, T, slots, slot_dim), before projection."""
    attention: Tensor
    """How much of each position each slot takes: (B, T, slots, rows, columns)."""
    reconstruction: Tensor
    """The VAE's reconstruction (B, T, channels, H, W), not clamped."""
    words: Tensor
    """(B · T, positions)."""


class GridPositions(nn.Module):
    """Add a projection of each pixel's distances from the four sides."""

    pe: Tensor

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.projection = make_convolution(4, dim, 1)
        # Positions are pixel centres in 0..1.
        edges = torch.linspace(0.0, 1.0, side + 1)
        y, x = torch.meshgrid(*[(edges[:-1] + edges[1:]) / 2] * 2, indexing="ij")
        self.register_buffer("pe", torch.stack([x, y, 1 - x, 1 - y]).unsqueeze(0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.projection(self.pe)


class SteveEncoder(nn.Module):
    """Compute slots and attention of frames (B, T, 3, H, W)."""

    def __init__(self, size: SteveModelConfig, image_size: int) -> None:
        super().__init__()
        stride = 1 if image_size == KEPT_SIZE else 2
        channels = size.cnn_channels
        self.cnn = nn.Sequential(
            ConvRelu(3, channels, 5, stride, 2),
            *(ConvRelu(channels, channels, 5, 1, 2) for _ in range(2)),
            make_convolution(channels, size.dim, 5, 1, 2),
        )
        self.pos = GridPositions(size.dim, image_size // stride)
        self.layer_norm = nn.LayerNorm(size.dim)
        self.mlp = nn.Sequential(
            make_linear(size.dim, size.dim, before_relu=True), nn.ReLU(), make_linear(size.dim, size.dim)
        )
        self.savi = SlotAttentionVideo(size.dim, slot_dim=size.slot_dim, num_iterations=size.iterations)
        self.slot_proj = make_linear(size.slot_dim, size.dim, bias=False)

    def forward(self, video: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots (B, T, slots, slot_dim) and attention as masks (B, T, slots, rows, columns)."""
        maps = self.pos(self.cnn(video.flatten(0, 1)))
        # (B · T, positions, channels)
        rows = maps.permute(0, 2, 3, 1).flatten(1, 2)
        features = self.mlp(self.layer_norm(rows)).unflatten(0, video.shape[:2])
        slots, shares = self.savi(features, draw)
        return slots, shares.transpose(2, 3).unflatten(3, maps.shape[2:])


class Steve(nn.Module):
    """Compute losses, slots and masks of video (B, T, 3, H, W) in 0..1."""

    def __init__(self, size: SteveModelConfig, image_size: int, *, checkpointing: bool = False) -> None:
        super().__init__()
        side = divide_side(image_size, WORD_SIDE, WORDS_TILE)
        self.grid = side, side
        self.dvae = DVae(size.vocabulary, checkpointing=checkpointing)
        self.steve_encoder = SteveEncoder(size, image_size)
        self.steve_decoder = WordDecoder(
            size.vocabulary,
            side**2,
            dim=size.dim,
            num_blocks=size.decoder_blocks,
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
    ) -> SteveOutputs:
        """Return losses, slots and masks. The noise is that of B · T frames (`DVae.forward`); slots start from the
        normal draw `slot_draw` (B, slots, slot_dim)."""
        frames = video.flatten(0, 1)
        coded = self.dvae(frames, tau, soft_noise, word_noise, hard=hard)
        with fp32_island():
            mse = (to_fp32(coded.reconstruction) - frames).square().sum() / len(frames)
        reconstruction = coded.reconstruction.unflatten(0, video.shape[:2])
        slots, attention = self.steve_encoder(video, slot_draw)
        hidden = self.steve_decoder(coded.words, self.steve_encoder.slot_proj(slots).flatten(0, 1))
        # Computed last: the loss is not compiled, so it ends the compiled region.
        cross_entropy = words_loss(hidden, self.steve_decoder.head.weight, coded.words) / len(frames)
        return SteveOutputs(mse, cross_entropy, slots, attention, reconstruction, coded.words)

    def decode_slots(self, slots: Tensor) -> Tensor:
        """Decode slots (N, slots, slot_dim) to images (N, 3, H, W), word by word."""
        words = self.steve_decoder.decode_greedily(self.steve_encoder.slot_proj(slots))
        return to_fp32(self.dvae.decode_words(words, self.grid)).clamp(0.0, 1.0)


EPSILON = 1e-8


class RecurrentCell(nn.GRUCell):
    """`nn.GRUCell` as separate operations, which the compiler can fuse with neighbouring ones."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim)
        nn.init.xavier_uniform_(self.weight_ih)
        nn.init.orthogonal_(self.weight_hh)
        nn.init.zeros_(self.bias_ih)
        nn.init.zeros_(self.bias_hh)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        assert hx is not None
        own = to_fp32([self.weight_ih, self.bias_ih, self.weight_hh, self.bias_hh])  # weights are bf16 in bf16-true
        return apply_gates(F.linear(input, own[0], own[1]), F.linear(hx, own[2], own[3]), hx)


class SlotAttentionVideo(nn.Module):
    """Slot attention over the frames of a clip, starting from a normal draw (B, slots, slot_dim)."""

    def __init__(self, dim: int, *, slot_dim: int, num_iterations: int) -> None:
        super().__init__()
        self.slot_dim, self.num_iterations = slot_dim, num_iterations
        self.slot_mu, self.slot_log_sigma = (nn.Parameter(torch.empty(1, 1, slot_dim)) for _ in range(2))
        nn.init.xavier_uniform_(self.slot_mu)
        nn.init.xavier_uniform_(self.slot_log_sigma)
        self.norm_inputs = nn.LayerNorm(dim)
        self.norm_slots = nn.LayerNorm(slot_dim)
        self.norm_mlp = nn.LayerNorm(slot_dim)
        self.project_q = make_linear(slot_dim, slot_dim, bias=False)
        self.project_k = make_linear(dim, slot_dim, bias=False)
        self.project_v = make_linear(dim, slot_dim, bias=False)
        self.gru = RecurrentCell(slot_dim)
        self.mlp = nn.Sequential(
            make_linear(slot_dim, slot_dim, before_relu=True), nn.ReLU(), make_linear(slot_dim, slot_dim)
        )
        self.predictor = TransformerEncoder(slot_dim, HEADS)

    def forward(self, features: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots (B, T, slots, slot_dim) in fp32, and the attention (B, T, positions, slots)."""
        slots = self.slot_mu + torch.exp(self.slot_log_sigma) * draw
        normed = self.norm_inputs(features)
        # Keys and values of all frames in one product each.
        keys, values = self.project_k(normed) * self.slot_dim**-0.5, self.project_v(normed)
        all_slots, all_shares = [], []
        for keys_now, values_now in zip(keys.unbind(1), values.unbind(1), strict=True):
            slots, shares = self._correct(slots, keys_now, to_fp32(values_now))
            all_slots.append(slots)
            all_shares.append(shares)
            slots = to_fp32(self.predictor(slots))
        return torch.stack(all_slots, dim=1), torch.stack(all_shares, dim=1)

    def _correct(self, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots after all iterations on one frame, and the last iteration's attention."""
        for iteration in range(self.num_iterations):
            logits = keys @ self.project_q(self.norm_slots(slots)).transpose(1, 2)
            with fp32_island():
                # Softmax over slots, so that they compete for positions; then a weighted mean over positions.
                shares = torch.softmax(to_fp32(logits), dim=-1)
                weights = shares + EPSILON
                weights = weights / weights.sum(dim=1, keepdim=True)
                slots = self.gru(weights.transpose(1, 2) @ values, slots)
            if iteration < self.num_iterations - 1:
                slots = slots + to_fp32(self.mlp(self.norm_mlp(slots)))
        return slots, shares
