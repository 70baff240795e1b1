"""Cross-entropy of words, without their logits over the whole vocabulary being kept."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island


def words_loss(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """The sum over all positions of -log p(word), where logits are hidden (N, positions, dim) · weightᵀ; fp32."""
    logits = F.linear(hidden.flatten(0, 1), weight)
    with fp32_island():
        return F.cross_entropy(logits.float(), words.flatten(), reduction="sum")
