"""A user's `loss_fn` as the step calls it: checked each time, looked at closely the first time.

The close look finds what a loop of torch's AMP may have left in it. It costs a walk through autograd's graph, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.precision.contexts import AUTOCAST_DTYPES
from halfstep.run.own_window import half_dtypes_in, is_scaled_by_hand, loss_and_weight
from halfstep.run.user_line import warn_user
from halfstep.step.batches import Batch
from halfstep.step.step import LossFn, Step, Weight


class OwnLoss:
    """Wraps `loss_fn`, and takes the gradients that a loss is made of."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.known: set[object] = set()
        """Loss functions that were looked at; of a lambda written in the loop, its code."""
        self.overflow: Tensor | None = None
        """Whether a gradient taken inside the loss function was not finite."""

    def checked(self, loss_fn: LossFn, *, is_alone: bool) -> LossFn:
        if not torch.is_grad_enabled():
            raise ConfigError(
                "the step was called inside torch.no_grad() or inference_mode()",
                why="there is no gradient to train on",
                fix="call it outside; evaluation needs no step",
            )
        kind = _kind(loss_fn)
        if not self.known and torch.is_autocast_enabled(self.step.device.type):
            warn_user(
                "the step was called inside torch.autocast: it enters autocast by itself, and backward and optimizer "
                "belong outside; take yours away"
            )

        def loss_of(batch: Batch) -> tuple[Tensor, Weight]:
            self.overflow = None
            loss, weight = loss_and_weight(loss_fn(batch), batch, is_alone=is_alone)
            if kind not in self.known:
                self._look_closely(loss, weight)
                self.known.add(kind)
            if self.overflow is not None:
                loss = torch.where(self.overflow, torch.full_like(loss, float("nan")), loss)
            return loss, weight

        return loss_of

    def is_new(self, loss_fn: LossFn) -> bool:
        """Whether it has not been looked at."""
        return _kind(loss_fn) not in self.known

    def grad(self, outputs: Tensor, inputs: Tensor | Sequence[Tensor]) -> Any:
        scaler, wanted = self.step.scaler, [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if not outputs.requires_grad or not all(one.requires_grad for one in wanted):
            raise ConfigError(
                "step.grad needs outputs and inputs that are tracked by autograd",
                fix="x = x.clone().requires_grad_(), then step.grad(model(x), x)",
            )
        with torch.autocast(self.step.device.type, enabled=False):
            scaled = scaler.scale(outputs.float().sum())
            gradients = torch.autograd.grad(scaled, wanted, create_graph=True)
            unscale = scaler.value.clone().reciprocal()
            found = tuple(gradient.float() * unscale if scaler.enabled else gradient for gradient in gradients)
        for gradient in found:
            overflow = ~gradient.detach().isfinite().all()
            self.overflow = overflow if self.overflow is None else self.overflow | overflow
        return found[0] if isinstance(inputs, Tensor) else found

    def _look_closely(self, loss: Tensor, weight: Weight) -> None:
        groups = (group for optimizer in self.step.optimizers for group in optimizer.param_groups)
        if any(p.grad is not None for group in groups for p in group["params"]):
            raise ConfigError(
                "loss_fn called backward() itself",
                why="the step takes the gradient of what loss_fn returns, and would count it twice",
                fix="return the loss; leave backward(), zero_grad() and optimizer.step() out",
            )
        if is_scaled_by_hand(loss):
            warn_user("the loss is multiplied by a large power of two, as GradScaler.scale does: the step scales by "
                       "itself; return the plain loss")  # fmt: skip
        if isinstance(weight, Tensor) and weight.is_floating_point() and not float(weight) >= 1:
            warn_user(f"loss_fn gave (loss, {float(weight):g}): the second value weighs the batch in its window. If "
                       "it is an accuracy, return the loss alone")  # fmt: skip
        strange = half_dtypes_in(loss) - self._half_dtypes_of_plan()
        if strange:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in strange))
            warn_user(f"loss_fn computes in {names}, while the plan says {self.step.plan.granted}: an autocast of "
                       "your own, or a cast, is in force; leave it to precision= and modules=")  # fmt: skip

    def _half_dtypes_of_plan(self) -> set[torch.dtype | None]:
        plan = self.step.plan
        computed = {plan.compute, *(row.compute for row in plan.rows), *(row.precision for row in plan.rows)}
        stored = {p.dtype for p in self.step.model.parameters()}
        if any(isinstance(module, torch.nn.RNNBase) for module in self.step.model.modules()):
            stored.add(torch.float16)  # autocast's choice for recurrent layers; the plan has warned
        return {AUTOCAST_DTYPES.get(name.removesuffix("-true")) for name in computed} | stored


def _kind(loss_fn: LossFn) -> object:
    return getattr(loss_fn, "__code__", type(loss_fn))
