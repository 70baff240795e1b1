"""An hs.Step inside a host that counts, schedules, logs and saves by itself.

Learning rates are a table on the device, indexed by committed steps. The host's scheduler is replaced by one that
ignores `step()`, and catches up with the committed steps where it is read or saved.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.fast.fast_path import CAPTURES
from halfstep.integrations.guard import FollowedScheduler, HostAdvice, HostSteps
from halfstep.own_loop.schedule_argument import per_step
from halfstep.own_loop.step import Step
from halfstep.step.facts import Facts
from halfstep.step.step import LossFn


def find_obstacle(device: torch.device, num_ranks: int) -> str:
    """Return why no step can be captured here; empty if nothing is known to prevent it."""
    if device.type not in CAPTURES:
        return f"a CUDA graph needs a CUDA device, not {device}"
    return "several ranks train together, and their reductions are not captured" if num_ranks > 1 else ""


def detach_copy(value: Any) -> Any:
    """Return a copy of a tensor that leaves the step; other values as they are."""
    return value.detach().clone() if isinstance(value, Tensor) else value


class CapturedLoop(HostSteps):
    """Make the steps of a host's loop as an hs.Step, and keep optimizer and scheduler presentable to the host."""

    def __init__(
        self,
        host: str,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        advice: HostAdvice,
        *,
        limits: Iterable[str] = (),
        max_consecutive: int | None = None,
        **options: Any,  # of hs.Step
    ) -> None:
        super().__init__(host, optimizer, limits)
        if max_consecutive is not None:
            options["guard"] = {"max_consecutive": max_consecutive}
        self.scheduler: Any = scheduler  # for the host; None if it has none that follows steps
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            self.scheduler = FollowedScheduler(scheduler, optimizer, lambda: self.committed)
            self._schedulers.append(self.scheduler)
            # A copy that drives the optimizer inside the host's wrapper; the host's own is stepped later.
            options["schedule"] = per_step(copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer}))
        self.step = Step(model, optimizer, **options)
        self._step, self._warnings, self.step._guard.advice = self.step._step, self.step._dropped, advice
        if self.step._recorder is not None:
            self.step._recorder.replay = advice.replay
        self._undo.append(optimizer.register_state_dict_post_hook(self._store_plain_rates).remove)
        self._mark(optimizer)

    def __call__(self, loss_fn: LossFn, window: Sequence[Any]) -> Facts:
        """Make one step. The tensors of the facts may be a graph's: the next step writes into them."""
        facts = self.step(loss_fn, window)._facts
        assert isinstance(facts, Facts)
        self.last_facts = facts
        return facts

    def _judge_rest(self) -> None:
        self.step.finish()

    def _describe(self) -> str:
        followed = f"{type(self.scheduler.inner).__name__}: exact without a wait" if self._schedulers else ""
        schedule = f"; schedule {followed or type(self.scheduler).__name__ + ': by the host'}" if self.scheduler else ""
        return (
            f"runs the steps of {self.host} as an hs.Step ({self.step.plan.granted}): forward, backward, clipping, "
            f"optimizer; loss, gradients and buffers are checked{schedule}"
        )
