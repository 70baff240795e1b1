"""A number that changes with the steps (a temperature, a loss weight) and is read in forward or loss.

Compiled code and captured CUDA graphs would silently freeze a Python number. The value is therefore a tensor on the
run's device, refreshed at the start of each step from a table indexed by committed steps, like the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError


class Scheduled:
    """A value per step: `tau = Scheduled(lambda step: max(0.1, 1 - step / 30_000))`, read as `tau.value` in forward or
    loss."""

    def __init__(self, at: Callable[[int], float]) -> None:
        self.at = at
        self.value: Tensor = torch.tensor(self(0), dtype=torch.float32)
        """The current step's value, 0-dim fp32; on the CPU until a run moves it."""

    def __call__(self, step: int) -> float:
        found: Any = self.at(step)
        if isinstance(found, complex) or not math.isfinite(found):
            raise ConfigError(
                f"a scheduled value is {found} at step {step}",
                why="values are computed ahead of time, so each step needs a finite number",
                fix="clamp its argument, as in max(0, 1 - step / total)",
            )
        return float(found)
