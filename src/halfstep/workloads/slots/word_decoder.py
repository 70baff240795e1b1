"""STEVE's decoder: predicts the words of a frame one after another from its slots, each from those before it; and its
loss, without logits over the whole vocabulary being kept."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfstep.islands import fp32_island, get_matmul_dtype
from halfstep.kernels.cross_entropy import linear_cross_entropy
from halfstep.workloads.slots.cross_attention import Decoder, linear


class Words(nn.Module):
    """A vector for each word; upstream's name has two parts."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.dictionary = nn.Embedding(vocabulary, dim)

    def forward(self, words: Tensor) -> Tensor:
        return self.dictionary(words)


class Positions(nn.Module):
    """A learned vector for each position, and dropout of the sum."""

    def __init__(self, num_positions: int, dim: int, *, dropout: float) -> None:
        super().__init__()
        self.pe = nn.Parameter(torch.empty(1, num_positions, dim))
        self.dropout = nn.Dropout(dropout)
        nn.init.trunc_normal_(self.pe)

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        return self.dropout(x + self.pe[:, start : start + x.shape[1]])


class WordDecoder(nn.Module):
    """Words (N, positions) and slots (N, slots, dim) to one vector for each position, from which `head` predicts."""

    def __init__(
        self,
        vocabulary: int,
        num_positions: int,
        *,
        dim: int,
        num_blocks: int,
        heads: int,
        dropout: float,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.num_positions = num_positions
        self.dict = Words(vocabulary, dim)
        self.bos = nn.Parameter(torch.empty(1, 1, dim))
        nn.init.xavier_uniform_(self.bos)
        # Upstream's table has a place for the last word too, which is never an input.
        self.pos = Positions(1 + num_positions, dim, dropout=dropout)
        self.tf = Decoder(num_blocks, dim, heads, dropout=dropout, checkpointing=checkpointing)
        self.head = linear(dim, vocabulary, bias=False)

    def forward(self, words: Tensor, slots: Tensor) -> Tensor:
        """What is known of each word before it is seen: (N, positions, dim); `head` makes logits of it."""
        before = torch.cat([self.bos.expand(len(words), -1, -1), self.dict(words[:, :-1])], dim=1)
        return self.tf(self.pos(before), slots)

    @torch.no_grad()
    def greedy(self, slots: Tensor) -> Tensor:
        """The likeliest word at each position given those before it: (N, positions). Keys and values are kept."""
        memories = self.tf.memories(slots, self.num_positions)
        x, words = self.bos.expand(len(slots), -1, -1), []
        for position in range(self.num_positions):
            logits: Tensor = self.head(self.tf.next(self.pos(x, position), memories))
            words.append(logits.float().argmax(dim=-1))
            x = self.dict(words[-1])
        return torch.cat(words, dim=1)


CHUNK_ROWS = 2**14
"""Of 4096 words in bf16 128 MB: it comes on top of everything that backward needs."""


def words_loss(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """The sum over all positions of -log p(word), where logits are hidden (N, positions, dim) · weightᵀ; fp32."""
    return _by_chunks(hidden.flatten(0, 1), weight, words.flatten(), get_matmul_dtype(hidden))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_chunks(rows: Tensor, weight: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Not compiled: it consists of matmuls and one kernel, and a compiler would unroll its chunks."""
    with fp32_island():
        return linear_cross_entropy(rows, weight, words, num_classes=len(weight), dtype=dtype, chunk_rows=CHUNK_ROWS)
