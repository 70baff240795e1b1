"""Values that change with the steps (a temperature, a weight in the loss), as tensors that forward and loss read.

They are refreshed at the start of each step from the number of committed steps, inside the captured graph too, so that
nothing is frozen by compiling or capturing, and a resumed run goes on with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.step.tabulated import Tabulated


class Value(Protocol):
    """workloads.scheduled.Scheduled: a function of the step, and where its value of now is read."""

    value: Tensor

    def __call__(self, step: int) -> float: ...


class Counts(Protocol):
    """A step, or the iterations of several phases."""

    attempted: int
    committed: Tensor


class Values(Tabulated):
    """All values of a run."""

    def __init__(self, values: Mapping[str, Value], device: torch.device) -> None:
        """Places them; step 0 must have a value."""
        self.names = list(values)
        super().__init__(list(values.values()), device)
        self.now = [torch.zeros((), device=device) for _ in values]
        for value, now in zip(values.values(), self.now, strict=True):
            value.value = now
        self.counts: Counts | None = None
        self._write(torch.zeros((), dtype=torch.int64, device=device))

    def follow(self, counts: Counts) -> None:
        """Whose committed steps they go by: those of the step, or of the iteration around several."""
        self.counts = counts

    def look_ahead(self) -> None:
        """Have the next step's at hand."""
        if self.counts is not None:
            self.cover(self.counts.attempted, self.counts.committed)

    def refresh(self) -> None:
        """Those of the step to come; also before validation and samples, which see what training saw last."""
        if self.counts is not None:
            self.look_ahead()
            self._write(self.counts.committed)

    @torch.no_grad()
    def _write(self, committed: Tensor) -> None:
        if self.now:
            torch._foreach_copy_(self.now, list(self.at(committed).unbind()))

    def ended(self, step: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"one of the values {', '.join(self.names)} has none for step {step}",
            why=f"{type(error).__name__}: {error}",
            fix="let each be a finite number for every step of the training, as in max(0, 1 - step / total)",
        )


def set_to_(values: Mapping[str, Value], step: int, device: torch.device) -> None:
    """Outside of training: the values that a model of so many committed steps was trained with last."""
    for value in values.values():
        value.value = torch.tensor(value(step), dtype=torch.float32, device=device)
