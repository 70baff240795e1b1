"""Which validation was the best, and when no better one is to be expected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal


class EarlyStopping:
    """Remembers the best value of the headline metric and counts validations since. NaN is never the best.

    A validation out of turn (a run that ends in mid-epoch) may be the best one, but patience neither counts it nor
    compares with it: a longer run would not have had it.
    """

    def __init__(self, *, mode: Literal["max", "min"], patience: int) -> None:
        self.mode, self.patience = mode, patience
        self.best, self.best_epoch = math.nan, 0
        self.best_in_turn, self.num_since = math.nan, 0

    def observe(self, value: float, epoch: int, *, in_turn: bool = True) -> bool:
        """Whether this validation is the best so far."""
        if in_turn:
            is_news = self._is_better(value, self.best_in_turn)
            self.best_in_turn = value if is_news else self.best_in_turn
            self.num_since = 0 if is_news else self.num_since + 1
        if not self._is_better(value, self.best):
            return False
        self.best, self.best_epoch = value, epoch
        return True

    def _is_better(self, value: float, than: float) -> bool:
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than if self.mode == "max" else value < than

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.num_since

    def state_dict(self) -> dict[str, Any]:
        best, in_turn = (None if math.isnan(value) else value for value in (self.best, self.best_in_turn))
        return {"best": best, "best_epoch": self.best_epoch, "best_in_turn": in_turn, "num_since": self.num_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = math.nan if state["best"] is None else float(state["best"])
        self.best_in_turn = math.nan if state["best_in_turn"] is None else float(state["best_in_turn"])
        self.best_epoch, self.num_since = int(state["best_epoch"]), int(state["num_since"])
