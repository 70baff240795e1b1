"""Functions of the step as one table on the device, read by the committed counter without asking the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.errors import ConfigError

# The table starts with so many steps, 16 KB a row, and doubles when a run outlives it: then a captured step is captured
# again. On a CPU nothing is, and the first step need not wait for the values of thousands.
TABLE_CHUNK, CPU_CHUNK = 4096, 256


class Tabulated:
    """One row a function. A table that grows is a new tensor: no captured graph knows it."""

    def __init__(
        self,
        functions: Sequence[Callable[[int], float]],
        device: torch.device,
        *,
        chunk: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Foreign functions are asked for at most `chunk` steps ahead: they may be slow, or end with the training."""
        self.functions, self.chunk = list(functions), chunk
        self.table = torch.empty((len(self.functions), 0), dtype=dtype, device=device)
        self.end: ConfigError | None = None
        """Why there is nothing after the table's last column; None while there may be."""
        self.cover(0, torch.zeros((), dtype=torch.int64))

    def cover(self, attempted: int, committed: Tensor) -> None:
        """Make the table long enough. The host knows `attempted`, and committed is never more than that; only past the
        end of a function it has to ask how many steps were committed."""
        known = self.table.shape[1]
        if attempted >= known and self.end is None:
            self._extend(known, attempted)
            known = self.table.shape[1]
        if attempted >= known and self.end is not None and int(committed) >= known:
            raise self.end

    def at(self, committed: Tensor) -> Tensor:
        return self.table.index_select(1, committed.view(1)).view(-1)

    def checked(self, value: Any) -> float:
        """A function's value, or `Unusable`."""
        return finite(value)

    def ended(self, step: int, error: Exception) -> ConfigError:
        """What to say where a function has no value for a step."""
        raise NotImplementedError

    def _extend(self, known: int, attempted: int) -> None:
        columns = self._columns(known, attempted)
        if not columns:
            return
        more = torch.tensor(columns, dtype=self.table.dtype).T.contiguous()
        if self.table.is_cuda:
            more = more.pin_memory()
        self.table = torch.cat([self.table, more.to(self.table.device, non_blocking=True)], dim=1)

    def _columns(self, known: int, attempted: int) -> list[list[float]]:
        """The values of the next steps. A function may end (a list, torch's OneCycleLR, a formula that holds for the
        steps of the training only): running into its end is an error, looking ahead over it is not."""
        columns: list[list[float]] = []
        first = CPU_CHUNK if self.table.device.type == "cpu" else TABLE_CHUNK
        for step in range(known, attempted + (self.chunk or max(known, first))):
            try:
                columns.append([self.checked(function(step)) for function in self.functions])
            except Exception as error:  # whatever a user's function may raise
                self.end = self.ended(step, error)
                break
        return columns


class Unusable(ValueError):
    """A function gave a number that no step can use."""


def finite(value: Any) -> float:
    if isinstance(value, complex) or not math.isfinite(value):
        raise Unusable(f"it gives {value}")
    return float(value)


# --- values that change with the steps ---
# A temperature, a weight in the loss: tensors that forward and loss read. They are refreshed at the start of each step
# from the number of committed steps, inside the captured graph too, so that nothing is frozen by compiling or
# capturing, and a resumed run goes on with them.


class Value(Protocol):
    """workloads.base.scheduled.Scheduled: a function of the step, and where its value of now is read."""

    value: Tensor

    def __call__(self, step: int) -> float: ...


class Counts(Protocol):
    attempted: int
    committed: Tensor


class Values(Tabulated):
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
