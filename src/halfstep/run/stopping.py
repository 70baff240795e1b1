"""Which validation was the best, and when no better one is to be expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal


class EarlyStopping:
    """Remembers the best value of the headline metric and counts validations since. NaN is never the best."""

    def __init__(self, *, mode: Literal["max", "min"], patience: int) -> None:
        self.mode, self.patience = mode, patience
        self.best, self.best_epoch, self.num_since = math.nan, 0, 0

    def observe(self, value: float, epoch: int) -> bool:
        """Whether this validation is the best so far."""
        is_better = math.isnan(self.best) or (value > self.best if self.mode == "max" else value < self.best)
        if is_better and not math.isnan(value):
            self.best, self.best_epoch, self.num_since = value, epoch, 0
            return True
        self.num_since += 1
        return False

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.num_since

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isnan(self.best) else self.best
        return {"best": best, "best_epoch": self.best_epoch, "num_since": self.num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = math.nan if state["best"] is None else float(state["best"])
        self.best_epoch, self.num_since = int(state["best_epoch"]), int(state["num_since"])
