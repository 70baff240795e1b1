"""Learning-rate schedules of runs and of hs.Step, as pure functions of the committed step.

A schedule maps a step to a multiplier, or to the rates of all groups. The step reads `table[committed]` on the device
(tables.py), so a skipped step cannot move the schedule and resume needs no state. The exception is the plateau, which
follows the validation metric: the host writes its rates.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import ConfigError, suggest_nearest

Schedule = Callable[[int], float]  # committed step -> multiplier of the base learning rate


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleOptions:
    name: str = "constant"
    total_steps: int = 1
    warmup_steps: int = 0
    decay_from_start: bool = False
    """Whether the shape begins with the first step, below the warmup, instead of after it."""
    min_factor: float = 0.0  # what cosine, linear and polynomial end at, as a share of the base learning rate
    power: float = 1.0
    half_life_steps: int = 10_000
    step_size: int = 0  # distance of the drops of `step`; milestones win when given
    milestones: Sequence[int] = field(default=())
    gamma: float = 0.1
    peak_share: float = 0.3  # onecycle: share of the run spent rising
    start_divisor: float = 25.0
    end_divisor: float = 1e4


def constant(step: float, o: ScheduleOptions, length: int) -> float:
    return 1.0


def cosine(step: float, o: ScheduleOptions, length: int) -> float:
    progress = min(step / max(length, 1), 1.0)
    return o.min_factor + (1 - o.min_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def linear(step: float, o: ScheduleOptions, length: int) -> float:
    return o.min_factor + (1 - o.min_factor) * (1 - min(step / max(length, 1), 1.0))


def polynomial(step: float, o: ScheduleOptions, length: int) -> float:
    left: float = (1 - min(step / max(length, 1), 1.0)) ** o.power
    return o.min_factor + (1 - o.min_factor) * left


def exponential(step: float, o: ScheduleOptions, length: int) -> float:
    left: float = 0.5 ** (step / o.half_life_steps)
    return max(left, o.min_factor)


def stepwise(step: float, o: ScheduleOptions, length: int) -> float:
    if o.milestones:
        return o.gamma ** bisect.bisect_right(sorted(o.milestones), step)
    return o.gamma ** (int(step) // o.step_size) if o.step_size else 1.0


def onecycle(step: float, o: ScheduleOptions, length: int) -> float:
    """Return Smith & Topin's one-cycle policy with cosine annealing, as in torch's OneCycleLR.

    Unlike there, the first step of up to three steps has the full rate: a single one would have the final rate.
    """
    low, final = 1 / o.start_divisor, 1 / (o.start_divisor * o.end_divisor)
    peak = max(o.peak_share * length - 1, 0)
    if peak > 0 and step <= peak:
        return _anneal(low, 1.0, step / peak)
    return _anneal(1.0, final, min((step - peak) / max(length - 1 - peak, 1e-12), 1.0))


def _anneal(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


SCHEDULES: dict[str, Callable[[float, ScheduleOptions, int], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "polynomial": polynomial,
    "exponential": exponential,
    "step": stepwise,
    "onecycle": onecycle,
    "plateau": constant,
}


def build_schedule(options: ScheduleOptions) -> Schedule:
    """Return the named schedule after a linear warmup, whose first step already moves (1/w, 2/w, ... 1)."""
    if options.name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {options.name!r}", fix=suggest_nearest(options.name, SCHEDULES))
    shape, warmup = SCHEDULES[options.name], options.warmup_steps
    start = 0 if options.decay_from_start else warmup
    length = max(options.total_steps - start, 1)

    def multiplier(step: int) -> float:
        share = (step + 1) / warmup if step < warmup else 1.0
        return share * shape(max(step - start, 0), options, length)

    return multiplier


# --- torch's schedulers, followed on a stand-in optimizer ---
# A scheduler object that is stepped by hand drifts as soon as a step is skipped. So a deep copy of it runs on an
# optimizer with one number per group: torch's code computes the rates, the user's own scheduler is never stepped. Rates
# are absolute, not multiples of a base: a group that starts at 0 has no base to be a multiple of.


class Curve:
    """The rates of all groups of one optimizer as a function of the count, computed on demand; then the momenta, or
    first betas, of all groups, if the scheduler cycles them."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.twin, self.stand_in = copy_scheduler(scheduler)
        self.origin, self.moved, self.count = scheduler, copy_scheduler(scheduler)[0], 0
        self.cycles = cycles_momentum(scheduler)
        self.rates = [read_rates(self.stand_in, momenta=self.cycles)]

    def __call__(self, count: int) -> list[float]:
        """Return the rates after `count` calls of scheduler.step()."""
        while len(self.rates) <= count:
            step_copy(self.twin)
            self.rates.append(read_rates(self.stand_in, momenta=self.cycles))
        return self.rates[count]

    def move(self, count: int) -> Any:
        """Return a copy of the scheduler that is exactly at this count."""
        if count < self.count:  # after a rollback: schedulers cannot step back
            self.moved, self.count = copy_scheduler(self.origin)[0], 0
        while self.count < count:
            self.count += 1
            with contextlib.suppress(Exception):  # past its end, which the step refuses once it needs a rate there
                step_copy(self.moved)
        return self.moved


class Plateau:
    """Follow a ReduceLROnPlateau: torch's code decides when to cut, the step reads the rates."""

    def __init__(self, scheduler: ReduceLROnPlateau) -> None:
        self.twin, self.stand_in = copy_scheduler(scheduler)

    def observe(self, metric: float) -> None:
        self.twin.step(metric)

    def __call__(self, count: int = 0) -> list[float]:
        return read_rates(self.stand_in)

    def move(self, count: int) -> Any:
        return self.twin

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.twin.state_dict(), "rates": self()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.twin.load_state_dict(state["scheduler"])
        for group, stored in zip(self.stand_in.param_groups, state["rates"], strict=True):
            group["lr"] = float(stored)


class PlateauFactor(Plateau):
    """The plateau schedule of a run: one factor on all rates, cut when the validation metric stops improving.

    Unlike torch's, it ignores NaN, and its relative threshold also works for metrics below 0.
    """

    def __init__(
        self,
        *,
        mode: Literal["min", "max"] = "max",
        cut: float = 0.1,
        patience: int = 5,
        threshold: float = 1e-4,
        floor: float = 1e-6,
    ) -> None:
        unit = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        super().__init__(
            ReduceLROnPlateau(
                unit, mode=mode, factor=cut, patience=patience, threshold_mode="abs", min_lr=floor, eps=0.0
            )
        )
        self.threshold = threshold

    @property
    def factor(self) -> float:
        return self()[0]

    def observe(self, metric: float) -> None:
        if math.isnan(metric):
            return
        # torch's relative threshold is best * (1 + t): for a negative best a worse metric would count as better.
        best = self.twin.best
        self.twin.threshold = self.threshold * abs(best) if math.isfinite(best) else 0.0
        super().observe(metric)

    def state_dict(self) -> dict[str, Any]:
        best = None if self.twin.best == self.twin.mode_worse else self.twin.best
        return {"factor": self.factor, "best": best, "num_bad": self.twin.num_bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.twin.best = self.twin.mode_worse if state["best"] is None else float(state["best"])
        self.twin.num_bad_epochs = int(state["num_bad"])
        self.stand_in.param_groups[0]["lr"] = float(state["factor"])


def copy_scheduler(scheduler: Any) -> tuple[Any, Optimizer]:
    """Return a copy of the scheduler that drives a stand-in optimizer, and that optimizer."""
    # Schedulers keep numbers of their own in the groups (OneCycleLR its max_lr): copy everything but the weights.
    groups = make_groups_plain(scheduler.optimizer.param_groups)
    extras = ({k: float(v) if k == "lr" else v for k, v in g.items() if k != "params"} for g in groups)
    stand_in = torch.optim.SGD([{"params": [torch.zeros(1)], **extra} for extra in extras])
    # deepcopy's memo: whatever in the scheduler refers to the optimizer, nested ones included, gets the stand-in.
    return copy.deepcopy(scheduler, {id(scheduler.optimizer): stand_in}), stand_in


def read_rates(optimizer: Optimizer, *, momenta: bool = False) -> list[float]:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    cycled = optimizer.param_groups if momenta else ()
    return [*rates, *(float(group["betas"][0] if "betas" in group else group["momentum"]) for group in cycled)]


def cycles_momentum(scheduler: Any) -> bool:
    """True if a scheduler, or one inside it, changes momentum or betas as well."""
    inner = getattr(scheduler, "_schedulers", ())
    return bool(getattr(scheduler, "cycle_momentum", False)) or any(map(cycles_momentum, inner))


def step_copy(twin: LRScheduler) -> None:
    """Step a copy. torch warns that optimizer.step() was not called first; on the stand-in it never is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin.step()


def make_groups_plain(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of an optimizer's groups with numbers in place of the tensors that captured steps read."""
    plain = [dict(group) for group in groups]
    for group in plain:
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"] = float(group["lr"])
        betas = group.get("betas")  # custom optimizers may have others, or None
        if isinstance(betas, tuple) and [isinstance(beta, torch.Tensor) for beta in betas] == [True, False]:
            group["betas"] = (float(betas[0]), betas[1])
    return plain
