"""Notices an `optimizer.step()` or `scaler.step(optimizer)` that was left in a loop: weights would move twice."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

COMMITTING, WATCHED = "_halfstep_commits", "_halfstep_watches"
"""Marks on the optimizer itself, because two steps may share one."""


def watch_for_hands(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if not hasattr(optimizer, WATCHED):
            setattr(optimizer, WATCHED, True)
            optimizer.register_step_pre_hook(_notice)


def _notice(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, COMMITTING, False) or not getattr(optimizer, WATCHED, False):
        return
    setattr(optimizer, WATCHED, False)  # once is enough
    warnings.warn(
        f"{type(optimizer).__name__}.step() was called besides hs.Step, which steps it already: weights move twice, "
        "unguarded. Leave optimizer.step() and scaler.step(optimizer) out",
        stacklevel=3,
    )


@contextlib.contextmanager
def committing(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Inside, the optimizers are stepped by us."""
    for optimizer in optimizers:
        setattr(optimizer, COMMITTING, True)
    try:
        yield
    finally:
        for optimizer in optimizers:
            setattr(optimizer, COMMITTING, False)
