"""`hs.ledger`: what the steps of an own loop really computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from halfstep.errors import ConfigError
from halfstep.evidence.ledger import Ledger, Weights, ledger_of
from halfstep.evidence.observer import Observer
from halfstep.evidence.side import seen_by
from halfstep.run.facade import Step as OwnStep
from halfstep.step.step import Step

NOT_COMPILED = (
    "the model is compiled: inside the ledger its steps ran uncompiled, so this is what its code asks for, "
    "not what the compiler made of it"
)


class SeenSteps:
    """The ledger of the steps made so far inside `with hs.ledger(step) as seen`; print it."""

    def __init__(self, step: Step, observer: Observer) -> None:
        self._step, self._observer = step, observer

    @property
    def ledger(self) -> Ledger:
        if not self._observer.seen.calls and not self._observer.seen.casts:
            raise ConfigError(
                "the ledger has seen no step", fix="call step(loss_fn, window) inside `with hs.ledger(step) as seen`"
            )
        model = self._step.model
        is_compiled = any(hasattr(module, "_orig_mod") for module in model.modules())
        weights = Weights.of(model, self._step.optimizers)
        notes = [NOT_COMPILED] if is_compiled else []
        return ledger_of(self._step.plan, self._observer, model, weights, notes=notes, step=self._step.attempted)

    def __str__(self) -> str:
        return str(self.ledger)


@contextmanager
def ledger(step: OwnStep | Step) -> Iterator[SeenSteps]:
    """Watch the steps made inside, forward and backward; they compute the same to the bit.

    with hs.ledger(step) as seen:
        step(loss_fn, window)
    print(seen)
    """
    guarded = step._step if isinstance(step, OwnStep) else step
    if not isinstance(guarded, Step):
        raise ConfigError(f"hs.ledger takes an hs.Step, not {type(step).__name__}", fix="with hs.ledger(step) as seen:")
    observer = Observer(guarded.model)
    with seen_by(guarded, observer.watching):
        yield SeenSteps(guarded, observer)
