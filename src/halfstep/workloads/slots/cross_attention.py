"""Transformer layers as SLATE and STEVE build them (pre-norm, no biases in attention), with upstream's names.

In the first block of a stack the normalised input is also what the branch is added to: an oddity of upstream that its
weights depend on. Attention is torch's fused kernel; a causal mask is a flag of it, not a tensor.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep.models.recompute import Recomputing, block_runner, region_runner

KeysAndValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """From each of x to all of a source, or to those of itself that came before."""

    def __init__(self, dim: int, heads: int, *, dropout: float, gain: float) -> None:
        super().__init__()
        if dim % heads:
            raise ModelError(
                f"{heads} attention heads for {dim} channels",
                why="heads share the channels evenly",
                fix="numbers where heads divide channels",
            )
        self.heads, self.dropout = heads, dropout
        self.proj_q, self.proj_k, self.proj_v = (linear(dim, dim, bias=False) for _ in range(3))
        self.proj_o = linear(dim, dim, bias=False, gain=gain)
        self.output_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, source: Tensor, *, causal: bool = False) -> Tensor:
        return self.attend(x, self.keys_and_values(source), causal=causal)

    def keys_and_values(self, source: Tensor) -> KeysAndValues:
        return self._heads(self.proj_k(source)), self._heads(self.proj_v(source))

    def attend(self, x: Tensor, known: KeysAndValues, *, causal: bool = False) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(self._heads(self.proj_q(x)), *known, dropout_p=dropout, is_causal=causal)
        return self.output_dropout(self.proj_o(mixed.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        apart: Tensor = x.unflatten(2, (self.heads, -1))
        return apart.transpose(1, 2)


class EncoderBlock(nn.Module):
    """Attention of all to all, then a two-layer perceptron."""

    def __init__(self, dim: int, heads: int, *, dropout: float, gain: float, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.attn_layer_norm = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout=dropout, gain=gain)
        self.ffn_layer_norm = nn.LayerNorm(dim)
        self.ffn = perceptron(dim, dropout=dropout, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attn_layer_norm(x)
        x = (normed if self.is_first else x) + self.attn(normed, normed)
        return x + self.ffn(self.ffn_layer_norm(x))


class Encoder(nn.Module):
    """Blocks of attention among all, and a last normalisation."""

    def __init__(self, num_blocks: int, dim: int, heads: int, *, dropout: float) -> None:
        super().__init__()
        gain = (2 * max(num_blocks, 1)) ** -0.5
        self.blocks = nn.ModuleList(
            EncoderBlock(dim, heads, dropout=dropout, gain=gain, is_first=i == 0) for i in range(num_blocks)
        )
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.layer_norm(x)


class Memory:
    """What one block of a decoder remembers of the positions it has seen, and its view of the source."""

    def __init__(self, block: DecoderBlock, source: Tensor, length: int) -> None:
        self.source = block.encoder_decoder_attn.keys_and_values(source)
        keys, values = self.source
        shape = (*keys.shape[:2], length, keys.shape[3])
        self.keys, self.values, self.num_known = keys.new_empty(shape), values.new_empty(shape), 0

    def add(self, known: KeysAndValues) -> KeysAndValues:
        here = slice(self.num_known, self.num_known + 1)
        self.keys[:, :, here], self.values[:, :, here] = known
        self.num_known += 1
        return self.keys[:, :, : self.num_known], self.values[:, :, : self.num_known]


class DecoderBlock(nn.Module):
    """Attention to what came before, attention to the source, a two-layer perceptron."""

    def __init__(self, dim: int, heads: int, *, dropout: float, gain: float, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.self_attn = Attention(dim, heads, dropout=dropout, gain=gain)
        self.encoder_decoder_attn_layer_norm = nn.LayerNorm(dim)
        self.encoder_decoder_attn = Attention(dim, heads, dropout=dropout, gain=gain)
        self.ffn_layer_norm = nn.LayerNorm(dim)
        self.ffn = perceptron(dim, dropout=dropout, gain=gain)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        normed = self.self_attn_layer_norm(x)
        x = (normed if self.is_first else x) + self.self_attn(normed, normed, causal=True)
        return self._rest(x, self.encoder_decoder_attn.keys_and_values(source))

    def next(self, x: Tensor, memory: Memory) -> Tensor:
        """One position more, (N, 1, dim)."""
        normed = self.self_attn_layer_norm(x)
        known = memory.add(self.self_attn.keys_and_values(normed))
        x = (normed if self.is_first else x) + self.self_attn.attend(normed, known)
        return self._rest(x, memory.source)

    def _rest(self, x: Tensor, source: KeysAndValues) -> Tensor:
        x = x + self.encoder_decoder_attn.attend(self.encoder_decoder_attn_layer_norm(x), source)
        return x + self.ffn(self.ffn_layer_norm(x))


class Decoder(Recomputing):
    """Blocks of causal attention, and a last normalisation."""

    def __init__(self, num_blocks: int, dim: int, heads: int, *, dropout: float, checkpointing: bool = False) -> None:
        super().__init__()
        gain = (3 * max(num_blocks, 1)) ** -0.5
        self.blocks = nn.ModuleList(
            DecoderBlock(dim, heads, dropout=dropout, gain=gain, is_first=i == 0) for i in range(num_blocks)
        )
        self.layer_norm = nn.LayerNorm(dim)
        self.recompute = "blocks" if checkpointing else "none"

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return self.layer_norm(region_runner(self.recompute)(self._one_by_one, x, source))

    def _one_by_one(self, x: Tensor, source: Tensor) -> Tensor:
        run = block_runner(self.recompute)
        for block in self.blocks:
            x = run(block, x, source)
        return x

    def memories(self, source: Tensor, length: int) -> list[Memory]:
        return [Memory(block, source, length) for block in self.blocks if isinstance(block, DecoderBlock)]

    def next(self, x: Tensor, memories: list[Memory]) -> Tensor:
        """The output of one position more, (N, 1, dim)."""
        for block, memory in zip(self.blocks, memories, strict=True):
            assert isinstance(block, DecoderBlock)
            x = block.next(x, memory)
        return self.layer_norm(x)


def perceptron(dim: int, *, dropout: float, gain: float) -> nn.Sequential:
    return nn.Sequential(
        linear(dim, 4 * dim, before_relu=True), nn.ReLU(), linear(4 * dim, dim, gain=gain), nn.Dropout(dropout)
    )


def linear(
    in_features: int, out_features: int, *, bias: bool = True, before_relu: bool = False, gain: float = 1.0
) -> nn.Linear:
    """Started as upstream does: Kaiming before a ReLU, Xavier else, no bias at first."""
    made = nn.Linear(in_features, out_features, bias=bias)
    if before_relu:
        nn.init.kaiming_uniform_(made.weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(made.weight, gain)
    if bias:
        nn.init.zeros_(made.bias)
    return made
