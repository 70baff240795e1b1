"""torch's schedulers as pure functions of the committed step, so that a skipped step cannot move them."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import ConfigError
from halfstep.step.schedule import Schedule


def from_torch(scheduler: LRScheduler) -> list[Schedule]:
    """One schedule for each parameter group. A twin of the scheduler is run ahead; the user's own is not touched."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau cannot be tabulated",
            why="it follows a metric, not the step",
            fix="leave schedule out and call step.set_rate_factor(factor) after validation",
        )
    if getattr(scheduler, "cycle_momentum", False):
        raise ConfigError(
            f"{type(scheduler).__name__} with cycle_momentum=True is not supported",
            why="only learning rates are read on the device",
            fix=f"{type(scheduler).__name__}(..., cycle_momentum=False)",
        )
    curve = _Curve(scheduler)
    return [curve.of_group(position) for position in range(len(curve.base))]


class _Curve:
    """The rates of all groups, as far as anybody has asked."""

    def __init__(self, scheduler: LRScheduler) -> None:
        groups = scheduler.optimizer.param_groups
        self.base = [float(group["initial_lr"]) for group in groups]
        # Schedulers keep numbers of their own in the groups (OneCycleLR its max_lr), so all but the weights come along.
        extras = ({k: float(v) if k == "lr" else v for k, v in g.items() if k != "params"} for g in groups)
        stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], **extra} for extra in extras])
        # Whatever in the scheduler refers to the optimizer, nested schedulers included, refers to the stand-in here.
        self.twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in})
        self.rates = [[float(group["lr"]) for group in stand_in.param_groups]]
        self.stand_in = stand_in

    def of_group(self, position: int) -> Schedule:
        def multiplier(step: int) -> float:
            self._run_to(step)
            return self.rates[step][position] / self.base[position]

        return multiplier

    def _run_to(self, step: int) -> None:
        with warnings.catch_warnings():
            # It misses an optimizer.step() before its own: there is none, on purpose.
            warnings.simplefilter("ignore")
            while len(self.rates) <= step:
                self.twin.step()
                self.rates.append([float(group["lr"]) for group in self.stand_in.param_groups])
