"""Cross-entropy of words, without their logits over the whole vocabulary being kept."""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.islands import fp32_island, matmul_dtype
from halfstep.kernels.cross_entropy import linear_cross_entropy

CHUNK_ROWS = 2**14
"""Of 4096 words in bf16 128 MB: it comes on top of everything that backward needs."""


def words_loss(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """The sum over all positions of -log p(word), where logits are hidden (N, positions, dim) · weightᵀ; fp32."""
    total: Tensor = _by_chunks(hidden.flatten(0, 1), weight, words.flatten(), matmul_dtype(hidden))
    return total


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_chunks(rows: Tensor, weight: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Not compiled: it consists of matmuls and one kernel, and a compiler would unroll its chunks."""
    with fp32_island():
        return linear_cross_entropy(rows, weight, words, num_classes=len(weight), dtype=dtype, chunk_rows=CHUNK_ROWS)
