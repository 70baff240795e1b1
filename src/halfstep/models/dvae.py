"""The discrete VAE of SLATE and STEVE (Singh et al. 2022): an image as a grid of words, and back; upstream's names.

Between encoder and decoder every position holds one number for each word of the vocabulary: logits, Gumbel noise,
their softmax. At 72 frames of 32×32 positions and 4096 words each of these is 1.2 GB in fp32. They are needed only
between two small vectors of 64 channels, so that part runs frame by frame and is computed again in backward: nothing of
the vocabulary's width is kept. Words are drawn without a one-hot tensor: an argmax over logits + noise in fp32.

log_softmax before the noise, as upstream has it, adds one number to a whole row: neither softmax nor argmax sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep.islands import fp32_island
from halfstep.models.keyed_noise import gumbel_noise
from halfstep.models.recompute import Recomputing, block_runner, recomputed, region_runner

WIDTH = 64
CHUNK_BYTES = 2**27
"""Of one fp32 tensor as wide as the vocabulary: eight frames of 1024 positions and 4096 words."""


class Coded(NamedTuple):
    """What the VAE makes of images."""

    reconstruction: Tensor
    """(N, channels, H, W), not clamped."""
    words: Tensor
    """(N, positions) int64, without gradient."""


class DVae(Recomputing):
    """Images (N, channels, H, W) to words and back. STEVE's own quarters each side; `downs` and `ups` say otherwise."""

    def __init__(
        self,
        vocabulary: int,
        *,
        image_channels: int = 3,
        downs: Sequence[tuple[int, int]] = ((4, 6),),
        ups: Sequence[int] = (2, 2),
        checkpointing: bool = False,
    ) -> None:
        """`downs`: each a stride and how many 1×1 convolutions follow it. `ups`: factors of the decoder's zooms."""
        super().__init__()
        self.recompute = "blocks" if checkpointing else "none"
        self.vocabulary = vocabulary
        self.encoder = nn.Sequential(*_encoder_layers(image_channels, downs), convolution(WIDTH, vocabulary, 1))
        self.decoder = nn.Sequential(
            ConvRelu(vocabulary, WIDTH, 1), *_decoder_layers(ups), convolution(WIDTH, image_channels, 1)
        )

    def forward(
        self, images: Tensor, tau: Tensor | float, soft_noise: Tensor, word_noise: Tensor, *, hard: bool = False
    ) -> Coded:
        """Two separate draws: one for what the decoder sees, one for the words. Each is keys (N, 2) or the noise itself
        (N, positions, words). `hard`: the decoder sees one word at each position, gradients go through the softmax."""
        hidden: Tensor = self.encoder[:-1](images)
        rows = hidden.permute(0, 2, 3, 1).flatten(1, 2)
        embedded = self.embedded_softly(rows, tau, soft_noise, hard=hard)
        return Coded(self.decoded(embedded, hidden.shape[2:]), self.drawn_words(rows.detach(), word_noise))

    def embedded_softly(self, rows: Tensor, tau: Tensor | float, noise: Tensor, *, hard: bool) -> Tensor:
        """The decoder's first layer on softmax((logits + noise) / tau), before its bias: (N, positions, 64)."""
        chunks = _chunks(rows, self.vocabulary)

        def embedded(rows: Tensor, noise: Tensor) -> Tensor:
            logits = self._logits(rows)
            with fp32_island():
                noisy = logits.float() + gumbel_noise(noise, rows.shape[1], self.vocabulary)
                shares = torch.softmax(noisy / tau, dim=-1)
                if hard:
                    every = torch.arange(self.vocabulary, device=rows.device)
                    one_hot = (noisy.argmax(dim=-1, keepdim=True) == every).float()
                    shares = one_hot - shares.detach() + shares
            weight = self._first_convolution().weight.flatten(1)
            return F.linear(shares.to(rows.dtype), weight.to(rows.dtype))

        pieces = zip(rows.split(chunks), noise.split(chunks), strict=True)
        if len(chunks) == 1 or not torch.is_grad_enabled():
            return torch.cat([embedded(*piece) for piece in pieces])
        return torch.cat([recomputed(embedded, *piece) for piece in pieces])

    @torch.no_grad()
    def drawn_words(self, rows: Tensor, noise: Tensor) -> Tensor:
        """One word for each position, drawn by the logits' probabilities: the argmax of logits + Gumbel noise."""
        chunks = _chunks(rows, self.vocabulary)
        return torch.cat([self._argmax(*piece) for piece in zip(rows.split(chunks), noise.split(chunks), strict=True)])

    def _argmax(self, rows: Tensor, noise: Tensor) -> Tensor:
        with fp32_island():
            drawn = gumbel_noise(noise, rows.shape[1], self.vocabulary)
        return (self._logits(rows).float() + drawn).argmax(dim=-1)

    def _logits(self, rows: Tensor) -> Tensor:
        """Weights are cast anew for each chunk, so that the chunks' gradients are summed in fp32."""
        last = self.encoder[-1]
        assert isinstance(last, nn.Conv2d)
        assert last.bias is not None
        return F.linear(rows, last.weight.flatten(1).to(rows.dtype), last.bias.to(rows.dtype))

    def decoded(self, embedded: Tensor, grid: Sequence[int]) -> Tensor:
        """The image from the first layer's output before its bias, (N, positions, 64)."""
        bias = self._first_convolution().bias
        assert bias is not None
        first = torch.relu(embedded + bias.to(embedded.dtype))
        maps = first.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)
        return region_runner(self.recompute)(self._through_decoder, maps)

    def _through_decoder(self, maps: Tensor) -> Tensor:
        """Zoom after zoom, and the last layer with the last one; where blocks are recomputed, what lies between is
        kept."""
        run = block_runner(self.recompute)
        last = len(self.decoder) - 1
        ends = [place + 1 for place, layer in enumerate(self.decoder) if isinstance(layer, nn.PixelShuffle)]
        for start, end in zip([1, *ends], [*ends[:-1], last + 1], strict=False):
            maps = run(self.decoder[start:end], maps)
        return maps

    def image_of(self, words: Tensor, grid: Sequence[int]) -> Tensor:
        """What (N, positions) words look like."""
        return self.decoded(F.embedding(words, self._first_convolution().weight.flatten(1).t()), grid)

    def _first_convolution(self) -> nn.Conv2d:
        block = self.decoder[0]
        assert isinstance(block, ConvRelu)
        return block.m


class ConvRelu(nn.Module):
    """Convolution and ReLU; `m` is upstream's name."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.m = convolution(in_channels, out_channels, kernel, stride, padding, before_relu=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.m(x))


def convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0, *, before_relu: bool = False
) -> nn.Conv2d:
    """Started as upstream does: Kaiming before a ReLU, Xavier else, no bias at first."""
    made = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
    if before_relu:
        nn.init.kaiming_uniform_(made.weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(made.weight)
    assert made.bias is not None
    nn.init.zeros_(made.bias)
    return made


def _encoder_layers(image_channels: int, downs: Sequence[tuple[int, int]]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stride, num_pointwise in downs:
        layers.append(ConvRelu(WIDTH if layers else image_channels, WIDTH, stride, stride))
        layers += [ConvRelu(WIDTH, WIDTH, 1) for _ in range(num_pointwise)]
    return layers


def _decoder_layers(ups: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for factor in ups:
        layers += [ConvRelu(WIDTH, WIDTH, 3, padding=1), ConvRelu(WIDTH, WIDTH, 1), ConvRelu(WIDTH, WIDTH, 1)]
        layers += [ConvRelu(WIDTH, WIDTH * factor**2, 1), nn.PixelShuffle(factor)]
    return layers


def _chunks(rows: Tensor, vocabulary: int) -> list[int]:
    """How many frames each pass takes, as even as it gets."""
    num_frames, num_positions = rows.shape[:2]
    num_chunks = max(1, -(-num_frames * num_positions * vocabulary * 4 // CHUNK_BYTES))
    size = -(-num_frames // num_chunks)
    return [min(size, num_frames - start) for start in range(0, num_frames, size)]


def words_grid(height: int, width: int, factor: int) -> tuple[int, int]:
    """Rows and columns of words of an image."""
    if height % factor or width % factor:
        raise ModelError(
            f"image of {height}×{width} pixels for words of {factor}×{factor} pixels",
            why="words tile the image, so each side is a multiple of theirs",
            fix=f"data.image_size={max(1, round(width / factor)) * factor}",
        )
    return height // factor, width // factor
