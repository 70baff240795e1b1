"""The `schedule=` argument of hs.Step: what it may be, and how it reaches the rates of each optimizer.

a torch scheduler, or per_step(it)    follows committed steps, for the groups of its optimizer
a function of the step                multiplies the learning rates of its optimizer; alone, of all of them
per_epoch(scheduler or function)      follows `epoch_ended()`
ReduceLROnPlateau                     follows `validated(metric)`
a list of these                       one for each optimizer; None leaves that one to the user
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.errors import CheckpointError, ConfigError
from halfstep.step.schedule import Curve, Plateau, Schedule
from halfstep.step.step_state import make_rates_plain
from halfstep.step.tables import Rates, check_finite, check_rate, explain_no_rate, read_base_rate

AHEAD = 256  # steps that a user's schedule is asked for in advance


@dataclass(frozen=True, slots=True)
class Paced:
    """A schedule, and whether it follows steps or epochs."""

    schedule: LRScheduler | Schedule
    every: Literal["step", "epoch"]

    def __post_init__(self) -> None:
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"hs.per_{self.every} was given a ReduceLROnPlateau",
                why="it follows a metric, neither steps nor epochs",
                fix="schedule=plateau as it is, and step.validated(metric) after each validation",
            )


def per_step(schedule: LRScheduler | Schedule) -> Paced:
    """Follow a torch scheduler, or a function of the step, once for each committed optimizer step."""
    return Paced(schedule, "step")


def per_epoch(schedule: LRScheduler | Schedule) -> Paced:
    """Follow a torch scheduler, or a function of the epoch (0, 1, ...), once for each `step.epoch_ended()`."""
    return Paced(schedule, "epoch")


@dataclass(slots=True)
class Driven:
    optimizer: Optimizer
    every: Literal["step", "epoch", "validation"]
    absolute: Callable[[int], Sequence[float]]  # count of steps or epochs -> the rate of each group
    scheduler: Any = None
    count: tuple[int, ...] = ()  # how far the user's own scheduler stood when it was given
    plateau: Plateau | None = None

    @property
    def kind(self) -> str:
        name = "function" if self.scheduler is None else type(self.scheduler).__name__
        return f"{name} per {self.every}"


class LoopSchedules:
    def __init__(self, given: object, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.epochs = 0
        self.hints: list[str] = []
        self.driven = [self._drive(one, optimizer) for optimizer, one in _assign_to_optimizers(given, optimizers)]
        for driven in self.driven:
            # JSON and loggers take numbers, not the tensors that fused optimizers read their rates from.
            driven.optimizer.register_state_dict_post_hook(lambda optimizer, state: make_rates_plain(state))
        self.rates = self._make_rates(device) if self.driven else None
        kinds = {id(driven.optimizer): driven.kind for driven in self.driven}
        self.kinds = [kinds.get(id(optimizer), "none") for optimizer in optimizers]

    def _drive(self, given: Any, optimizer: Optimizer) -> Driven:
        inner, every = _unwrap(given), given.every if isinstance(given, Paced) else "step"
        if isinstance(inner, ReduceLROnPlateau):
            twin = Plateau(inner)
            return Driven(optimizer, "validation", lambda _: twin.rates(), inner, _count_steps(inner), twin)
        if isinstance(inner, LRScheduler):
            curve = Curve(inner)
            if not isinstance(given, Paced) and not isinstance(inner, BY_BATCH):
                self.hints += _hint_at_epochs(inner, curve)
            return Driven(optimizer, every, curve, inner, _count_steps(inner))
        bases = [read_base_rate(group) for group in optimizer.param_groups]
        self.hints += _hint_at_multiples(inner, AHEAD if every == "step" else 10, max(bases))
        return Driven(optimizer, every, lambda count: _multiply(bases, inner(count)))

    def _make_rates(self, device: torch.device) -> Rates:
        schedules = [
            _make_group_schedule(driven, position)
            for driven in self.driven
            for position in range(len(driven.optimizer.param_groups))
        ]
        optimizers = [driven.optimizer for driven in self.driven]
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        rates = Rates(optimizers, schedules, device, base=[1.0] * len(schedules), chunk=AHEAD, dtype=dtype)
        self.rates = rates
        self._write_rates()
        return rates

    def _write_rates(self) -> None:
        """Hand the tables the rates that do not follow steps."""
        assert self.rates is not None
        said: list[float | None] = []
        for driven in self.driven:
            by_steps = driven.every == "step"
            said += [None] * len(driven.optimizer.param_groups) if by_steps else self._ask(driven, self.epochs)
        self.rates.set_by_host(said)

    def _ask(self, driven: Driven, epochs: int) -> Sequence[float]:
        try:
            return [check_rate(own) for own in driven.absolute(epochs)]
        except Exception as error:  # whatever a user's function may raise
            raise explain_no_rate(f"epoch {epochs}", error, "T_max=number of epochs") from error

    def epoch_ended(self) -> None:
        if not self.has_any("epoch"):
            raise ConfigError(
                "epoch_ended() was called, but no schedule= is per epoch",
                why="a scheduler follows optimizer steps unless it is given as hs.per_epoch(scheduler), and a "
                "ReduceLROnPlateau follows step.validated(metric)",
                fix="schedule=hs.per_epoch(scheduler), or no call of epoch_ended()",
            )
        self.refuse_written_rates()
        self.epochs += 1
        self._write_rates()
        self._show_rates()

    def validated(self, metric: float) -> None:
        if not self.has_any("validation"):
            raise ConfigError(
                "validated(metric) was called, but schedule= holds no ReduceLROnPlateau",
                why="no other schedule follows a metric",
                fix="schedule=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, ...), or no call of validated()",
            )
        self.refuse_written_rates()
        for driven in self.driven:
            if driven.plateau is not None:
                driven.plateau.observe(float(metric))
        self._write_rates()
        self._show_rates()

    def _show_rates(self) -> None:
        assert self.rates is not None
        self.rates.show_by_host()

    def has_any(self, *kinds: str) -> bool:
        return any(driven.every in kinds for driven in self.driven)

    def refuse_written_rates(self) -> None:
        """Refuse a scheduler that was stepped, or a learning rate that was written, by the user's loop as well."""
        for driven in self.driven:
            if driven.scheduler is not None and _count_steps(driven.scheduler) != driven.count:
                instead = {
                    "step": "the step moves it on by itself",
                    "epoch": "call step.epoch_ended() instead",
                    "validation": "call step.validated(metric) instead",
                }[driven.every]
                raise ConfigError(
                    f"{type(driven.scheduler).__name__}.step() was called by hand, but schedule= drives it",
                    why="the step follows a copy of it, which a skipped step does not move",
                    fix=f"leave scheduler.step() out: {instead}; or leave schedule= out and keep stepping it by hand",
                )
        if self.rates is not None:
            self.rates.refuse_written_rates()

    def state_dict(self) -> dict[str, Any]:
        plateaus = [driven.plateau.state_dict() for driven in self.driven if driven.plateau]
        return {"kinds": self.kinds, "epochs": self.epochs, "plateaus": plateaus}

    def refuse_unfit(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        kinds = state["kinds"]
        if kinds != self.kinds:
            raise CheckpointError(
                f"the state was saved with another schedule: {', '.join(kinds)}; this step has {', '.join(self.kinds)}",
                why="another schedule would read its counters",
                fix="make the step with the schedule= it was saved with; to start the new one at epoch 0 anyway: "
                'step.load_state_dict(state | {"schedules": {}})',
            )
        own, stored = sum(d.plateau is not None for d in self.driven), len(state["plateaus"])
        if own != stored:
            raise CheckpointError(
                f"the state holds {stored} ReduceLROnPlateau, this step {own}",
                fix="make the step with the schedule= it was saved with",
            )
        for driven in self.driven:
            if driven.every == "epoch":
                self._ask(driven, int(state.get("epochs", 0)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = int(state.get("epochs", 0))
        plateaus = [driven.plateau for driven in self.driven if driven.plateau is not None]
        for plateau, stored in zip(plateaus, state.get("plateaus", ()), strict=bool(state)):
            plateau.load_state_dict(stored)
        if self.driven:
            self._write_rates()
            self._show_rates()


def _make_group_schedule(driven: Driven, position: int) -> Schedule:
    """Return one group's function of the step. Schedules by epoch or metric give 1: the host writes their rates."""
    if driven.every != "step":
        return lambda step: 1.0
    return lambda step: driven.absolute(step)[position]


def _assign_to_optimizers(given: object, optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, Any]]:
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        if len(given) != len(optimizers):
            raise ConfigError(
                f"schedule= lists {len(given)} schedules for {len(optimizers)} optimizers",
                fix="give one per optimizer, in the same order; None for an optimizer without schedule",
            )
        pairs = [(optimizer, one) for optimizer, one in zip(optimizers, given, strict=True) if one is not None]
        for optimizer, one in pairs:
            _refuse_stranger(one, [optimizer], f"the {type(optimizer).__name__} at its place in the list")
        return pairs
    _refuse_stranger(given, optimizers, "one of this step's")
    own = getattr(_unwrap(given), "optimizer", None)
    return [(optimizer, given) for optimizer in optimizers if own is None or optimizer is own]


def _unwrap(given: object) -> Any:
    return given.schedule if isinstance(given, Paced) else given


def _refuse_stranger(given: object, optimizers: Sequence[Optimizer], wanted: str) -> None:
    inner = _unwrap(given)
    if not isinstance(inner, (LRScheduler, ReduceLROnPlateau)):
        if callable(inner) and not isinstance(inner, type):
            return
        raise ConfigError(
            f"schedule={given!r} is not a schedule",
            why="it is a torch scheduler, a function of the step, or a list with one of them for each optimizer",
            fix="schedule=hs.per_step(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=number_of_steps)); "
            "a scheduler of another library: leave schedule= out and step it yourself",
        )
    if not any(inner.optimizer is optimizer for optimizer in optimizers):
        raise ConfigError(
            f"{type(inner).__name__} was made for another optimizer, not for {wanted}",
            why="a scheduler drives the optimizer it was made with, and no other",
            fix=f"make it with the optimizer given to Step: {type(inner).__name__}(optimizer, ...)",
        )


def _multiply(bases: Sequence[float], multiplier: Any) -> list[float]:
    return [base * check_finite(multiplier) for base in bases]


def _count_steps(scheduler: Any) -> tuple[int, ...]:
    """Return how often the user's scheduler was stepped, and each scheduler of a chain."""
    parts = getattr(scheduler, "_schedulers", ())
    return (getattr(scheduler, "last_epoch", 0), *(count for part in parts for count in _count_steps(part)))


def _hint_at_epochs(scheduler: LRScheduler, curve: Curve) -> list[str]:
    steps = count_steps_until_small(curve)
    if not steps:
        return []
    return [
        f"schedule={type(scheduler).__name__} follows optimizer steps: after {steps} of them the learning rate is 1/50 "
        "of its highest or less. If it counts epochs, write schedule=hs.per_epoch(scheduler) and call "
        "step.epoch_ended(); if that is meant, hs.per_step(scheduler)"
    ]


def _hint_at_multiples(function: Schedule, ahead: int, base: float) -> list[str]:
    """Hint at a function that returns learning rates instead of multiples of the optimizer's learning rate."""
    highest = 0.0
    for step in range(ahead):
        try:
            highest = max(highest, float(function(step)))
        except Exception:  # beyond its end
            break
    if not 0 < highest <= 0.01 or base > 0.5:
        return []
    return [
        f"schedule= is a function that gives at most {highest:g}: a multiple of the optimizer's learning rate, "
        f"{base:g}, is meant. Of a function that gives rates, make lambda step: rate(step) / {base:g}"
    ]


BY_BATCH = (OneCycleLR, CyclicLR)  # what torch documents as stepped after every batch
FEW_STEPS, SMALL_SHARE = 1000, 0.02


def count_steps_until_small(curve: Curve) -> int:
    """Return after how many steps all rates are at most 1/50 of their highest; 0 if that takes FEW_STEPS or more."""
    highest = [0.0] * len(curve.rates[0])
    for step in range(FEW_STEPS):
        try:
            rates = curve(step)
        except Exception:  # past its end, which training may never reach
            return 0
        highest = [max(pair) for pair in zip(highest, rates, strict=True)]
        if any(highest) and all(rate <= SMALL_SHARE * top for rate, top in zip(rates, highest, strict=True)):
            return step
    return 0
