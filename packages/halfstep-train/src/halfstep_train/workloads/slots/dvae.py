"""The discrete VAE of SLATE and STEVE (Singh et al. 2022), which codes an image as a grid of words and decodes it.

Modules have upstream's names. Between encoder and decoder every position holds one number per word of the vocabulary:
logits, Gumbel noise, their softmax. For 72 frames of 32×32 positions and 4096 words, each of these takes 1.2 GB in
fp32. They are needed only between two small vectors of 64 channels. That section therefore runs on a few frames at a
time and is recomputed in backward: nothing as wide as the vocabulary is kept. Words are drawn without a one-hot tensor,
by an argmax over logits + noise in fp32.

Gumbel noise is a function of keys in the batch, eight bytes per frame, and is computed where it is used. Compiled code
fuses it with the softmax, a recomputing backward gets the same noise again, a captured graph gets new noise with each
batch, and no generator advances. The hash of (key, position, word) is two rounds of a 32-bit mixer (the constants of
lowbias32 by C. Wellons) around a 64-bit key per row. int32 products wrap around on every device, so the bits are the
same everywhere, up to the logarithms.

Upstream applies log_softmax before adding the noise. That adds a constant to each row, which affects neither softmax
nor argmax, so it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from halfstep.islands import fp32_island
from halfstep.recompute import Recomputing, choose_block_runner, choose_region_runner, make_iteration

WIDTH, IMAGE_CHANNELS = 64, 3
CHUNK_BYTES = 2**27
"""Limit of an fp32 tensor as wide as the vocabulary: 128 MiB, eight frames of 1024 positions and 4096 words."""


class DVaeOutput(NamedTuple):
    """Output of the VAE for images."""

    reconstruction: Tensor
    """(N, channels, H, W), not clamped."""
    words: Tensor
    """(N, positions) int64, without gradient."""


class DVae(Recomputing):
    """A discrete VAE for images (N, channels, H, W). By default a word covers 4×4 pixels, as in STEVE."""

    def __init__(
        self,
        vocabulary: int,
        *,
        downs: Sequence[tuple[int, int]] = ((4, 6),),
        ups: Sequence[int] = (2, 2),
        checkpointing: bool = False,
    ) -> None:
        """Build the layers. `downs` holds (stride, number of 1×1 convolutions after it) of each downsampling, `ups` the
        factors of upsampling."""
        super().__init__()
        self.recompute = "blocks" if checkpointing else "none"
        self.vocabulary = vocabulary
        self.encoder = nn.Sequential(*_make_encoder_layers(downs), make_convolution(WIDTH, vocabulary, 1))
        self.decoder = nn.Sequential(
            ConvRelu(vocabulary, WIDTH, 1), *_make_decoder_layers(ups), make_convolution(WIDTH, IMAGE_CHANNELS, 1)
        )

    def forward(
        self, images: Tensor, tau: Tensor | float, soft_noise: Tensor, word_noise: Tensor, *, hard: bool = False
    ) -> DVaeOutput:
        """Code images with two separate noises: one for the decoder's input, one for the words.

        Each noise is keys (N, 2) or the noise itself (N, positions, words). With `hard` the decoder sees one word per
        position, and gradients are those of the softmax.
        """
        hidden: Tensor = self.encoder[:-1](images)
        # (N, positions, 64)
        rows = hidden.permute(0, 2, 3, 1).flatten(1, 2)
        embedded = self.embed_softly(rows, tau, soft_noise, hard=hard)
        return DVaeOutput(self.decode(embedded, hidden.shape[2:]), self.draw_words(rows.detach(), word_noise))

    def embed_softly(self, rows: Tensor, tau: Tensor | float, noise: Tensor, *, hard: bool) -> Tensor:
        """Apply the decoder's first layer, without bias, to softmax((logits + noise) / tau): (N, positions, 64)."""
        embedding = to_matrix(self._get_first_convolution().weight)
        tau = torch.as_tensor(tau, dtype=torch.float32, device=rows.device)
        return _embed_softly(torch.compiler.is_compiling(), hard, rows, noise, tau, *self._get_logit_layer(), embedding)

    @torch.no_grad()
    def draw_words(self, rows: Tensor, noise: Tensor) -> Tensor:
        """Draw one word per position with the probabilities of the logits: the argmax of logits + Gumbel noise."""
        return _draw_words(torch.compiler.is_compiling(), rows, noise, *self._get_logit_layer())

    def _get_logit_layer(self) -> tuple[Tensor, Tensor]:
        """Return weight (words, 64) and bias of the encoder's last layer."""
        last = cast(nn.Conv2d, self.encoder[-1])
        return to_matrix(last.weight), cast(Tensor, last.bias)

    def decode(self, embedded: Tensor, grid: Sequence[int]) -> Tensor:
        """Return images from the output (N, positions, 64) of the first layer without bias."""
        bias = cast(Tensor, self._get_first_convolution().bias)
        first = torch.relu(embedded + bias.to(embedded.dtype))
        maps = first.unflatten(1, tuple(grid)).permute(0, 3, 1, 2)
        return choose_region_runner(self.recompute)(self._run_decoder, maps)

    def _run_decoder(self, maps: Tensor) -> Tensor:
        """Run the decoder after its first layer, in blocks that end with an upsampling; the last layer belongs to the
        last block. With recomputation, only the maps between blocks are kept."""
        run = choose_block_runner(self.recompute)
        last = len(self.decoder) - 1
        ends = [index + 1 for index, layer in enumerate(self.decoder) if isinstance(layer, nn.PixelShuffle)]
        for start, end in zip([1, *ends], [*ends[:-1], last + 1], strict=False):
            maps = run(self.decoder[start:end], maps)
        return maps

    def decode_words(self, words: Tensor, grid: Sequence[int]) -> Tensor:
        """Return the images of words (N, positions)."""
        # A one-hot vector times the first layer's weight is a row lookup.
        return self.decode(F.embedding(words, self._get_first_convolution().weight.flatten(1).t()), grid)

    def _get_first_convolution(self) -> nn.Conv2d:
        return cast(ConvRelu, self.decoder[0]).m


class ConvRelu(nn.Module):
    """Convolution and ReLU; `m` is upstream's name."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.m = make_convolution(in_channels, out_channels, kernel, stride, padding, before_relu=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.m(x))


def make_convolution(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0, *, before_relu: bool = False
) -> nn.Conv2d:
    """Create a convolution initialised as upstream: Kaiming before a ReLU, otherwise Xavier; zero bias."""
    made = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
    if before_relu:
        nn.init.kaiming_uniform_(made.weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(made.weight)
    assert made.bias is not None
    nn.init.zeros_(made.bias)
    return made


def to_matrix(kernel: Tensor) -> Tensor:
    """Return a 1×1 kernel (out, in, 1, 1) as a matrix (out, in), such that its gradient has the strides of the kernel.

    DDP compares these strides with those of its buckets, even in dimensions of size 1.
    """
    return kernel.flatten(1) if kernel.stride(2) == 1 else kernel.movedim(1, 3).flatten(1)


def _make_encoder_layers(downs: Sequence[tuple[int, int]]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for stride, num_pointwise in downs:
        layers.append(ConvRelu(WIDTH if layers else IMAGE_CHANNELS, WIDTH, stride, stride))
        layers += [ConvRelu(WIDTH, WIDTH, 1) for _ in range(num_pointwise)]
    return layers


def _make_decoder_layers(ups: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for factor in ups:
        layers += [ConvRelu(WIDTH, WIDTH, 3, padding=1), ConvRelu(WIDTH, WIDTH, 1), ConvRelu(WIDTH, WIDTH, 1)]
        layers += [ConvRelu(WIDTH, WIDTH * factor**2, 1), nn.PixelShuffle(factor)]
    return layers


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _embed_softly(is_compiled: bool, hard: bool, *inputs: Tensor) -> Tensor:
    return _SoftEmbedding.apply(is_compiled, hard, *inputs)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _draw_words(is_compiled: bool, rows: Tensor, noise: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    step, chunk = make_iteration(_draw_chunk, is_compiled=is_compiled), _choose_chunk(rows, len(weight))
    with fp32_island():
        pairs = zip(rows.split(chunk), noise.split(chunk), strict=True)
        return torch.cat([step(*pair, weight, bias) for pair in pairs])


class _SoftEmbedding(torch.autograd.Function):
    """Embed soft words chunk by chunk. Backward recomputes the shares of words and sums weight gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, is_compiled: bool, hard: bool, rows: Tensor, noise: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(rows, noise, *rest)
        ctx.is_compiled, ctx.hard = is_compiled, hard
        step, chunk = make_iteration(_embed_chunk, is_compiled=is_compiled), _choose_chunk(rows, rest[-1].shape[1])
        with fp32_island():
            pairs = zip(rows.split(chunk), noise.split(chunk), strict=True)
            return torch.cat([step(*pair, *rest, hard=hard) for pair in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, noise, *rest = ctx.saved_tensors
        step = make_iteration(_embed_chunk_backward, is_compiled=ctx.is_compiled)
        chunk = _choose_chunk(rows, rest[-1].shape[1])
        # rest: tau, weight, bias, embedding. Gradients of all but tau are computed.
        grad_rows, sums = torch.empty_like(rows), [torch.zeros_like(weight, dtype=torch.float32) for weight in rest[1:]]
        chunks = (part.split(chunk) for part in (grad_rows, grad, rows, noise))
        with fp32_island():
            for target, *parts in zip(*chunks, strict=True):
                grad_chunk, *grads = step(*parts, *rest, hard=ctx.hard)
                target.copy_(grad_chunk)
                for total, one in zip(sums, grads, strict=True):
                    total += one
        return None, None, grad_rows, None, None, *(s.to(w.dtype) for s, w in zip(sums, rest[1:], strict=True))


def _compute_logits(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype)).float()


def _draw_chunk(rows: Tensor, noise: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (_compute_logits(rows, weight, bias) + make_gumbel_noise(noise, rows.shape[1], len(weight))).argmax(dim=-1)


def _compute_shares(
    rows: Tensor, noise: Tensor, tau: Tensor, weight: Tensor, bias: Tensor, *, hard: bool
) -> tuple[Tensor, Tensor]:
    """Return the share of each word in fp32, and the decoder's input: the shares, or with `hard` one word as
    one-hot."""
    noisy = _compute_logits(rows, weight, bias) + make_gumbel_noise(noise, rows.shape[1], len(weight))
    shares = torch.softmax(noisy / tau, dim=-1)
    if not hard:
        return shares, shares.to(rows.dtype)
    all_words = torch.arange(len(weight), device=rows.device)
    return shares, (noisy.argmax(dim=-1, keepdim=True) == all_words).to(rows.dtype)


def _embed_chunk(
    rows: Tensor, noise: Tensor, tau: Tensor, weight: Tensor, bias: Tensor, embedding: Tensor, *, hard: bool
) -> Tensor:
    _, seen = _compute_shares(rows, noise, tau, weight, bias, hard=hard)
    return F.linear(seen, embedding.to(rows.dtype))


def _embed_chunk_backward(grad: Tensor, rows: Tensor, noise: Tensor, *layers: Tensor, hard: bool) -> tuple[Tensor, ...]:
    """Return the gradients of rows, weight, bias and embedding."""
    tau, weight, bias, embedding = layers
    shares, seen = _compute_shares(rows, noise, tau, weight, bias, hard=hard)
    grad_shares = F.linear(grad, embedding.t().to(rows.dtype)).float()
    # Gradient of softmax(logits / tau): s (g - Σ s g) / tau. With `hard` it is the straight-through estimator.
    grad_logits = shares * (grad_shares - (shares * grad_shares).sum(dim=-1, keepdim=True)) / tau
    grad_half = grad_logits.to(rows.dtype).flatten(0, 1)
    grad_rows = torch.mm(grad_half, weight.to(rows.dtype)).view_as(rows)
    grad_embedding = torch.mm(grad.flatten(0, 1).t(), seen.flatten(0, 1)).float()
    grad_weight = torch.mm(grad_half.t(), rows.flatten(0, 1)).float()
    return grad_rows, grad_weight, grad_half.sum(0, dtype=torch.float32), grad_embedding


def _choose_chunk(rows: Tensor, vocabulary: int) -> int:
    """Return the number of frames per chunk; chunks are as equal as possible."""
    num_frames, num_positions = rows.shape[:2]
    num_chunks = max(1, -(-num_frames * num_positions * vocabulary * 4 // CHUNK_BYTES))
    return -(-num_frames // num_chunks)


WORDS_TILE = "words tile the image"
"""Why the side of an image must be a multiple of that of a word."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**32
"""Odd factors of lowbias32, as int32."""
BITS = 31
LARGEST_BELOW_ONE = 1 - 2**-24


def make_gumbel_noise(source: Tensor, num_positions: int, num_words: int) -> Tensor:
    """Return Gumbel noise (N, positions, words) in fp32 from keys (N, 2); a floating-point `source` is already
    noise."""
    if source.is_floating_point():
        return source
    # A uniform number of 31 bits plus one half: never 0, and at most 1 - 2^-24, so that both logarithms are finite.
    # Small numbers keep all their bits and become the largest noise, up to 22.
    uniform = ((hash_bits(source, num_positions, num_words) & (2**BITS - 1)).float() + 0.5) * 2.0**-BITS
    return -torch.log(-torch.log1p(-uniform.clamp(max=LARGEST_BELOW_ONE)))


def hash_bits(keys: Tensor, num_positions: int, num_words: int) -> Tensor:
    """Return 32 hashed bits (N, positions, words) for keys (N, 2), as int32."""
    first, second = keys.to(torch.int32).unsqueeze(-1).unbind(1)
    position = torch.arange(num_positions, device=keys.device, dtype=torch.int32)
    word = torch.arange(num_words, device=keys.device, dtype=torch.int32)
    # Two hashes of both keys per position form a 64-bit key of the row, which is then hashed with the word.
    row = mix_bits(mix_bits(position + first) ^ second).unsqueeze(-1)
    other = mix_bits(mix_bits(position + second) ^ first).unsqueeze(-1)
    return mix_bits(mix_bits(word + row) ^ other)


def mix_bits(x: Tensor) -> Tensor:
    """Apply a bijection of 32 bits: flipping an input bit flips each output bit with a probability of about 1/2."""
    x = (x ^ _shift_right(x, 16)) * FIRST
    x = (x ^ _shift_right(x, 15)) * SECOND
    return x ^ _shift_right(x, 16)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros: torch's shift of a negative number fills with ones."""
    return (x >> by) & ((1 << 32 - by) - 1)
