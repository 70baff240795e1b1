"""The learning rates of all scheduled parameter groups as one device vector, refreshed from the committed counter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.step.schedule import Schedule
from halfstep.step.tabulated import Tabulated, Unusable, finite


class Rates(Tabulated):
    """`base * table[committed] * factor` for every group, computed on the device without asking the host.

    Groups of optimizers that take tensor learning rates hold views of the vector; the others get a float when the
    host decides their commit anyway. `table` follows committed steps; `factor`, written by the host, is what does not:
    a cut after a rollback, a plateau, a schedule by epochs.
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
    ) -> None:
        """One schedule for all groups, or one for each; `base` is what they multiply, else the groups' own rates.
        Foreign ones are asked for at most `chunk` steps ahead: they may be slow, or end with the training. CUDA's fused
        kernels read fp32; elsewhere fp64 gives the very rates of a scheduler that is stepped by hand."""
        self.optimizers = list(optimizers)
        self.groups = self._live_groups()
        if len(schedules) not in (1, len(self.groups)):
            raise ConfigError(
                f"{len(schedules)} schedules for {len(self.groups)} parameter groups",
                fix="give one schedule, or one for each group",
            )
        each = list(schedules) * (len(self.groups) if len(schedules) == 1 else 1)
        super().__init__(each, device, chunk=chunk, dtype=dtype)
        self.base = self.table.new_tensor(base or [base_rate(group) for group in self.groups])
        self.cut = 1.0
        self.by_host: list[float | None] = [None] * len(self.groups)
        self.factor = torch.ones_like(self.base)
        self.now = self.table.new_tensor([float(g["lr"]) for g in self.groups])
        self.views = [self.now[position] for position in range(len(self.groups))]
        self.held: list[Any] = [group["lr"] for group in self.groups]
        """What stands in each group's `lr` unless somebody else wrote there."""
        self.version = self.now._version

    def checked(self, value: Any) -> float:
        return rate(value)

    def ended(self, step: int, error: Exception) -> ConfigError:
        return no_rate(f"step {step}", error, "total_steps=number of optimizer steps")

    def refresh(self, committed: Tensor) -> None:
        """Put the rates of the step after `committed` steps into the vector that the groups look at."""
        torch.mul(self.base, self.at(committed), out=self.now)
        self.now.mul_(self.factor)
        self.version = self.now._version

    def set_cut(self, cut: float) -> None:
        """One factor on every rate: after a rollback, on a plateau of a run."""
        self.cut = cut
        self._write_factors()

    def set_by_host(self, rates: Sequence[float | None]) -> None:
        """What schedules that do not follow steps say of each group now; None for those that do."""
        self.by_host = list(rates)
        self._write_factors()

    def _write_factors(self) -> None:
        factors = [self.cut * (1.0 if own is None else own) for own in self.by_host]
        self.factor.copy_(torch.tensor(factors, dtype=self.factor.dtype))

    def show_by_host(self) -> None:
        """Let groups whose rate the host decides hold it at once, not only from the next step on; waits for nothing."""
        for position, (group, own) in enumerate(zip(self.groups, self.by_host, strict=True)):
            if own is None:
                continue
            self.views[position].copy_(self.factor[position])
            if not isinstance(self.held[position], Tensor):
                group["lr"] = self.held[position] = float(torch.tensor(self.cut * own, dtype=self.now.dtype))
        self.version = self.now._version

    def drives(self, optimizer: Optimizer) -> bool:
        return any(optimizer is own for own in self.optimizers)

    def first_of(self, optimizer: Optimizer) -> Tensor:
        return self.now[self._groups_of(optimizer)[0][0]]

    def bind(self, optimizer: Optimizer) -> None:
        """Let an optimizer that takes tensor learning rates read them from the vector."""
        for position, group in self._groups_of(optimizer):
            group["lr"] = self.held[position] = self.views[position]

    def write_floats(self, optimizer: Optimizer) -> None:
        """Give an optimizer plain numbers; waits for the device."""
        for position, group in self._groups_of(optimizer):
            group["lr"] = self.held[position] = float(self.now[position])

    def refuse_other_hands(self) -> None:
        """A rate that somebody else wrote would be lost, or used and never reported. Asks the host only."""
        written = self.now._version != self.version
        for group, held in zip(self._live_groups(), self.held, strict=False):
            lr = group["lr"]
            if lr is held or not isinstance(held, Tensor) and lr == held:
                continue
            written = True
        if written:
            raise ConfigError(
                "the learning rate was written by hand, or by optimizer.load_state_dict, while schedule= drives it",
                why="the step would train with one rate and report another",
                fix="leave the learning rate to schedule= (resume with step.load_state_dict), or leave schedule= out",
            )

    def _groups_of(self, optimizer: Optimizer) -> list[tuple[int, dict[str, Any]]]:
        own = {id(group) for group in optimizer.param_groups}
        return [(k, group) for k, group in enumerate(self.groups) if id(group) in own]

    def _live_groups(self) -> list[dict[str, Any]]:
        return list(itertools.chain.from_iterable(optimizer.param_groups for optimizer in self.optimizers))

    def refuse_new_groups(self) -> None:
        if len(self.groups) != len(self._live_groups()):
            raise ConfigError(
                "a parameter group was added after the step was made", why="it has no schedule", fix="make a new Step"
            )

    def refind(self) -> None:
        """After `load_state_dict` the optimizers hold new group dicts."""
        self.groups = self._live_groups()
        self.held = [group["lr"] for group in self.groups]
        # The vector as well: a state that is stored again before the next step has the rates that were loaded.
        self.now.copy_(self.now.new_tensor([float(lr) for lr in self.held]))
        self.version = self.now._version


def base_rate(group: Mapping[str, Any]) -> float:
    """A group that was already scheduled holds the rate of the moment in `lr`; its base is `initial_lr`."""
    return float(group.get("initial_lr", group["lr"]))


def rate(value: Any) -> float:
    """A learning rate; below 0, as past the end of a linear decay, training would climb."""
    if (found := finite(value)) < 0:
        raise Unusable(f"it gives {value}")
    return found


def no_rate(when: str, error: Exception, length: str) -> ConfigError:
    """What a schedule that ends, or gives no number, is answered."""
    if isinstance(error, Unusable):
        return ConfigError(
            f"the schedule has no learning rate for {when}: {error}",
            why="a learning rate is a finite number, and not below 0",
            fix="look for a division by 0, or a formula past its end: clamp its argument, as in "
            "max(0, 1 - step / total)",
        )
    fix = f"make it as long as the training, for example {length}"
    if isinstance(error, TypeError):
        fix = "give a function of one argument, the count, that returns a number"
    return ConfigError(
        f"the schedule has no learning rate for {when}",
        why=f"{type(error).__name__}: {error}",
        fix=fix,
    )
