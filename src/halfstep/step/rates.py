"""The learning rates of all parameter groups as one device vector, refreshed from the committed counter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.step.schedule import Schedule

TABLE_CHUNK = 4096
"""The table starts with so many steps, 16 KB a group, and doubles when a run outlives it."""


class Rates:
    """`base * table[committed] * factor` for every group, computed on the device without asking the host.

    Groups of optimizers that take tensor learning rates hold views of the vector; the others get a float when the
    host decides their commit anyway.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedules: Sequence[Schedule], device: torch.device) -> None:
        self.groups: list[dict[str, Any]] = [group for optimizer in optimizers for group in optimizer.param_groups]
        if len(schedules) not in (1, len(self.groups)):
            raise ConfigError(
                f"{len(schedules)} schedules for {len(self.groups)} parameter groups",
                fix="give one schedule, or one for each group",
            )
        self.schedules = list(schedules) * (len(self.groups) if len(schedules) == 1 else 1)
        # A group that was already scheduled holds the rate of the moment in `lr`; its base is `initial_lr`.
        self.base = torch.tensor([float(g.get("initial_lr", g["lr"])) for g in self.groups], device=device)
        self.factor = torch.ones((), device=device)
        self.now = self.base.clone()
        self.table = torch.empty((len(self.groups), 0), device=device)
        self.cover(0)

    def cover(self, attempted: int) -> None:
        """Make the table long enough. The host knows `attempted`, and committed is never more than that."""
        known = self.table.shape[1]
        if attempted < known:
            return
        columns = self._columns(known, attempted)
        more = torch.tensor(columns, dtype=torch.float32).T.contiguous()
        if self.table.is_cuda:
            more = more.pin_memory()
        self.table = torch.cat([self.table, more.to(self.table.device, non_blocking=True)], dim=1)

    def _columns(self, known: int, attempted: int) -> list[list[float]]:
        """The multipliers of the next steps. A schedule may end (a list, torch's OneCycleLR): only running into its
        end is an error, looking ahead over it is not."""
        columns: list[list[float]] = []
        for step in range(known, attempted + max(known, TABLE_CHUNK)):
            try:
                columns.append([schedule(step) for schedule in self.schedules])
            except (ValueError, IndexError) as error:
                if step <= attempted:
                    raise ConfigError(
                        f"the schedule has no learning rate for step {step}",
                        why=str(error),
                        fix="make it as long as the training, for example total_steps=number of optimizer steps",
                    ) from error
                break
        return columns

    def refresh(self, committed: Tensor) -> None:
        """Put the rates of the step after `committed` steps into the vector that the groups look at."""
        multipliers = self.table.index_select(1, committed.view(1)).view(-1)
        torch.mul(self.base, multipliers, out=self.now)
        self.now.mul_(self.factor)

    def bind(self, optimizer: Optimizer) -> None:
        """Let an optimizer that takes tensor learning rates read them from the vector."""
        for position, group in self._groups_of(optimizer):
            group["lr"] = self.now[position]

    def write_floats(self, optimizer: Optimizer) -> None:
        """Give an optimizer plain numbers; waits for the device."""
        for position, group in self._groups_of(optimizer):
            group["lr"] = float(self.now[position])

    def _groups_of(self, optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
        own = {id(group) for group in optimizer.param_groups}
        return [(k, group) for k, group in enumerate(self.groups) if id(group) in own]

    def knows_all(self, optimizers: Sequence[Optimizer]) -> bool:
        """False once somebody added a parameter group, for which there is no schedule."""
        return len(self.groups) == sum(len(optimizer.param_groups) for optimizer in optimizers)

    def refind(self, optimizers: Sequence[Optimizer]) -> None:
        """After `load_state_dict` the optimizers hold new group dicts."""
        self.groups = list(itertools.chain.from_iterable(optimizer.param_groups for optimizer in optimizers))
