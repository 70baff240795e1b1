"""The `schedule=` argument of hs.Step: what it may be, and how it reaches the rates of each optimizer.

a torch scheduler, or per_step(it)    follows committed steps, for the groups of its optimizer
a function of the step                multiplies the learning rates of its optimizer; alone, of all of them
per_epoch(scheduler or function)      follows `epoch_ended()`
ReduceLROnPlateau                     follows `validated(metric)`
a list of these                       one for each optimizer; None leaves that one to the user
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.errors import CheckpointError, ConfigError
from halfstep.own_loop.following import Following, Link, Twin, count_steps
from halfstep.step.schedule import Curve, Plateau, Schedule, copy_scheduler
from halfstep.step.step_state import make_rates_plain
from halfstep.step.tables import Rates, check_finite, check_rate, explain_no_rate, read_base_rate

DRIVEN_BY = "_halfstep_schedules"
"""Mark on an optimizer: the schedules of the newest step that was made with it."""

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
    absolute: Callable[[int], Sequence[float]]  # count since `start` -> the rate of each group, then cycled momenta
    scheduler: Any = None
    curve: Curve | None = None
    plateau: Plateau | None = None
    twin: Twin | None = None
    link: Link | None = None
    start: int = 0  # committed steps, or epochs, at the position that the scheduler was given or loaded with
    first: int = 0  # that position, as the scheduler counts

    @property
    def kind(self) -> str:
        name = "function" if self.scheduler is None else type(self.scheduler).__name__
        return f"{name} per {self.every}"

    @property
    def cycles(self) -> bool:
        return self.curve is not None and self.curve.cycles

    def restart(self, rates: Sequence[float] | None = None) -> None:
        """Follow the scheduler from its present position on; `rates` replace those in the optimizer's groups."""
        origin, stand_in = copy_scheduler(self.scheduler)
        for group, rate in zip(stand_in.param_groups, rates or (), strict=False):
            group["lr"] = float(rate)
        self.first = max(count_steps(vars(origin)))
        if self.every == "validation":
            self.plateau = plateau = Plateau(origin)
            self.absolute = lambda _: plateau.rates()
        else:
            self.curve = self.absolute = Curve(origin)
            self.twin = Twin(origin)


class LoopSchedules:
    def __init__(self, given: object, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.optimizers, self.epochs = list(optimizers), 0
        self.hints: list[str] = []
        self.driven = [self._drive(one, optimizer) for optimizer, one in _assign_to_optimizers(given, optimizers)]
        self.committed: Tensor | None = None
        self.num_committed = 0
        """The committed steps as far as the host knows without a wait."""
        self.rates = self._make_rates(device) if self.driven else None
        kinds = {id(driven.optimizer): driven.kind for driven in self.driven}
        self.kinds = [kinds.get(id(optimizer), "none") for optimizer in optimizers]

    def _drive(self, given: Any, optimizer: Optimizer) -> Driven:
        inner, every = _unwrap(given), given.every if isinstance(given, Paced) else "step"
        if isinstance(inner, LRScheduler):
            driven = Driven(optimizer, every, lambda _: (), inner)
            driven.every = "validation" if isinstance(inner, ReduceLROnPlateau) else every
            driven.restart(inner.get_last_lr() if isinstance(inner, Following) else None)  # of an earlier step
            if driven.curve is not None and not isinstance(given, Paced) and not isinstance(inner, BY_BATCH):
                self.hints += _hint_at_epochs(inner, driven.curve)
            return driven
        bases = [read_base_rate(group) for group in optimizer.param_groups]
        self.hints += _hint_at_multiples(inner, AHEAD if every == "step" else 10, max(bases))
        return Driven(optimizer, every, lambda count: _multiply(bases, inner(count)))

    def _make_rates(self, device: torch.device) -> Rates:
        groups = [(one, position) for one in self.driven for position in range(len(one.optimizer.param_groups))]
        schedules = [_make_group_schedule(driven, position) for driven, position in groups]
        momenta = {
            number: _make_group_schedule(driven, len(driven.optimizer.param_groups) + position)
            for number, (driven, position) in enumerate(groups)
            if driven.cycles
        }
        optimizers, ones = [driven.optimizer for driven in self.driven], [1.0] * len(groups)
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        rates = Rates(optimizers, schedules, device, base=ones, chunk=AHEAD, dtype=dtype, momenta=momenta)
        self.rates = rates
        self._write_rates()
        return rates

    def _write_rates(self) -> None:
        """Hand the tables the rates that do not follow steps."""
        assert self.rates is not None
        rates: list[float | None] = []
        momenta: list[float | None] = []
        for driven in self.driven:
            num = len(driven.optimizer.param_groups)
            by_steps = [None] * num * (2 if driven.cycles else 1)
            own = by_steps if driven.every == "step" else self._ask(driven, self.epochs)
            rates += own[:num]
            momenta += own[num:]
        self.rates.set_by_host([*rates, *momenta])

    def _ask(self, driven: Driven, epochs: int) -> Sequence[float]:
        try:
            return [check_rate(own) for own in driven.absolute(epochs - driven.start)]
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

    # --- the user's own scheduler and optimizer ---

    def follow(self, committed: Tensor) -> None:
        """Let the users' schedulers follow a step's count of committed steps from now on."""
        self.committed = committed
        for optimizer in self.optimizers:
            setattr(optimizer, DRIVEN_BY, self)
        for driven in self.driven:
            driven.optimizer.register_state_dict_post_hook(self._show_in_state)
            if driven.scheduler is not None:
                driven.link = Link(driven.scheduler, partial(self._find_twin, driven), self._read_cut)

    def note(self, committed: int) -> None:
        """Take the count of a step that the host has read."""
        self.num_committed = max(self.num_committed, committed)

    def go_back(self) -> None:
        """Read the count again, after a rollback or a load."""
        if self.committed is not None:
            self.num_committed = int(self.committed)

    def _count(self, driven: Driven, *, is_exact: bool) -> int:
        """Return the count that a schedule follows; an exact one waits for the steps in flight."""
        if driven.every == "step" and is_exact:
            self.go_back()
        return self.num_committed if driven.every == "step" else self.epochs

    def _find_twin(self, driven: Driven, is_exact: bool) -> tuple[object, Any]:
        if driven.plateau is not None:
            return (driven.plateau, driven.plateau.num_changes), driven.plateau.twin
        assert driven.twin is not None
        count = self._count(driven, is_exact=is_exact) - driven.start
        return (driven.twin, count), driven.twin.move(count)

    def _read_cut(self) -> float:
        return 1.0 if self.rates is None else self.rates.cut

    def _show_in_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Store what a plain loop would: the rates and momenta of the next step, as numbers. Groups hold those of the
        last one, in tensors if captured steps read them."""
        state = make_rates_plain(state)
        for driven in self.driven if getattr(optimizer, DRIVEN_BY, None) is self else ():
            if driven.optimizer is not optimizer or driven.link is None:
                continue
            twin = driven.link.show(is_exact=True)
            groups = [] if twin is None else twin.optimizer.param_groups
            for own, then in zip(state["param_groups"], groups, strict=False):
                own["lr"] = then["lr"] * self._read_cut()
                own.update({name: then[name] for name in ("betas", "momentum") if driven.cycles and name in own})
        return state

    @property
    def has_loaded(self) -> bool:
        return any(driven.link is not None and driven.link.is_loaded for driven in self.driven)

    def take_loaded(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on from states that the user's code has loaded into schedulers, and into these optimizers."""
        if self.rates is None:
            return
        self.rates.refuse_new_groups()
        for driven in self.driven:
            is_loaded = any(driven.optimizer is one for one in optimizers)
            # A plateau follows the rates in the groups, as in a plain loop.
            is_moved = driven.link is not None and (driven.link.is_loaded or is_loaded and driven.plateau is not None)
            if driven.link is not None and is_moved:
                driven.start = self._count(driven, is_exact=True)
                driven.restart(None if is_loaded else getattr(driven.scheduler, "_last_lr", None))
                driven.link.take_over()
            elif is_loaded:
                self._refuse_other_rates(driven)
        self.rates.find_groups_again()
        self.rates.fill_again()
        self._write_rates()

    def _refuse_other_rates(self, driven: Driven) -> None:
        """Refuse an optimizer's loaded state whose rate is not the schedule's: where the schedule was is not in it."""
        count = self._count(driven, is_exact=True)
        own = [rate * self._read_cut() for rate in self._ask(driven, count)]
        loaded = [float(group["lr"]) for group in driven.optimizer.param_groups]
        is_equal = all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(own, loaded, strict=False))
        if not is_equal if driven.scheduler is not None else count == 0 and driven.optimizer.state:
            raise ConfigError(
                f"a state with the learning rate {loaded[0]:g} was loaded into {type(driven.optimizer).__name__}, and "
                f"schedule= ({driven.kind}), which is at {count}, gives {own[0]:g}",
                why="where a schedule was is not part of an optimizer's state, so it would begin again",
                fix="scheduler.load_state_dict(...) as well; for a schedule that is a function, step.load_state_dict; "
                "to begin the schedule again, load before making the step",
            )

    def refuse_written_rates(self) -> None:
        """Refuse a scheduler that was stepped, or a learning rate that was written, by the user's loop as well."""
        for driven in self.driven:
            if driven.link is not None and driven.link.is_stepped_by_hand:
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
        # How far each scheduler is ahead of this step's count: it may have begun in an earlier process.
        ahead = [driven.first - driven.start for driven in self.driven]
        return {"kinds": self.kinds, "epochs": self.epochs, "plateaus": plateaus, "ahead": ahead}

    def _find_starts(self, state: Mapping[str, Any]) -> list[int]:
        ahead = state.get("ahead", ()) or [driven.first for driven in self.driven]
        return [driven.first - int(own) for driven, own in zip(self.driven, ahead, strict=True)]

    def refuse_unfit(self, state: Mapping[str, Any], committed: int) -> None:
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
        for driven, start in zip(self.driven, self._find_starts(state), strict=True):
            count = (committed if driven.every == "step" else int(state["epochs"])) - start
            if driven.curve is not None and count < 0:
                raise CheckpointError(
                    f"{type(driven.scheduler).__name__} is at {driven.first}, the state at {driven.first + count}",
                    why="a scheduler cannot step back",
                    fix="make the step with a new scheduler, as it was made when the state was saved",
                )
            if driven.every == "epoch":
                self._ask(driven, driven.start + count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = int(state.get("epochs", 0))
        self.go_back()
        for driven, start in zip(self.driven, self._find_starts(state), strict=True):
            driven.start = start
        if self.rates is not None:
            self.rates.fill_again()
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
    return lambda step: driven.absolute(max(step - driven.start, 0))[position]


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
