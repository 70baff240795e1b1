"""`guard.hold`: the windows that may have to be made again after a fault, with all that their steps drew from."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.run.assemble import Assembly
from halfstep.step.facts import Hold
from halfstep.step.guard import LAG
from halfstep.step.randomness import read_generators
from halfstep.step.step import Step


@dataclass(kw_only=True, slots=True)
class Position:
    """Where the run stands in its data: this many batches of this epoch are behind it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class HeldWindow:
    """One window as it was loaded, and what was there before its step."""

    attempted: int
    window: list[dict[str, Tensor]]
    position: Position
    generators: dict[str, Any]
    metrics: Any  # what training metrics had counted


class HeldWindows:
    """The last ones; their number is that of the steps in flight, so that memory stays bounded."""

    def __init__(self, parts: Assembly) -> None:
        if not isinstance(parts.step, Step):
            raise ConfigError(
                f"guard.hold with phases ({', '.join(parts.step.steps)})",
                why="phases commit one after another in an iteration, and only whole iterations can be made again",
                fix="guard.hold=false; capsules then say by how many commits they are inexact",
            )
        scaler = parts.step.scaler
        self.hold = Hold(parts.device, low=scaler.low if scaler.enabled else None)
        parts.step.hold = self.hold
        self._windows: deque[HeldWindow] = deque(maxlen=LAG + 1)

    def keep(self, attempted: int, window: list[dict[str, Tensor]], position: Position, metrics: Any) -> None:
        kept = HeldWindow(attempted, window, replace(position), read_generators(), copy.deepcopy(metrics))
        self._windows.append(kept)

    def of(self, attempted: int) -> HeldWindow:
        """As it was last made."""
        return next(kept for kept in reversed(self._windows) if kept.attempted == attempted)

    def release(self) -> None:
        self.hold.release()
