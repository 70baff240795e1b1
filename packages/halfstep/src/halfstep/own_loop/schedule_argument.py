"""The `schedule=` argument of hs.Step: what it may be, and how it reaches the rates of each optimizer.

a torch scheduler, or per_step(it)    follows committed steps, for the groups of its optimizer
a function of the step                multiplies the learning rates of its optimizer; alone, of all of them
per_epoch(scheduler or function)      follows `epoch_ended()`
ReduceLROnPlateau                     follows `validated(metric)`
a list of these                       one for each optimizer; None leaves that one to the user
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.errors import CheckpointError, ConfigError
from halfstep.step.schedule import Curve, Plateau, Schedule, copy_scheduler
from halfstep.step.step_state import make_rates_plain
from halfstep.step.tables import Rates, check_finite, check_rate, explain_no_rate, read_base_rate

DRIVEN_BY = "_halfstep_schedules"
"""Mark on an optimizer: the schedules of the newest step that was made with it."""

AHEAD = 256  # steps that a user's schedule is asked for in advance
BY_BATCH = (OneCycleLR, CyclicLR)  # what torch documents as stepped after every batch
FEW_STEPS, SMALL_SHARE = 1000, 0.02


@dataclass(frozen=True, slots=True)
class Paced:
    """A schedule, and whether it follows steps or epochs."""

    schedule: LRScheduler | Schedule
    every: Literal["step", "epoch"]

    def __post_init__(self) -> None:
        if isinstance(self.schedule, ReduceLROnPlateau):
            raise ConfigError(
                f"hs.per_{self.every} was given a ReduceLROnPlateau",
                why="it follows a metric, not steps or epochs",
                fix="pass schedule=plateau itself, and call step.validated(metric) after each validation",
            )


def per_step(schedule: LRScheduler | Schedule) -> Paced:
    """Follow a torch scheduler, or a function of the step, once for each committed optimizer step."""
    return Paced(schedule, "step")


def per_epoch(schedule: LRScheduler | Schedule) -> Paced:
    """Follow a torch scheduler, or a function of the epoch (0, 1, ...), once for each `step.epoch_ended()`."""
    return Paced(schedule, "epoch")


class Following(LRScheduler):
    """Methods put in front of those of the user's scheduler, so that code that stores it stays correct.

    hs.Step reads rates from a copy of the scheduler and never calls the `step()` of the user's object. Its fields come
    from a second copy, which is moved to the count of committed steps when they are needed: reading an attribute takes
    the count that the guard knows, up to two steps late, and waits for nothing; `state_dict()` and `get_last_lr()` wait
    for the device and are exact. So steps pay nothing.

    The object's class is replaced by a subclass made for it. Attributes set on the object itself would be stored by
    `state_dict()`, which returns its `__dict__`."""

    _halfstep_driven: Driven

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            type(self)._halfstep_driven.show(is_exact=name in ("state_dict", "get_last_lr"))
        return super().__getattribute__(name)

    def get_last_lr(self) -> list[Any]:
        return [rate * type(self)._halfstep_driven.schedules.cut for rate in super().get_last_lr()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        driven = type(self)._halfstep_driven
        with driven.pause():
            super().load_state_dict(state_dict)
            driven.is_loaded = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it as an object of its own class, which follows nothing."""
        driven = type(self)._halfstep_driven
        driven.show(is_exact=True)
        # Not copyreg.__newobj__: pickle refuses to call it for another class.
        return copyreg._reconstructor, (driven.own_class, object, None), self.__getstate__()  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Driven:
    """The schedule of one optimizer, and the user's scheduler and optimizer, which show where it is."""

    schedules: LoopSchedules
    optimizer: Optimizer
    every: Literal["step", "epoch", "validation"]
    absolute: Curve | Plateau | Callable[[int], Sequence[float]]
    """Count since `start` -> the rate of each group, then cycled momenta."""
    scheduler: Any = None
    own_class: type[Any] = LRScheduler  # of the user's scheduler
    start: int = 0  # committed steps, or epochs, at the position that the scheduler was given or loaded with
    first: int = 0  # that position, as the scheduler counts
    is_loaded: bool = False  # the user has loaded a state, and the step has not taken over its position yet
    _is_paused: bool = False
    _fields: dict[str, Any] = field(default_factory=dict)
    counts: tuple[int, ...] = ()  # of the fields that were shown last; empty if they have to be shown again

    @property
    def kind(self) -> str:
        name = "function" if self.scheduler is None else type(self.scheduler).__name__
        return f"{name} per {self.every}"

    @property
    def cycles(self) -> bool:
        return isinstance(self.absolute, Curve) and self.absolute.cycles

    @property
    def is_stepped_by_hand(self) -> bool:
        return bool(self.counts) and not self.is_loaded and count_steps(self._fields) != self.counts

    def restart(self, rates: Sequence[float] | None = None) -> None:
        """Follow the scheduler from its present position on; `rates` replace those in the optimizer's groups."""
        origin, stand_in = copy_scheduler(self.scheduler)
        for group, rate in zip(stand_in.param_groups, rates or (), strict=False):
            group["lr"] = float(rate)
        self.absolute = Plateau(origin) if self.every == "validation" else Curve(origin)
        self._fields = vars(self.scheduler)  # looked up once: through its new class it takes a microsecond
        self.counts, self.is_loaded = count_steps(self._fields), False
        self.first = max(self.counts)

    def follow(self) -> None:
        """Let the user's scheduler and the optimizer's state show where training is."""
        self.optimizer.register_state_dict_post_hook(self._show_in_state)
        if self.scheduler is None:
            return
        # An earlier step may have driven it.
        found = type(self.scheduler)
        own = self.own_class = found._halfstep_driven.own_class if issubclass(found, Following) else found
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "_halfstep_driven": self}
        self.scheduler.__class__ = type(own.__name__, (Following, own), names)

    def show(self, *, is_exact: bool = False) -> Any:
        """Copy the fields of the twin, if it has moved. Return the twin; None if a state was loaded, or if the user has
        stepped the scheduler, which the next step refuses."""
        if self._is_paused or self.is_loaded or self.is_stepped_by_hand:
            return None
        assert isinstance(self.absolute, Curve | Plateau)
        with self.pause():
            twin = self.absolute.move(self.schedules.count(self, is_exact=is_exact) - self.start)
            if count_steps(vars(twin)) != self.counts:
                try:
                    self.own_class.load_state_dict(self.scheduler, copy.deepcopy(twin.state_dict()))
                except AttributeError:  # LambdaLR cannot store a method of a list, for example
                    self._fields.update(last_epoch=twin.last_epoch, _last_lr=twin.get_last_lr())
                self.counts = count_steps(self._fields)
        return twin

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Let attributes be read and written as they are inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _show_in_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Store what a plain loop would: the rates and momenta of the next step, as numbers. Groups hold those of the
        last one, in tensors if captured steps read them."""
        state = make_rates_plain(state)
        is_newest = getattr(optimizer, DRIVEN_BY, None) is self.schedules
        twin = self.show(is_exact=True) if self.scheduler is not None and is_newest else None
        for own, then in zip(state["param_groups"], twin.optimizer.param_groups if twin else (), strict=False):
            own["lr"] = then["lr"] * self.schedules.cut
            own.update({name: then[name] for name in ("betas", "momentum") if self.cycles and name in own})
        return state


def count_steps(fields: dict[str, Any]) -> tuple[int, ...]:
    """Return how often a scheduler was stepped, by its attributes, and each scheduler of a chain."""
    inner = fields.get("_schedulers", ())
    return (fields.get("last_epoch", 0), *(count for one in inner for count in count_steps(vars(one))))


class LoopSchedules:
    def __init__(self, given: object, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self.optimizers, self.epochs = list(optimizers), 0
        self.hints: list[str] = []
        self.driven = [self._drive(one, optimizer) for optimizer, one in _assign_to_optimizers(given, optimizers)]
        self.committed = torch.zeros(())  # a step's count, from `follow` on
        self.num_committed = 0
        """The committed steps as far as the host knows without a wait."""
        self.rates = self._make_rates(device) if self.driven else None
        kinds = {id(driven.optimizer): driven.kind for driven in self.driven}
        self.kinds = [kinds.get(id(optimizer), "none") for optimizer in optimizers]

    def _drive(self, given: Any, optimizer: Optimizer) -> Driven:
        inner, every = _unwrap(given), given.every if isinstance(given, Paced) else "step"
        if isinstance(inner, LRScheduler):
            pace = "validation" if isinstance(inner, ReduceLROnPlateau) else every
            driven = Driven(self, optimizer, pace, lambda _: (), inner)
            driven.restart(inner.get_last_lr() if isinstance(inner, Following) else None)  # of an earlier step
            if isinstance(driven.absolute, Curve) and not isinstance(given, Paced) and not isinstance(inner, BY_BATCH):
                self.hints += _hint_at_epochs(inner, driven.absolute)
            return driven
        bases = [read_base_rate(group) for group in optimizer.param_groups]
        self.hints += _hint_at_multiples(inner, AHEAD if every == "step" else 10, max(bases))
        return Driven(self, optimizer, every, lambda count: _multiply(bases, inner(count)))

    def _make_rates(self, device: torch.device) -> Rates:
        schedules = [_make_group_schedule(driven, position) for driven, position in self._list_rows()]
        optimizers = [driven.optimizer for driven in self.driven]
        cycled = [driven.optimizer for driven in self.driven if driven.cycles]
        dtype, ones = torch.float64 if device.type == "cpu" else torch.float32, [1.0] * len(schedules)
        rates = Rates(optimizers, schedules, device, base=ones, chunk=AHEAD, dtype=dtype, cycled=cycled)
        rates.set_by_host(self._list_by_host())
        return rates

    def _list_rows(self) -> list[tuple[Driven, int]]:
        """Return the rows of the tables, the rates of all groups and then the cycled momenta: each one's schedule, and
        its position among the values of that schedule."""
        sizes = [(driven, len(driven.optimizer.param_groups)) for driven in self.driven]
        rates = [(driven, position) for driven, num in sizes for position in range(num)]
        return rates + [(driven, num + k) for driven, num in sizes if driven.cycles for k in range(num)]

    def _list_by_host(self) -> list[float | None]:
        """Return the rows that do not follow steps; None for the others."""
        asked = {id(one): self._ask(one, self.epochs) for one in self.driven if one.every != "step"}
        return [asked[id(one)][position] if id(one) in asked else None for one, position in self._list_rows()]

    def _write_rates(self) -> None:
        """Hand the tables and the groups the rates that do not follow steps."""
        assert self.rates is not None
        self.rates.set_by_host(self._list_by_host())
        self.rates.show_by_host()

    def _ask(self, driven: Driven, epochs: int) -> Sequence[float]:
        try:
            return [check_rate(own) for own in driven.absolute(epochs - driven.start)]
        except Exception as error:  # whatever a user's function may raise
            raise explain_no_rate(f"epoch {epochs}", error, "T_max=number of epochs") from error

    def epoch_ended(self) -> None:
        self._refuse_call("epoch_ended()", "epoch", "hs.per_epoch(scheduler)")
        self.epochs += 1
        self._write_rates()

    def validated(self, metric: float) -> None:
        self._refuse_call("validated(metric)", "validation", "torch.optim.lr_scheduler.ReduceLROnPlateau(...)")
        for plateau in self._list_plateaus():
            plateau.observe(float(metric))
        self._write_rates()

    def _refuse_call(self, call: str, every: str, schedule: str) -> None:
        """Refuse a call that no schedule follows."""
        if not self.has_any(every):
            raise ConfigError(
                f"{call} was called, but no schedule= follows it",
                why="a scheduler follows optimizer steps unless it is given as hs.per_epoch(scheduler), and a "
                "ReduceLROnPlateau follows step.validated(metric)",
                fix=f"schedule={schedule}, or remove the call of {call}",
            )
        self.refuse_written_rates()

    def has_any(self, *kinds: str) -> bool:
        return any(driven.every in kinds for driven in self.driven)

    # --- the user's own scheduler and optimizer ---

    def follow(self, committed: Tensor) -> None:
        """Let the users' schedulers follow a step's count of committed steps from now on."""
        self.committed = committed
        for optimizer in self.optimizers:
            setattr(optimizer, DRIVEN_BY, self)
        for driven in self.driven:
            driven.follow()

    def note(self, committed: int) -> None:
        """Take the count of a step that the host has read."""
        self.num_committed = max(self.num_committed, committed)

    def go_back(self) -> None:
        """Read the count again, after a rollback or a load."""
        self.num_committed = int(self.committed)

    def count(self, driven: Driven, *, is_exact: bool = True) -> int:
        """Return the count that a schedule follows; an exact one waits for the steps in flight."""
        if driven.every == "step" and is_exact:
            self.go_back()
        return self.num_committed if driven.every == "step" else self.epochs

    @property
    def cut(self) -> float:
        return 1.0 if self.rates is None else self.rates.cut

    def take_loaded(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on from states that the user's code has loaded into schedulers, and into these optimizers."""
        if self.rates is None:
            return
        self.rates.refuse_new_groups()
        for driven in self.driven:
            is_new = any(driven.optimizer is one for one in optimizers)
            # A plateau follows the rates in the groups, as in a plain loop.
            if driven.is_loaded or is_new and isinstance(driven.absolute, Plateau):
                driven.start = self.count(driven)
                driven.restart(None if is_new else getattr(driven.scheduler, "_last_lr", None))
            elif is_new:
                self._refuse_other_rates(driven)
        self.rates.find_groups_again()
        self.rates.fill_again()
        self._write_rates()

    def _refuse_other_rates(self, driven: Driven) -> None:
        """Refuse an optimizer's loaded state whose rate is not the schedule's: where the schedule was is not in it."""
        count = self.count(driven)
        own = [rate * self.cut for rate in self._ask(driven, count)]
        loaded = [float(group["lr"]) for group in driven.optimizer.param_groups]
        is_equal = all(math.isclose(*pair, rel_tol=1e-5) for pair in zip(own, loaded, strict=False))
        if not is_equal if driven.scheduler is not None else count == 0 and driven.optimizer.state:
            raise ConfigError(
                f"a state with the learning rate {loaded[0]:g} was loaded into {type(driven.optimizer).__name__}, but "
                f"schedule= ({driven.kind}), which is at {count}, gives {own[0]:g}",
                why="an optimizer's state lacks the position of its schedule, which would begin again",
                fix="call scheduler.load_state_dict(...) as well, or step.load_state_dict for a schedule function; "
                "to begin the schedule again, load before creating the step",
            )

    def refuse_written_rates(self) -> None:
        """Refuse a scheduler that was stepped, or a learning rate that was written, by the user's loop as well."""
        for driven in self.driven:
            if driven.is_stepped_by_hand:
                instead = {
                    "step": "the step advances it",
                    "epoch": "call step.epoch_ended() instead",
                    "validation": "call step.validated(metric) instead",
                }[driven.every]
                raise ConfigError(
                    f"{type(driven.scheduler).__name__}.step() was called by hand, but schedule= drives it",
                    why="the step follows a copy of it, which a skipped step does not advance",
                    fix=f"leave scheduler.step() out: {instead}; or leave schedule= out and keep stepping it by hand",
                )
        if self.rates is not None:
            self.rates.refuse_written_rates()

    def state_dict(self) -> dict[str, Any]:
        plateaus = [plateau.state_dict() for plateau in self._list_plateaus()]
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
                why="this step's schedule would continue with the counters of the stored one",
                fix="create the step with the schedule= it was saved with; to start the new one at epoch 0 anyway: "
                'step.load_state_dict(state | {"schedules": {}})',
            )
        for driven, start in zip(self.driven, self._find_starts(state), strict=True):
            count = (committed if driven.every == "step" else int(state["epochs"])) - start
            if isinstance(driven.absolute, Curve) and count < 0:
                raise CheckpointError(
                    f"{type(driven.scheduler).__name__} is at {driven.first}, "
                    f"but the state is at {driven.first + count}",
                    why="a scheduler cannot step back",
                    fix="create the step with a new scheduler, as when the state was saved",
                )
            if driven.every == "epoch":
                self._ask(driven, driven.start + count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epochs = int(state.get("epochs", 0))
        self.go_back()
        for driven, start in zip(self.driven, self._find_starts(state), strict=True):
            driven.start = start
            driven.counts = ()
        for plateau, stored in zip(self._list_plateaus(), state.get("plateaus", ()), strict=bool(state)):
            plateau.load_state_dict(stored)
        if self.rates is not None:
            self.rates.fill_again()
            self._write_rates()

    def _list_plateaus(self) -> list[Plateau]:
        return [driven.absolute for driven in self.driven if isinstance(driven.absolute, Plateau)]


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
                fix="give one per optimizer, in the same order; None for an optimizer without a schedule",
            )
        pairs = [(optimizer, one) for optimizer, one in zip(optimizers, given, strict=True) if one is not None]
        for optimizer, one in pairs:
            _refuse_stranger(one, [optimizer], f"the {type(optimizer).__name__} at its position in the list")
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
            why="a schedule is a torch scheduler, a function of the step, or a list with one of them per optimizer",
            fix="schedule=hs.per_step(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=number_of_steps)); "
            "a scheduler of another library: leave schedule= out and step it yourself",
        )
    if not any(inner.optimizer is optimizer for optimizer in optimizers):
        raise ConfigError(
            f"{type(inner).__name__} was created for another optimizer, not for {wanted}",
            why="a scheduler only drives the optimizer that it was created with",
            fix=f"create it with the optimizer given to Step: {type(inner).__name__}(optimizer, ...)",
        )


def _multiply(bases: Sequence[float], multiplier: Any) -> list[float]:
    return [base * check_finite(multiplier) for base in bases]


def _ask_ahead(function: Callable[[int], Any], num: int) -> Iterator[Any]:
    """Yield what a user's function gives for the first steps, up to its end, which training may never reach."""
    with contextlib.suppress(Exception):
        for step in range(num):
            yield function(step)


def _hint_at_epochs(scheduler: LRScheduler, curve: Curve) -> list[str]:
    """Hint at a scheduler that may count epochs: all rates are at most 1/50 of their highest after a few steps."""
    highest = [0.0] * len(curve.rates[0])
    for step, rates in enumerate(_ask_ahead(curve, FEW_STEPS)):
        highest = [max(pair) for pair in zip(highest, rates, strict=True)]
        if any(highest) and all(rate <= SMALL_SHARE * top for rate, top in zip(rates, highest, strict=True)):
            return [
                f"schedule={type(scheduler).__name__} follows optimizer steps: after {step} of them the learning rate "
                "is 1/50 of its highest or less. If it counts epochs, write schedule=hs.per_epoch(scheduler) and call "
                "step.epoch_ended(); if that is intended, hs.per_step(scheduler)"
            ]
    return []


def _hint_at_multiples(function: Schedule, ahead: int, base: float) -> list[str]:
    """Hint at a function that returns learning rates instead of multiples of the optimizer's learning rate."""
    highest = max(_ask_ahead(lambda step: float(function(step)), ahead), default=0.0)
    if not 0 < highest <= 0.01 or base > 0.5:
        return []
    return [
        f"schedule= is a function that returns at most {highest:g}: it should return a multiple of the optimizer's "
        f"learning rate, {base:g}. If it returns rates, use lambda step: rate(step) / {base:g}"
    ]
