"""One loss scale for the steps of several phases: it moves once per iteration, by what all of them found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep.step.scaler import Scaler


class SharedScaler(Scaler):
    """Steps note their verdicts in flags on the device; `close` moves the scale by them.

    Every phase of an iteration runs at the same scale. It falls once where any overflowed, and counts as clean where
    one at least was judged and none overflowed.
    """

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.overflowed, self.judged = (torch.zeros((), dtype=torch.bool, device=device) for _ in range(2))

    @torch.no_grad()
    def update(self, overflow: Tensor, unjudged: Tensor | None = None) -> None:
        """Note the verdict of one phase, in place: a CUDA graph holds this."""
        is_judged = torch.ones_like(overflow) if unjudged is None else ~unjudged
        self.overflowed.logical_or_(overflow & is_judged)
        self.judged.logical_or_(is_judged)

    @torch.no_grad()
    def close(self) -> None:
        """At the end of an iteration; without loss scaling there is nothing to do."""
        if not self.enabled:
            return
        super().update(self.overflowed, unjudged=~self.judged)
        self.overflowed.zero_()
        self.judged.zero_()
