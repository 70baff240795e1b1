"""torch's schedulers as pure functions of a count, so that a skipped step cannot move them.

A twin of the scheduler runs ahead on a stand-in of its optimizer; the user's own scheduler is not touched. Rates are
absolute, not multiples of a base: a group that starts at 0 has no base to be a multiple of.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.errors import ConfigError

BY_BATCH = (OneCycleLR, CyclicLR)
"""What torch documents as stepped after every batch."""
FEW_STEPS, SMALL_SHARE = 1000, 0.02


class Curve:
    """The rates of all groups of one optimizer, as far as anybody has asked."""

    def __init__(self, scheduler: LRScheduler) -> None:
        _refuse_momentum(scheduler)
        self.twin, self.stand_in = twin_of(scheduler)
        self.rates = [self._now()]

    def __call__(self, count: int) -> list[float]:
        """The rates after `count` calls of scheduler.step()."""
        with warnings.catch_warnings():
            # It misses an optimizer.step() before its own: there is none, on purpose.
            warnings.simplefilter("ignore")
            while len(self.rates) <= count:
                self.twin.step()
                self.rates.append(self._now())
        return self.rates[count]

    def _now(self) -> list[float]:
        return [float(group["lr"]) for group in self.stand_in.param_groups]


class PlateauTwin:
    """ReduceLROnPlateau on a stand-in: torch's own code decides, the step takes its rates."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        self.twin, self.stand_in = twin_of(scheduler)

    def observe(self, metric: float) -> None:
        self.twin.step(metric)

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.stand_in.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.twin.state_dict(), "rates": self.rates()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.twin.load_state_dict(state["scheduler"])
        for group, rate in zip(self.stand_in.param_groups, state["rates"], strict=True):
            group["lr"] = float(rate)


def twin_of(scheduler: Any) -> tuple[Any, Optimizer]:
    """A copy of the scheduler that drives an optimizer of one number per group instead of the user's."""
    # Schedulers keep numbers of their own in the groups (OneCycleLR its max_lr), so all but the weights come along.
    groups = scheduler.optimizer.param_groups
    extras = ({k: float(v) if k == "lr" else v for k, v in g.items() if k != "params"} for g in groups)
    stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], **extra} for extra in extras])
    # Whatever in the scheduler refers to the optimizer, nested schedulers included, refers to the stand-in here.
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in}), stand_in


def steps_until_small(curve: Curve) -> int:
    """After how few steps every rate has fallen to a fiftieth of its highest; 0 where that takes many."""
    highest = [0.0] * len(curve.rates[0])
    for step in range(FEW_STEPS):
        try:
            rates = curve(step)
        except Exception:  # beyond its end: nobody may ever go there
            return 0
        highest = [max(pair) for pair in zip(highest, rates, strict=True)]
        if any(highest) and all(rate <= SMALL_SHARE * top for rate, top in zip(rates, highest, strict=True)):
            return step
    return 0


def _refuse_momentum(scheduler: LRScheduler) -> None:
    if getattr(scheduler, "cycle_momentum", False):
        raise ConfigError(
            f"{type(scheduler).__name__} with cycle_momentum=True is not supported",
            why="only learning rates are read on the device",
            fix=f"{type(scheduler).__name__}(..., cycle_momentum=False)",
        )
