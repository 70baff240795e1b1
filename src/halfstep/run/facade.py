"""`halfstep.Step`: the guarded step for people with a loop of their own, in about five changed lines.

import halfstep as hs
step = hs.Step(model, optimizer, precision="auto", clip_norm=1.0, accumulate=4)
for window in step.windows(loader):
    outcome = step(loss_fn, window)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.errors import ConfigError, ModelError, PrecisionError, TrainingStopped
from halfstep.hardware.probe import probe
from halfstep.precision.apply import STORAGE_DTYPES, apply
from halfstep.precision.decide import decide
from halfstep.precision.plan import ROOT, Plan
from halfstep.step.clip import Clip
from halfstep.step.commit import READS_FLAG_IN_KERNEL
from halfstep.step.ema import Ema
from halfstep.step.facts import Facts, Reading
from halfstep.step.guard import Action, Guard, GuardOptions
from halfstep.step.schedule import Schedule
from halfstep.step.spike import SpikeMeter
from halfstep.step.step import LossFn, OnGradients, Window
from halfstep.step.step import Step as GuardedStep
from halfstep.step.step_state import refuse_unfit
from halfstep.step.torch_schedulers import from_torch


class Outcome:
    """What became of one step. Every property waits for the device, so read it when you report, not every step."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._reading: Reading | None = None

    @property
    def reading(self) -> Reading:
        if self._reading is None:
            self._reading = self._facts.read()
        return self._reading

    @property
    def loss(self) -> float:
        return self.reading.loss

    @property
    def committed(self) -> bool:
        """Whether the weights moved."""
        return not self.reading.is_bad

    @property
    def reason(self) -> str:
        """Why they did not; empty if they did."""
        return self.reading.reason

    def __repr__(self) -> str:
        r = self.reading
        became = "committed" if self.committed else f"skipped: {r.reason}"
        return f"Outcome(step {r.attempted} {became}, loss {r.loss:.4g}, grad_norm {r.grad_norm:.4g}, lr {r.lr:.2e})"


class Step(GuardedStep):
    """A step that decides its precision, drops bad steps whole, and stops a run that only produces bad ones."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        precision: str = "auto",
        *,
        modules: Mapping[str, str] | None = None,
        strict: bool = False,
        simulate: bool = False,
        clip_norm: float = 0.0,
        clip_type: Literal["l2", "inf", "value"] = "l2",
        accumulate: int = 1,
        schedule: LRScheduler | Schedule | None = None,
        ema_decay: float = 0.0,
        guard: GuardOptions | None = None,
        skip_spikes: bool = False,
        also: Sequence[nn.Module | Tensor] = (),
        on_gradients: OnGradients | None = None,
    ) -> None:
        _refuse_other_kinds(model, optimizer)
        device = _device_of(model)
        if guard is not None and guard.on_fault == "rollback":
            raise ConfigError(
                "a step of its own cannot roll back", why="only a run keeps snapshots", fix="on_fault='stop'"
            )
        plan = decide(precision, probe(str(device)), model, modules=modules, strict=strict, simulate=simulate)
        _refuse_recast(model, plan)
        _refuse_strangers(model, [optimizer] if isinstance(optimizer, Optimizer) else optimizer)
        for warning in plan.warnings:
            warnings.warn(warning, stacklevel=2)
        super().__init__(
            apply(plan, model, casts_storage=False),
            optimizer,
            plan,
            accumulate=accumulate,
            clip=Clip(limit=clip_norm, kind=clip_type),
            schedules=_schedules(schedule),
            ema=Ema(model, decay=ema_decay) if ema_decay else None,
            spikes=SpikeMeter(device, skips=skip_spikes),
            also=also,
            on_gradients=on_gradients,
        )
        scaling = plan.needs_loss_scaling
        self.guard = Guard(guard, scaling=scaling, min_scale=self.scaler.options.min_scale, is_run=False)
        for hint in self._hints():
            warnings.warn(hint, stacklevel=2)

    def __call__(self, loss_fn: LossFn, window: Window) -> Outcome:  # type: ignore[override]
        """Compute, judge and commit one window; `loss_fn(batch)` gives the loss, or (loss, weight)."""
        return Outcome(super().__call__(loss_fn, window))

    def commit(self, facts: Facts) -> None:
        """Commit or drop what compute() found; raises TrainingStopped where too many steps in a row were bad."""
        super().commit(facts)
        verdict = self.guard.watch(facts)
        if verdict.action is not Action.CONTINUE:
            raise TrainingStopped(
                f"training stopped: {verdict.reason}",
                why="the weights are as they were before those steps",
                fix=verdict.fix,
            )

    def compute(self, loss_fn: LossFn, window: Window) -> Facts:
        """Forward, backward and verdict of one window; nothing is committed yet."""
        return super().compute(_giving_a_loss(loss_fn), window)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a stored state back, or refuse it and change nothing."""
        refuse_unfit(self, state)
        self.guard.load_state_dict(state.get("guard", {}))
        super().load_state_dict(state)

    def _hints(self) -> list[str]:
        hints = []
        for committer in self.committers:
            if committer.way != "found_inf" and type(committer.optimizer) in READS_FLAG_IN_KERNEL:
                price = "a copy of weights and state each step" if committer.way == "select" else "one wait each step"
                hints.append(f"{committer.name} is not fused: skipping safely costs {price}; fused=True makes it free")
        return hints


def _refuse_other_kinds(model: object, optimizer: object) -> None:
    optimizers = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    if isinstance(model, nn.Module) and all(isinstance(one, Optimizer) for one in optimizers):
        return
    given = f"{type(model).__name__}, {type(optimizer).__name__}"
    raise ConfigError(
        f"a step takes a model and its optimizer, or a list of them, not ({given})",
        fix="hs.Step(model, torch.optim.AdamW(model.parameters()))",
    )


def _device_of(model: nn.Module) -> torch.device:
    for weight in model.parameters():
        return weight.device
    raise ModelError(f"{type(model).__name__} has no parameters", fix="give the model that is trained")


def _schedules(schedule: LRScheduler | Schedule | None) -> list[Schedule]:
    if schedule is None:
        return []
    return from_torch(schedule) if isinstance(schedule, LRScheduler) else [schedule]


def _giving_a_loss(loss_fn: LossFn) -> LossFn:
    """The same function, with an error in words for what is most often forgotten in it."""

    def checked(batch: Any) -> Any:
        result = loss_fn(batch)
        loss = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(loss, Tensor):
            found = "None" if loss is None else f"a {type(loss).__name__}"
            raise ConfigError(
                f"loss_fn gave {found}, not a tensor",
                why="the gradient is taken of what it returns",
                fix="return loss, or (loss, weight), from loss_fn; without .item() or float()",
            )
        if not loss.requires_grad:
            raise ConfigError(
                "the loss of loss_fn depends on no weight that is trained",
                why="it was detached, computed under torch.no_grad(), or by a model whose weights are all frozen",
                fix="compute it with the model given to Step, without .detach() and no_grad()",
            )
        return result

    return checked


def _refuse_strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Each optimizer must hold some weight of the model; besides those it may hold others, such as a loss's own."""
    own = {id(weight) for weight in model.parameters()}
    for optimizer in optimizers:
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        if held and not any(id(weight) in own for weight in held):
            raise ConfigError(
                f"none of the {len(held)} parameters of {type(optimizer).__name__} belongs to this "
                f"{type(model).__name__}",
                why="it was made for another model, or before the weights were replaced, as by model.to(...) or a copy",
                fix=f"make it anew: {type(optimizer).__name__}(model.parameters(), ...)",
            )


def _refuse_recast(model: nn.Module, plan: Plan) -> None:
    """The optimizer exists already: weights stay as they are stored, or the request is refused."""
    rows = {row.module.replace(ROOT, ""): row for row in plan.rows if row.kind != "island"}
    for name, weight in model.named_parameters():
        row = rows.get(name.rpartition(".")[0])
        if row is None or not weight.requires_grad or not weight.is_floating_point():
            continue
        wanted = STORAGE_DTYPES[row.storage]
        # bf16-true would keep norms in fp32, but a model cast as a whole is as good.
        if weight.dtype not in (wanted, torch.bfloat16 if plan.granted == "bf16-true" else wanted):
            stored = str(weight.dtype).removeprefix("torch.")
            cast = "bfloat16()" if wanted is torch.bfloat16 else "float()"
            raise PrecisionError(
                f"{name} is stored in {stored}, precision {plan.granted!r} stores it in {row.storage}",
                why="the optimizer was made for the weights as they are, and they are not recast behind its back",
                fix=f"call model.{cast} before making the optimizer, or choose another precision",
            )
