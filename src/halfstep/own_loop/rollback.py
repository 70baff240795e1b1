"""Go back to an earlier state when a user's loop meets several bad steps in a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from halfstep.own_loop.warnings import warn_user
from halfstep.step.guard import Guard, Verdict
from halfstep.step.places import Name, Place
from halfstep.step.snapshots import Snapshots, copy_to_host
from halfstep.step.step import Step


class Rollback:
    def __init__(self, model: nn.Module, step: Step, guard: Guard) -> None:
        self.model, self.step, self.guard = model, step, guard
        self.snapshots = Snapshots(every=guard.options.snapshot_every, margin=guard.options.margin)

    def keep(self) -> None:
        """Take a copy where one is due: before the first step, then every `snapshot_every` steps."""
        if not self.snapshots.states or self.snapshots.due(self.step.attempted):
            self.snapshots.take(self.model, self.step)
            beside = {place.name: place.held for place in self._beside()}
            self.snapshots.states[-1].setdefault("beside", copy_to_host(beside))

    def _beside(self) -> list[Place]:
        return self.step.writes.beside_the_model(self.step.trained_parameters())

    @torch.no_grad()
    def _put_beside(self, values: Mapping[Name, Tensor | None]) -> None:
        for place in self._beside():
            held, then = place.held, values.get(place.name)
            if held is not None and then is not None:
                if held.shape == then.shape:
                    held.copy_(then)
                else:  # a recurrent state of another batch size
                    place.owner[place.key] = then.to(held.device, copy=True)

    def forget(self) -> None:
        """After a state was loaded: the copies are of another past."""
        self.snapshots.states.clear()

    def to_before(self, verdict: Verdict) -> bool:
        """Go back to well before the first fault and cut the learning rate; False where no copy is old enough."""
        state = self.snapshots.before(verdict.first_fault_committed)
        if state is None:
            return False
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.step.optimizers]
        self.snapshots.go_back(state, self.model, self.step)
        self._put_beside(state["beside"])
        self.guard.rolled_back()
        self._cut(rates)
        warn_user(
            f"rolled back to committed step {state['step']['committed']} ({verdict.reason}); learning rate now "
            f"x{self.guard.rate_factor:g}"
        )
        return True

    def _cut(self, rates: list[list[float]]) -> None:
        """By the schedule's factor; where the learning rate is the user's own, in the groups themselves."""
        if self.step.rates is not None:
            self.step.set_rate_factor(self.guard.rate_factor)
        for optimizer, before in zip(self.step.optimizers, rates, strict=True):
            if self.step.rates is None or not self.step.rates.drives(optimizer):
                for group, lr in zip(optimizer.param_groups, before, strict=True):
                    group["lr"] = lr * self.guard.options.lr_cut
