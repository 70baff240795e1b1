"""STEVE's word decoder, which predicts the words of a frame one after another from its slots, and transformer layers.

The layers follow SLATE and STEVE (pre-norm, no biases in attention), with upstream's names. In the first block of a
stack the shortcut carries the *normalised* input, an oddity of upstream on which its weights depend. Attention is
torch's fused kernel with a causal flag instead of a mask tensor. The loss does not store the logits of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.islands import fp32_island, get_matmul_dtype
from halfstep.recompute import Recomputing, choose_block_runner, choose_region_runner
from halfstep_train.kernels.cross_entropy import linear_cross_entropy
from halfstep_train.models.layers import check_heads
from halfstep_train.workloads.slots.slot_attention import HEADS


class CrossAttention(nn.Module):
    """Multi-head attention from x to a source, or (causal) to earlier positions of x."""

    def __init__(self, dim: int, heads: int, *, dropout: float, gain: float) -> None:
        super().__init__()
        check_heads(dim, heads)
        self.heads, self.dropout = heads, dropout
        self.proj_q, self.proj_k, self.proj_v = (make_linear(dim, dim, bias=False) for _ in range(3))
        self.proj_o = make_linear(dim, dim, bias=False, gain=gain)
        self.output_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, source: Tensor, *, causal: bool = False) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        k, v = self._split_heads(self.proj_k(source)), self._split_heads(self.proj_v(source))
        q = self._split_heads(self.proj_q(x))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        return self.output_dropout(self.proj_o(mixed.transpose(1, 2).flatten(2)))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return (N, heads, positions, dim / heads) of x (N, positions, dim)."""
        heads: Tensor = x.unflatten(2, (self.heads, -1))
        return heads.transpose(1, 2)


class TransformerEncoderBlock(nn.Module):
    """Self-attention and a two-layer perceptron, both with shortcuts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        gain = 2**-0.5  # upstream's initialisation: two residual branches
        self.attn_layer_norm = nn.LayerNorm(dim)
        self.attn = CrossAttention(dim, heads, dropout=0.0, gain=gain)
        self.ffn_layer_norm = nn.LayerNorm(dim)
        self.ffn = make_perceptron(dim, dropout=0.0, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attn_layer_norm(x)
        x = normed + self.attn(normed, normed)  # the first block of a stack
        return x + self.ffn(self.ffn_layer_norm(x))


class TransformerEncoder(nn.Module):
    """A block of self-attention, and a final normalisation."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TransformerEncoderBlock(dim, heads)])
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(self.blocks[0](x))


class TransformerDecoderBlock(nn.Module):
    """Causal self-attention, attention to the source, and a two-layer perceptron."""

    def __init__(self, dim: int, heads: int, *, dropout: float, gain: float, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.self_attn = CrossAttention(dim, heads, dropout=dropout, gain=gain)
        self.encoder_decoder_attn_layer_norm = nn.LayerNorm(dim)
        self.encoder_decoder_attn = CrossAttention(dim, heads, dropout=dropout, gain=gain)
        self.ffn_layer_norm = nn.LayerNorm(dim)
        self.ffn = make_perceptron(dim, dropout=dropout, gain=gain)

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        normed = self.self_attn_layer_norm(x)
        x = (normed if self.is_first else x) + self.self_attn(normed, normed, causal=True)
        x = x + self.encoder_decoder_attn(self.encoder_decoder_attn_layer_norm(x), source)
        return x + self.ffn(self.ffn_layer_norm(x))


class TransformerDecoder(Recomputing):
    """Blocks of causal attention, and a final normalisation."""

    def __init__(self, num_blocks: int, dim: int, heads: int, *, dropout: float, checkpointing: bool = False) -> None:
        super().__init__()
        gain = (3 * max(num_blocks, 1)) ** -0.5  # three residual branches per block
        self.blocks = nn.ModuleList(
            TransformerDecoderBlock(dim, heads, dropout=dropout, gain=gain, is_first=i == 0) for i in range(num_blocks)
        )
        self.layer_norm = nn.LayerNorm(dim)
        self.recompute = "blocks" if checkpointing else "none"

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        return self.layer_norm(choose_region_runner(self.recompute)(self._run_blocks, x, source))

    def _run_blocks(self, x: Tensor, source: Tensor) -> Tensor:
        run = choose_block_runner(self.recompute)
        for block in self.blocks:
            x = run(block, x, source)
        return x


def make_perceptron(dim: int, *, dropout: float, gain: float) -> nn.Sequential:
    return nn.Sequential(
        make_linear(dim, 4 * dim, before_relu=True),
        nn.ReLU(),
        make_linear(4 * dim, dim, gain=gain),
        nn.Dropout(dropout),
    )


def make_linear(
    in_features: int, out_features: int, *, bias: bool = True, before_relu: bool = False, gain: float = 1.0
) -> nn.Linear:
    """Create a linear layer initialised as upstream: Kaiming before a ReLU, otherwise Xavier; zero bias."""
    made = nn.Linear(in_features, out_features, bias=bias)
    if before_relu:
        nn.init.kaiming_uniform_(made.weight, nonlinearity="relu")
    else:
        nn.init.xavier_uniform_(made.weight, gain)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class WordEmbedding(nn.Module):
    """Embed words; a separate module, so that the weight has upstream's name `dictionary.weight`."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.dictionary = nn.Embedding(vocabulary, dim)

    def forward(self, words: Tensor) -> Tensor:
        return self.dictionary(words)


class LearnedPositions(nn.Module):
    """Add a learned vector per position, then apply dropout."""

    def __init__(self, num_positions: int, dim: int, *, dropout: float) -> None:
        super().__init__()
        self.pe = nn.Parameter(torch.empty(1, num_positions, dim))
        self.dropout = nn.Dropout(dropout)
        nn.init.trunc_normal_(self.pe)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.pe[:, : x.shape[1]])


class WordDecoder(nn.Module):
    """Compute one vector per position from words (N, positions) and slots (N, slots, dim), for `head` to predict
    words."""

    def __init__(
        self,
        vocabulary: int,
        num_positions: int,
        *,
        dim: int,
        num_blocks: int,
        dropout: float,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.dict = WordEmbedding(vocabulary, dim)
        self.bos = nn.Parameter(torch.empty(1, 1, dim))
        nn.init.xavier_uniform_(self.bos)
        # One row more than needed, as upstream: the last word is never an input.
        self.pos = LearnedPositions(1 + num_positions, dim, dropout=dropout)
        self.tf = TransformerDecoder(num_blocks, dim, HEADS, dropout=dropout, checkpointing=checkpointing)
        self.head = make_linear(dim, vocabulary, bias=False)

    def forward(self, words: Tensor, slots: Tensor) -> Tensor:
        """Return vectors (N, positions, dim), each from earlier words and the slots; `head` turns them into logits."""
        # Inputs are shifted by one position: the start vector, then all words but the last.
        before = torch.cat([self.bos.expand(len(words), -1, -1), self.dict(words[:, :-1])], dim=1)
        return self.tf(self.pos(before), slots)

    @torch.no_grad()
    def decode_greedily(self, slots: Tensor) -> Tensor:
        """Return the most likely word per position, given those before it: (N, positions)."""
        words = torch.zeros(len(slots), self.num_positions, dtype=torch.int64, device=slots.device)
        for position in range(self.num_positions):
            last = self(words[:, : position + 1], slots)[:, -1]
            words[:, position] = self.head(last).float().argmax(dim=-1)
        return words


CHUNK_ROWS = 2**14
"""Rows of logits at a time: with 4096 words in bf16, 128 MiB."""


def words_loss(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """Return the sum over all positions of -log p(word) in fp32; the logits are hidden (N, positions, dim) ·
    weightᵀ."""
    return _sum_by_chunks(hidden.flatten(0, 1), weight, words.flatten(), get_matmul_dtype(hidden))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sum_by_chunks(rows: Tensor, weight: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the loss without compiling: it is matmuls and one kernel, and the compiler would unroll its chunks."""
    with fp32_island():
        return linear_cross_entropy(rows, weight, words, num_classes=len(weight), dtype=dtype, chunk_rows=CHUNK_ROWS)
