"""Learning-rate schedules as pure functions of the committed step, tabulated once, read on the device.

A schedule that is stepped like an object drifts as soon as a step is skipped. Here a schedule is step -> multiplier,
and the step reads `table[committed]` on the device, so a skipped step cannot move it and resume needs no state.
The one exception is plateau: a single factor that the host writes at validation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halfstep.errors import ConfigError, nearest

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
    """Smith & Topin's policy with cosine annealing, as torch's OneCycleLR has it."""
    low, final = 1 / o.start_divisor, 1 / (o.start_divisor * o.end_divisor)
    peak = o.peak_share * length - 1
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
    """The named schedule, after a linear warmup whose first step already moves (1/w, 2/w, ... 1)."""
    if options.name not in SCHEDULES:
        raise ConfigError(f"unknown schedule {options.name!r}", fix=nearest(options.name, SCHEDULES))
    shape, warmup = SCHEDULES[options.name], options.warmup_steps
    start = 0 if options.decay_from_start else warmup
    length = max(options.total_steps - start, 1)

    def multiplier(step: int) -> float:
        share = (step + 1) / warmup if step < warmup else 1.0
        return share * shape(max(step - start, 0), options, length)

    return multiplier


class Plateau:
    """Cuts a factor when the validation metric has not improved for `patience` validations. NaN is no news."""

    def __init__(
        self, *, mode: str = "max", cut: float = 0.1, patience: int = 5, threshold: float = 1e-4, floor: float = 1e-6
    ) -> None:
        self.mode, self.cut, self.patience, self.threshold, self.floor = mode, cut, patience, threshold, floor
        self.factor, self.best, self.num_bad = 1.0, math.nan, 0

    def observe(self, metric: float) -> float:
        if math.isnan(metric):
            return self.factor
        if math.isnan(self.best) or self._is_better(metric):
            self.best, self.num_bad = metric, 0
            return self.factor
        self.num_bad += 1
        if self.num_bad > self.patience:
            self.factor, self.num_bad = max(self.factor * self.cut, self.floor), 0
        return self.factor

    def _is_better(self, metric: float) -> bool:
        sign = 1.0 if self.mode == "max" else -1.0
        return sign * (metric - self.best) > self.threshold * abs(self.best)

    def state_dict(self) -> dict[str, Any]:
        best = None if math.isnan(self.best) else self.best
        return {"factor": self.factor, "best": best, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.factor, self.num_bad = float(state["factor"]), int(state["num_bad"])
        self.best = math.nan if state["best"] is None else float(state["best"])
