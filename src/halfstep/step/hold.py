"""Hold: after a fault nothing commits until the host has looked, so that what it finds is the step as it was.

The host learns of a step two steps later. With this flag, which lives on the device as the verdict does, those two are
dropped as bad ones are, and leave the loss scale alone as well. The host then clears it and makes them again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep.step.facts import Facts


class Hold:
    """The sticky flag of one step."""

    def __init__(self, device: torch.device, *, floor: float | None = None) -> None:
        self.floor = floor
        """With loss scaling an overflow above this scale is routine, and holds nothing."""
        self.flag = torch.zeros((), dtype=torch.bool, device=device)

    def judge(self, facts: Facts, fault: Tensor) -> None:
        """Hold this step where an earlier one was at fault; note whether this one is."""
        facts.held = self.flag.clone()
        is_fault = fault & ~facts.empty
        if self.floor is not None:
            is_fault = is_fault & (facts.scale <= self.floor)
        facts.holds = is_fault & ~facts.held
        facts.bad = facts.bad | facts.held

    def remember(self, facts: Facts) -> None:
        self.flag.logical_or_(facts.holds)

    def release(self) -> None:
        self.flag.zero_()
