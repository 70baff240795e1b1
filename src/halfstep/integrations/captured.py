"""An hs.Step inside a host that counts, schedules, logs and saves by itself.

Learning rates are a table on the device, indexed by committed steps. The host's scheduler is replaced by one that
ignores `step()`, and catches up with the committed steps where it is read or saved.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.integrations.guard import GUARDED, refuse_second_guard
from halfstep.own_loop.fast import Fast, say
from halfstep.own_loop.schedule_argument import per_step
from halfstep.own_loop.step import Step
from halfstep.step.facts import Facts
from halfstep.step.step import LossFn


class CapturedLoop:
    """Make the steps of a host's loop as an hs.Step, and keep optimizer and scheduler presentable to the host."""

    def __init__(
        self,
        host: str,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        *,
        precision: str,
        fast: Fast = "auto",
        clip_norm: float = 0.0,
        accumulate: int = 1,
        num_steps: int | None = None,
        capsules: str | os.PathLike[str] | None = None,
        max_consecutive: int = 5,
        limits: Sequence[str] = (),
        **options: Any,
    ) -> None:
        refuse_second_guard(optimizer)
        self.host, self.optimizer, self.limits = host, optimizer, list(limits)
        self.inner = scheduler  # None if the host has none that follows steps
        self.scheduler: Any = scheduler
        schedule = None
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            # A copy that drives the optimizer inside the host's wrapper; the host's own is stepped later.
            twin = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
            schedule = per_step(twin)
        plain = [float(group["lr"]) for group in optimizer.param_groups]
        self.step = Step(
            model, optimizer, precision, fast=fast, clip_norm=clip_norm, accumulate=accumulate, schedule=schedule,
            num_steps=num_steps, capsules=capsules, guard={"max_consecutive": max_consecutive}, **options,
        )  # fmt: skip
        if schedule is not None:
            self.scheduler = SettledScheduler(scheduler, self.step, plain)
        self._hook: Any = optimizer.register_state_dict_post_hook(self._store_plain_rates)
        setattr(optimizer, GUARDED, self)

    def __call__(self, loss_fn: LossFn, window: Sequence[Any]) -> Facts:
        """Make one step. The tensors of the facts may be a graph's: the next step writes into them."""
        facts = self.step(loss_fn, window)._facts
        assert isinstance(facts, Facts)
        return facts

    def settle(self) -> None:
        """Bring the host's scheduler up to date; waits for the device."""
        if isinstance(self.scheduler, SettledScheduler):
            self.scheduler.settle()

    def finish(self) -> None:
        self.settle()
        self.step.finish()

    def close(self) -> None:
        """Give optimizer and scheduler back to the host."""
        self.settle()
        self._hook.remove()
        if isinstance(self.scheduler, SettledScheduler):
            self.scheduler.write_plain_rates(self.optimizer.param_groups)
        if hasattr(self.optimizer, GUARDED):
            delattr(self.optimizer, GUARDED)

    def announce(self) -> None:
        say(str(self))

    def __str__(self) -> str:
        name = type(self.inner).__name__
        followed = self.scheduler is not self.inner
        schedule = f"; schedule {name}: {'exact without a wait' if followed else 'of the host'}" if self.inner else ""
        limits = f"; not guarded: {'; '.join(self.limits)}" if self.limits else ""
        return (
            f"makes the steps of {self.host} as an hs.Step ({self.step.plan.granted}): forward, backward, clipping, "
            f"optimizer; loss, gradients and buffers are judged{schedule}{limits}"
        )

    def _store_plain_rates(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self.settle()
        if isinstance(self.scheduler, SettledScheduler):
            self.scheduler.write_plain_rates(state["param_groups"])


class SettledScheduler:
    """Take the place of a host's scheduler while an hs.Step follows a copy of it by committed steps."""

    def __init__(self, inner: LRScheduler, step: Step, plain: list[float]) -> None:
        self.inner, self._step, self._plain = inner, step, plain
        self._num_settled = 0

    def step(self) -> None:
        """Do nothing: the device has moved on, if the step was good."""

    def settle(self) -> None:
        groups = self.inner.optimizer.param_groups
        held = [group["lr"] for group in groups]
        self.write_plain_rates(groups)
        num_due = self._step.committed - self._num_settled
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks for optimizer.step() first, which the step has replaced
            for _ in range(num_due):
                self.inner.step()
        self._num_settled += num_due
        self._plain = [float(group["lr"]) for group in groups]
        for group, lr in zip(groups, held, strict=True):
            group["lr"] = lr

    def write_plain_rates(self, groups: list[dict[str, Any]]) -> None:
        for group, rate in zip(groups, self._plain, strict=False):
            group["lr"] = rate

    def get_last_lr(self) -> list[Any]:
        self.settle()
        return self.inner.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return self.inner.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_step"):  # while it is copied, before it has attributes
            raise AttributeError(name)
        return getattr(self.inner, name)
