"""Let the user's scheduler follow the steps that hs.Step commits, so that checkpoint code which stores it stays right.

hs.Step reads rates from a copy of the scheduler and never calls the `step()` of the user's object. Its fields come from
a second copy, which is moved to the count of committed steps when they are needed: reading an attribute takes the count
that the guard knows, up to two steps late, and waits for nothing; `state_dict()` and `get_last_lr()` wait for the
device and are exact. So steps pay nothing.

The object's class is replaced by a subclass made for it. Attributes set on the object itself would be stored by
`state_dict()`, which returns its `__dict__`.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.step.schedule import copy_scheduler, step_copy


class Twin:
    """A copy of a scheduler that can be moved to any count of steps since it was given."""

    def __init__(self, origin: LRScheduler) -> None:
        self.origin, self.count = origin, 0
        self.scheduler: LRScheduler = copy_scheduler(origin)[0]

    def move(self, count: int) -> LRScheduler:
        if count < self.count:  # after a rollback: schedulers cannot step back
            self.scheduler, self.count = copy_scheduler(self.origin)[0], 0
        while self.count < count:
            self.count += 1
            with contextlib.suppress(Exception):  # past its end, which the step refuses once it needs a rate there
                step_copy(self.scheduler)
        return self.scheduler


class Following(LRScheduler):
    """What the class of the user's scheduler gets in front of its own methods."""

    _halfstep_link: Link

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            type(self)._halfstep_link.show()
        return super().__getattribute__(name)

    def state_dict(self) -> dict[str, Any]:
        type(self)._halfstep_link.show(is_exact=True)
        return super().state_dict()

    def get_last_lr(self) -> list[Any]:
        link = type(self)._halfstep_link
        link.show(is_exact=True)
        return [rate * link.read_cut() for rate in super().get_last_lr()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        link = type(self)._halfstep_link
        with link.pause():
            super().load_state_dict(state_dict)
            link.is_loaded = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle it as an object of its own class, which follows nothing."""
        link = type(self)._halfstep_link
        link.show(is_exact=True)
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if arguments[:1] == (type(self),):  # pickle refuses to call __newobj__ for another class
            make, arguments = copyreg._reconstructor, (link.kind, object, None)  # type: ignore[attr-defined]
        return make, arguments, *rest


class Link:
    """Between the user's scheduler and the copy that is where training is."""

    def __init__(
        self, scheduler: Any, find_twin: Callable[[bool], tuple[object, Any]], read_cut: Callable[[], float]
    ) -> None:
        """`find_twin` returns that copy, and what identifies its position; True waits for steps in flight."""
        self.scheduler, self.find_twin, self.read_cut = scheduler, find_twin, read_cut
        if isinstance(scheduler, Following):  # an earlier step drove it
            scheduler.state_dict()
            scheduler.__class__ = type(scheduler)._halfstep_link.kind
        self.kind: type[Any] = type(scheduler)
        self.is_loaded = self._is_paused = False
        """A scheduler is loaded until the step takes over the position of the state."""
        self._shown: object = find_twin(False)[0]
        self._fields = vars(scheduler)  # looked up once: through the new class it takes a microsecond
        self._counts = count_steps(self._fields)
        names = {"__module__": self.kind.__module__, "__qualname__": self.kind.__qualname__, "_halfstep_link": self}
        scheduler.__class__ = type(self.kind.__name__, (Following, self.kind), names)

    @property
    def is_stepped_by_hand(self) -> bool:
        if self.is_loaded or count_steps(self._fields) == self._counts:
            return False
        return getattr(type(self.scheduler), "_halfstep_link", None) is self  # and not another step's by now

    def show(self, *, is_exact: bool = False) -> Any:
        """Copy the fields of the twin, if it has moved. Return the twin; None if a state was loaded, or if the user has
        stepped the scheduler, which the next step refuses."""
        if self._is_paused or self.is_loaded or self.is_stepped_by_hand:
            return None
        with self.pause():
            position, twin = self.find_twin(is_exact)
            if position != self._shown:
                self._shown = position
                try:
                    self.kind.load_state_dict(self.scheduler, copy.deepcopy(self.kind.state_dict(twin)))
                except AttributeError:  # LambdaLR cannot store a method of a list, for example
                    vars(self.scheduler).update(last_epoch=twin.last_epoch, _last_lr=twin.get_last_lr())
                self._counts = count_steps(self._fields)
        return twin

    @contextlib.contextmanager
    def pause(self) -> Any:
        """Let attributes be read and written as they are inside."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def take_over(self) -> None:
        """Go on from a state that was loaded, once the twin has it, too."""
        self.is_loaded, self._shown, self._counts = False, None, count_steps(self._fields)


def count_steps(fields: dict[str, Any]) -> tuple[int, ...]:
    """Return how often a scheduler was stepped, by its attributes, and each scheduler of a chain."""
    inner = fields.get("_schedulers", ())
    return (fields.get("last_epoch", 0), *(count for one in inner for count in count_steps(vars(one))))
