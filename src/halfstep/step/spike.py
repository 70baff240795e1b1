"""Is this loss far outside the recent ones? Decided on the device, from a ring of committed losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MAD_TO_SIGMA = 1.4826  # for normal data the standard deviation is 1.4826 times the median absolute deviation


class SpikeMeter:
    """Median and MAD of the last `size` committed losses: robust, so that one spike does not hide the next."""

    def __init__(self, device: torch.device, *, threshold: float = 10.0, size: int = 64, skips: bool = False) -> None:
        self.threshold, self.size, self.skips = threshold, size, skips
        self.ring = torch.zeros(size, device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def judge(self, loss: Tensor) -> Tensor:
        """True where the loss stands more than `threshold` robust deviations above the median of a full ring."""
        median = self.ring.median()
        deviation = MAD_TO_SIGMA * (self.ring - median).abs().median()
        # Without a floor a loss that has settled to the last digit would make every wiggle a spike.
        far = loss - median > self.threshold * torch.maximum(deviation, 0.01 * median.abs())
        return far & (self.count >= self.size)

    @torch.no_grad()
    def remember(self, loss: Tensor, bad: Tensor) -> None:
        slot = torch.remainder(self.count, self.size).view(1)
        kept = self.ring.index_select(0, slot)
        self.ring.index_copy_(0, slot, torch.where(bad, kept, loss.detach().float()))
        self.count.add_(~bad)

    def state_dict(self) -> dict[str, Tensor]:
        return {"ring": self.ring.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if state["ring"].shape != self.ring.shape:  # another guard.spike_window: the meter starts over
            self.ring.zero_()
            self.count.zero_()
            return
        self.ring.copy_(state["ring"])
        self.count.copy_(state["count"])
