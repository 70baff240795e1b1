"""A drop-in for timm's NativeScaler that drops bad steps. docs/integrations/timm.md is its guide.

    loss_scaler = hs.integrations.timm.HalfstepScaler(model, optimizer, "bf16")     after DDP and compile
    loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

timm's train.py calls a scaler only in fp16; give it this one in every precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError
from halfstep.integrations.guard import HostAdvice, HostGuard, HostOptions, list_models
from halfstep.own_loop.arguments import check_choice

ADVICE = HostAdvice(overflow="--amp-dtype bfloat16", clip="--clip-grad 1.0", step="loss_scaler(loss, optimizer, ...)")


class HalfstepScaler:
    """Scale, call backward, clip, and step or drop: called like timm's NativeScaler.

    Arguments:
        model: what your loop calls, after DistributedDataParallel and torch.compile.
        optimizer: the one that your loop passes in every call.
        precision: what your autocast computes in: "fp16" (with a loss scale), "bf16" or "fp32".
        options: capsules, max_consecutive, also, as in halfstep.integrations.guard.HostGuard.
    """

    state_dict_key = "amp_scaler"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        precision: Literal["fp16", "bf16", "fp32"] = "bf16",
        **options: Unpack[HostOptions],
    ) -> None:
        check_choice("precision", precision, ("fp16", "bf16", "fp32"))
        use = "loss_scaler = HalfstepScaler(model, optimizer, 'bf16')"
        models = list_models("HalfstepScaler", model, optimizer, use)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        self._scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        limits = ["lr_scheduler.step_update and model_ema, unless you pass them to loss_scaler.follow(...)"]
        self.guard = HostGuard(
            "timm", models, optimizer, ADVICE, precision=precision, scaler=self._scaler, limits=limits, **options
        )
        self.guard.announce()

    def __call__(
        self,
        loss: Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        if optimizer is not self.guard.optimizer:
            raise ConfigError(
                f"this {type(optimizer).__name__} is not the optimizer that HalfstepScaler was given",
                fix="create one HalfstepScaler(model, optimizer) for each optimizer",
            )
        self.guard.record(loss)  # train.py has divided it by the number of accumulated batches
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            from timm.utils.clip_grad import dispatch_clip_grad

            assert parameters is not None
            self._scaler.unscale_(optimizer)
            if clip_mode == "value":
                self.guard.look_at_gradients()
            dispatch_clip_grad(parameters, clip_grad, mode=clip_mode)
        self.guard.step()

    def follow(self, owner: Any) -> Any:
        """Return timm's scheduler or ModelEma, which a dropped step then does not advance. A schedule by updates
        waits for the device once per step; one by epochs is returned unchanged."""
        if hasattr(owner, "step_update"):
            return _FollowedSchedule(owner, self.guard)
        if isinstance(owner, nn.Module) and hasattr(owner, "update"):
            self.guard.guard_average(owner, "update", owner)
            return owner
        raise ConfigError(
            f"follow takes a scheduler or a ModelEma of timm, not {type(owner).__name__}",
            fix="lr_scheduler = loss_scaler.follow(lr_scheduler)",
        )

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._scaler.is_enabled() and state:
            self._scaler.load_state_dict(dict(state))


class _FollowedSchedule:
    """A timm scheduler that counts good updates only."""

    def __init__(self, inner: Any, guard: HostGuard) -> None:
        self.inner, self._guard = inner, guard

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.inner.t_in_epochs:
            num_updates -= self._guard.num_dropped
        self.inner.step_update(num_updates=num_updates, metric=metric)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is copied
            raise AttributeError(name)
        return getattr(self.inner, name)
