"""Learning rates and settings of optimizers that a user's loop changes while graphs are captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.fast.windows import Key
from halfstep.step.step import GuardedStep

NOT_SETTINGS = ("params", "lr", "initial_lr", "param_names", "swa_lr", "capturable")
CYCLED = ("momentum", "betas")  # what a schedule may change at every step: graphs that hold it read a tensor


class HandRates:
    """Learning rates that the user's loop writes into `param_groups`, and the other settings of optimizers.

    A kernel keeps the number it was captured with. So the settings are part of a graph's key, and a graph is captured
    for each; but once the learning rate has changed, graphs read it from a tensor, rounded to fp32."""

    def __init__(self, step: GuardedStep) -> None:
        self.step = step
        self.tensors: dict[int, Tensor] = {}
        self.written: dict[int, float] = {}
        self.start: list[object] | None = None
        self.names: dict[int, list[str]] = {}  # of the settings in a group, by their number
        self.have_changed = False

    def _list_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.step.optimizers for group in optimizer.param_groups]

    @property
    def key(self) -> Key:
        """Return everything about the optimizers that a graph has frozen."""
        settings: list[object] = []
        rates: list[object] = []
        for optimizer in self.step.optimizers:
            # A hook, or a replaced step(), is code that a replay would not run.
            settings += (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))
            settings.append(vars(optimizer).get("step"))
            is_cycled = self.step.rates is not None and self.step.rates.cycles(optimizer)
            for group in optimizer.param_groups:
                names = self.names.get(len(group))
                if names is None:
                    names = self.names[len(group)] = [name for name in group if name not in NOT_SETTINGS]
                settings += map(group.get, [name for name in names if name not in CYCLED] if is_cycled else names)
                rates.append(group.get("lr"))
        if self.start is None or len(self.start) != len(rates):  # at first, and after a group was added
            self.start = rates
        tensors = [id(rate) for rate in rates if isinstance(rate, Tensor)]
        if not self.have_changed and not tensors:
            self.have_changed = rates != self.start
        if self.have_changed:  # graphs read a number from a tensor of ours, but not what is in the user's tensor
            return (*settings, *tensors)
        return (*settings, *[id(rate) if isinstance(rate, Tensor) else rate for rate in rates])

    def write(self) -> None:
        """Copy numbers that have changed into the tensors that graphs read."""
        for number, group in enumerate(self._list_groups()):
            tensor, lr = self.tensors.get(number), group.get("lr")
            if tensor is not None and isinstance(lr, float | int) and self.written.get(number) != lr:
                tensor.fill_(lr)
                self.written[number] = lr

    @contextlib.contextmanager
    def as_tensors(self) -> Iterator[None]:
        """Let optimizers read changing learning rates from tensors inside."""
        groups = list(enumerate(self._list_groups()))
        before = {n: g["lr"] for n, g in groups if self.have_changed and isinstance(g.get("lr"), float | int)}
        for number in before.keys() - self.tensors.keys():
            self.tensors[number] = torch.zeros((), device=self.step.device)
            self.written.pop(number, None)
        self.write()
        for number, group in groups:
            if number in before:
                group["lr"] = self.tensors[number]
        try:
            yield
        finally:
            for number, group in groups:
                if number in before:
                    group["lr"] = before[number]
