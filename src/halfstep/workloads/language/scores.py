"""Loss and metrics of a language model: nats of a token, perplexity, bits of a byte, exact over a whole set."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from halfstep.workloads.base.sums import Sums


def num_counted(batch: Mapping[str, Tensor]) -> Tensor:
    """Targets that count, on the device."""
    return (batch["targets"] >= 0).sum()


class LanguageMetrics(Sums):
    """Sums over tokens on the device in fp64, divided once at the end.

    `byte_lengths` says how many bytes each token stands for; without it there are no bits of a byte.
    """

    def __init__(self, byte_lengths: Tensor | None) -> None:
        super().__init__()
        self.byte_lengths = byte_lengths

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count one batch by its mean loss; no host wait."""
        targets = batch["targets"]
        if self.byte_lengths is not None and self.byte_lengths.device != targets.device:
            self.byte_lengths = self.byte_lengths.to(targets.device)
        count = num_counted(batch).double()
        num_bytes = torch.zeros_like(count)
        if self.byte_lengths is not None:
            lengths = self.byte_lengths[targets.clamp(min=0)]
            num_bytes = torch.where(targets >= 0, lengths, 0).sum().double()
        self.add(sums=torch.stack([outputs.detach().double() * count, count, num_bytes]))

    def compute(self) -> dict[str, float]:
        """`perplexity`, and `bits_per_byte` where bytes are known; waits for the device."""
        nats, tokens, num_bytes = self.sums["sums"].tolist() if self.sums else (0, 0, 0)
        if not tokens:
            return {}
        mean = nats / tokens
        found = {"perplexity": math.exp(mean) if mean < 700 else math.inf}
        return found | ({"bits_per_byte": nats / math.log(2) / num_bytes} if num_bytes else {})
