"""Warnings of a loop of one's own point at the user's line, however deep in the package they arise."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

import halfstep

OURS = (str(Path(halfstep.__file__).parent), contextlib.__file__)
"""Files whose lines a user cannot change; ours leave `with` blocks through contextlib's."""


def warn_user(text: str) -> None:
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


# --- an optimizer.step() that was left in the loop ---

COMMITTING, WATCHED = "_halfstep_commits", "_halfstep_watches"
"""Marks on the optimizer itself, because two steps may share one."""


def watch_for_hands(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        # One that wraps another, as Lookahead or Accelerate's, may have left torch's constructor out.
        if not hasattr(optimizer, WATCHED) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
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
