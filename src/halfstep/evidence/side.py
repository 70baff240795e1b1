"""A step on the side: computed, looked at, and undone. Weights, buffers, optimizer and generators stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from halfstep.evidence.ledger import Weights
from halfstep.evidence.observer import Observer
from halfstep.step.batches import Window
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.step import LossFn, Step


@contextmanager
def undone(step: Step) -> Iterator[None]:
    """What a compute() inside changed is put back."""
    generators = read_generators()
    try:
        yield
    finally:
        step.abandon()
        restore_generators(generators)


@contextmanager
def seen_by(step: Step, watching: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Forward and backward of this step run inside `watching()`."""
    before, step.observed = step.observed, watching
    try:
        yield
    finally:
        step.observed = before


def observe(
    step: Step, loss_fn: LossFn, window: Window, frozen: Mapping[str, nn.Module] | None = None
) -> tuple[Observer, Weights]:
    """What one step of this window does, eagerly, and the formats of what it leaves."""
    observer = Observer(step.model, frozen)
    with undone(step), seen_by(step, observer.watching):
        step.compute(loss_fn, window)
        return observer, Weights.of(step.model, step.optimizers)
