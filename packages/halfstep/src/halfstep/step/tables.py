"""Functions of the committed step as tables on the device: learning rates, and values that forward and loss read.

The device reads `table[committed]`, so a skipped step moves nothing and the host is not asked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError, summarise_error
from halfstep.step.schedule import Schedule

# Steps in a new table: 16 KB per row. It doubles when training runs past its end, and then a captured step has to be
# captured again. On a CPU nothing is captured, so the first step need not wait for thousands of values.
TABLE_CHUNK, CPU_CHUNK = 4096, 256


class Tabulated:
    """A table with one row per function. A grown table is a new tensor, which no captured graph reads."""

    def __init__(
        self,
        functions: Sequence[Callable[[int], float]],
        device: torch.device,
        *,
        chunk: int | None = None,
        dtype: torch.dtype = torch.float32,
        base: Tensor | None = None,
    ) -> None:
        """Call users' functions at most `chunk` steps ahead: they may be slow, or end with the training. `base` has
        one number for each, which its values are multiplied by."""
        self.functions, self.chunk = list(functions), chunk
        self.table = torch.empty((len(self.functions), 0), dtype=dtype, device=device)
        self.base = torch.ones(len(self.functions), dtype=dtype) if base is None else base
        self._num_filled = 0
        self.end: ConfigError | None = None
        """The error for steps after the table's last column; None while the functions have not ended."""
        self.cover(0, torch.zeros((), dtype=torch.int64))

    def cover(self, attempted: int, committed: Tensor) -> None:
        """Make the table long enough. Committed steps are at most `attempted`, which the host knows; it waits for
        `committed` only past the end of a function."""
        if attempted >= self._num_filled and self.end is None:
            self._extend(self._num_filled, attempted)
        if attempted >= self._num_filled and self.end is not None and int(committed) >= self._num_filled:
            raise self.end

    def look_up(self, committed: Tensor) -> Tensor:
        return self.table.index_select(1, committed.view(1)).view(-1)

    def check(self, value: Any) -> float:
        """Return a function's value, or raise `Unusable`."""
        return check_finite(value)

    def explain_end(self, step: int, error: Exception) -> ConfigError:
        """Return the error for a step that a function has no value for."""
        raise NotImplementedError

    def _extend(self, known: int, attempted: int) -> None:
        shortest = CPU_CHUNK if self.table.device.type == "cpu" else TABLE_CHUNK
        num_ahead = self.chunk or max(known, shortest)  # without a chunk the table doubles
        columns = self._compute_columns(range(known, attempted + num_ahead))
        if not columns:
            return
        more = (torch.tensor(columns, dtype=self.table.dtype) * self.base).T.contiguous()
        if self.table.is_cuda:
            more = more.pin_memory()
        more = more.to(self.table.device, non_blocking=True)
        self._num_filled = known + more.shape[1]
        if self._num_filled > self.table.shape[1]:
            # Short pieces get free columns for the next ones: a new table would have to be captured again.
            num_free = 0 if self.chunk is None else max(TABLE_CHUNK, self._num_filled)
            spare = more.new_full((len(more), num_free), math.nan)
            self.table = torch.cat([self.table[:, :known], more, spare], dim=1)
        else:
            self.table[:, known : self._num_filled] = more

    def _compute_columns(self, steps: range) -> list[list[float]]:
        """Return the values of all functions for each step, up to the first step that one has no value for.

        A function may end, as a list, torch's OneCycleLR or a formula for the steps of the training do. Looking ahead
        past its end is no error: `end` is kept for the training that reaches it.
        """
        columns: list[list[float]] = []
        for step in steps:
            try:
                columns.append([self.check(function(step)) for function in self.functions])
            except Exception as error:  # whatever a user's function may raise
                self.end = self.explain_end(step, error)
                break
        return columns


class Unusable(ValueError):
    """A function gave a number that no step can use."""


def check_finite(value: Any) -> float:
    if isinstance(value, complex) or not math.isfinite(value):
        raise Unusable(f"it gives {value}")
    return float(value)


# --- values that change with the steps ---
# Tensors that forward and loss read, such as a temperature or a loss weight. They are refreshed from the committed
# counter at the start of each step, inside the captured graph too, so that compiling or capturing freezes nothing.


class Value(Protocol):
    """A function of the step, and the tensor that holds its current value (workloads.base.workload.Scheduled)."""

    value: Tensor

    def __call__(self, step: int) -> float: ...


class Counts(Protocol):
    attempted: int
    committed: Tensor


class Values(Tabulated):
    def __init__(self, values: Mapping[str, Value], device: torch.device) -> None:
        """Place the values on the device; step 0 must have a value."""
        self.names = list(values)
        super().__init__(list(values.values()), device)
        self.now = [torch.zeros((), device=device) for _ in values]
        for value, now in zip(values.values(), self.now, strict=True):
            value.value = now
        self.counts: Counts | None = None
        self._write(torch.zeros((), dtype=torch.int64, device=device))

    def follow(self, counts: Counts) -> None:
        """Follow the committed steps of a step, or of the iteration around several phases."""
        self.counts = counts

    def look_ahead(self) -> None:
        if self.counts is not None:
            self.cover(self.counts.attempted, self.counts.committed)

    def refresh(self) -> None:
        """Write the values of the next step. Also called before validation and sampling."""
        if self.counts is not None:
            self.look_ahead()
            self._write(self.counts.committed)

    @torch.no_grad()
    def _write(self, committed: Tensor) -> None:
        if self.now:
            torch._foreach_copy_(self.now, list(self.look_up(committed).unbind()))

    def explain_end(self, step: int, error: Exception) -> ConfigError:
        return ConfigError(
            f"one of the schedules {', '.join(self.names)} has no value for step {step}",
            why=f"{type(error).__name__}: {error}",
            fix="let each return a finite number for every training step, as in max(0, 1 - step / total)",
        )


def write_values_(values: Mapping[str, Value], step: int, device: torch.device) -> None:
    """Write the values that a model of `step` committed steps was trained with last, for use outside of training."""
    for value in values.values():
        value.value = torch.tensor(value(step), dtype=torch.float32, device=device)


# --- learning rates ---


class Rates(Tabulated):
    """`table[committed] * factor` for every group, computed on the device without asking the host.

    Groups of optimizers that take tensor learning rates hold views of the vector; the others get a float when the
    host decides their commit anyway. `table` follows committed steps; `factor`, written by the host, is what does not:
    a cut after a rollback, a plateau, a schedule by epochs. The rows after those of the rates hold momenta, or first
    betas, of groups whose schedule cycles them.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedules: Sequence[Schedule],
        device: torch.device,
        *,
        base: Sequence[float] | None = None,
        chunk: int | None = None,
        dtype: torch.dtype = torch.float32,
        cycled: Sequence[Optimizer] = (),
    ) -> None:
        """Follow one schedule for all groups, or one per group; `base` replaces the groups' own rates as the
        multiplicand.

        Users' schedules are called at most `chunk` steps ahead: they may be slow, or end with the training. CUDA's
        fused kernels read fp32; elsewhere fp64 gives exactly the rates of a scheduler that is stepped by hand.
        """
        self.optimizers = list(optimizers)
        groups = self._list_groups()
        positions = [position for optimizer in cycled for position, _ in self._find_groups(optimizer)]
        self.momentum_rows = {position: len(groups) + row for row, position in enumerate(positions)}
        """The row of each group whose momentum is cycled, by the group's position."""
        assert len(schedules) - len(positions) in (1, len(groups))
        each = list(schedules) * (len(groups) if len(schedules) == 1 else 1)
        rows = torch.tensor(base or [read_base_rate(group) for group in groups], dtype=dtype)
        super().__init__(each, device, chunk=chunk, dtype=dtype, base=rows)
        self.cut = 1.0
        self.by_host: list[float | None] = [None] * len(rows)
        self.factor = self.table.new_ones(len(rows))
        self.now = self.table.new_tensor([*(float(g["lr"]) for g in groups), *[0.0] * len(positions)])
        self.views = [self.now[row] for row in range(len(rows))]
        self.held: list[Any] = [group["lr"] for group in groups]
        """What each group's `lr` holds unless the user's code wrote there."""
        self.version = self.now._version

    def check(self, value: Any) -> float:
        return check_rate(value)

    def explain_end(self, step: int, error: Exception) -> ConfigError:
        return explain_no_rate(f"step {step}", error, "total_steps=number of optimizer steps")

    def refresh(self, committed: Tensor) -> None:
        """Write the rates of the step after `committed` steps into the vector that the groups refer to."""
        torch.mul(self.look_up(committed), self.factor, out=self.now)
        self.version = self.now._version

    def set_cut(self, cut: float) -> None:
        """Multiply every rate by one factor, after a rollback or on a plateau of a run."""
        self.cut = cut
        self._write_factors()

    def set_by_host(self, rates: Sequence[float | None]) -> None:
        """Set the rates, and then the momenta, of groups whose schedule does not follow steps; None for the others."""
        self.by_host = list(rates)
        self._write_factors()

    def _write_factors(self) -> None:
        factors = [1.0 if own is None else own for own in self.by_host]
        factors[: len(self.held)] = [self.cut * own for own in factors[: len(self.held)]]
        self.factor.copy_(torch.tensor(factors, dtype=self.factor.dtype))

    def show_by_host(self) -> None:
        """Let groups whose rate the host decides hold it at once, not only from the next step on; waits for nothing."""
        for position, (group, own) in enumerate(zip(self._list_groups(), self.by_host, strict=False)):
            if own is None:
                continue
            self.views[position].copy_(self.factor[position])
            if not isinstance(self.held[position], Tensor):
                group["lr"] = self.held[position] = float(torch.tensor(self.cut * own, dtype=self.now.dtype))
        self.version = self.now._version

    def drives(self, optimizer: Optimizer) -> bool:
        return any(optimizer is own for own in self.optimizers)

    def find_first(self, optimizer: Optimizer) -> Tensor:
        return self.now[self._find_groups(optimizer)[0][0]]

    def bind(self, optimizer: Optimizer, *, betas: bool = False) -> None:
        """Let an optimizer that takes tensor learning rates read them from the vector; its first betas as well."""
        for position, group in self._find_groups(optimizer):
            group["lr"] = self.held[position] = self.views[position]
            if betas:
                group["betas"] = (self.views[self.momentum_rows[position]], *group["betas"][1:])

    def write_floats(self, optimizer: Optimizer) -> None:
        """Give an optimizer plain numbers; waits for the device."""
        now = self.now.tolist()
        for position, group in self._find_groups(optimizer):
            group["lr"] = self.held[position] = now[position]

    def write_momenta(self, optimizer: Optimizer) -> None:
        """Give an optimizer its momenta, or first betas, as plain numbers; waits for the device."""
        now = self.now.tolist()
        for position, group in self._find_groups(optimizer):
            momentum = now[self.momentum_rows[position]]
            if "betas" in group:
                group["betas"] = (momentum, *group["betas"][1:])
            else:
                group["momentum"] = momentum

    def cycles(self, optimizer: Optimizer) -> bool:
        """True if the schedule of this optimizer changes its momentum, too."""
        return bool(self.momentum_rows) and self._find_groups(optimizer)[0][0] in self.momentum_rows

    def refuse_written_rates(self) -> None:
        """Refuse a rate that the user's code wrote: it would be lost, or used but not reported. No wait."""
        pairs = [(group["lr"], held) for group, held in zip(self._list_groups(), self.held, strict=False)]
        are_held = all(lr is held or not isinstance(held, Tensor) and lr == held for lr, held in pairs)
        if self.now._version != self.version or not are_held:
            raise ConfigError(
                "the learning rate was written by hand while schedule= drives it",
                why="the step would train with one rate and report another",
                fix="leave the learning rate to schedule=, or leave schedule= out",
            )

    def _find_groups(self, optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
        """Return an optimizer's groups with their positions among those of all. By position: load_state_dict makes
        new dicts."""
        pairs = ((own, group) for own in self.optimizers for group in own.param_groups)
        return [(position, group) for position, (own, group) in enumerate(pairs) if own is optimizer]

    def _list_groups(self) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    def refuse_new_groups(self) -> None:
        if len(self.held) != len(self._list_groups()):
            raise ConfigError(
                "a parameter group was added after creating the step", why="it has no schedule", fix="create a new Step"
            )

    def find_groups_again(self) -> None:
        """Take over the rates of new group dicts, which optimizers hold after `load_state_dict`."""
        self.held = [group["lr"] for group in self._list_groups()]
        # The vector as well: a state that is stored again before the next step has the rates that were loaded.
        self.now[: len(self.held)] = self.now.new_tensor([float(lr) for lr in self.held])
        self.version = self.now._version

    def fill_again(self) -> None:
        """Ask the schedules again before the next step, because one of them was moved to another position."""
        self._num_filled, self.end = 0, None


def read_base_rate(group: Mapping[str, Any]) -> float:
    """Return a group's base rate: once scheduled, `lr` holds the current rate and `initial_lr` the base."""
    return float(group.get("initial_lr", group["lr"]))


def check_rate(value: Any) -> float:
    """Return a learning rate; refuse one below 0, as past the end of a linear decay, which would ascend the loss."""
    if (found := check_finite(value)) < 0:
        raise Unusable(f"it gives {value}")
    return found


def explain_no_rate(when: str, error: Exception, length: str) -> ConfigError:
    """Return the error for a schedule that ended or returned no usable number."""
    why = f"{error}, not a finite number of at least 0" if isinstance(error, Unusable) else summarise_error(error)
    return ConfigError(
        f"the schedule has no learning rate for {when}: {why}",
        why="it ended, divides by 0, or is a formula past its end",
        fix=f"use a function of one argument, the count, or a scheduler as long as the training, for example {length}; "
        "clamp a formula, as in max(0, 1 - step / total)",
    )
