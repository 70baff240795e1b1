"""Guard a training loop that Hugging Face Accelerate runs. docs/integrations/accelerate.md is its guide.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = hs.integrations.accelerate.guard(accelerator, model, optimizer)

The loop stays as it is. Methods of these objects are replaced: accelerator.backward notes the loss, its clipping the
norm, optimizer.step asks the guard, and the scheduler inside Accelerate's wrapper follows good steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Unpack

from torch import Tensor, nn

from halfstep.errors import ConfigError, explain_missing
from halfstep.integrations.guard import (
    HostAdvice,
    HostGuard,
    HostOptions,
    check_loop,
    refuse_second_guard,
    refuse_unguardable,
    unwrap_model,
)

with explain_missing(__name__, {"accelerate": "accelerate"}, "pip install 'accelerate>=1.15'"):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType

GUARDABLE = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
PRECISIONS = {"no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""What a capsule's replay computes in, by Accelerate's name; fp8's layers are replayed in bf16."""


ADVICE = HostAdvice(
    overflow='Accelerator(mixed_precision="bf16")', clip="accelerator.clip_grad_norm_(model.parameters(), 1.0)",
    step="step() of the optimizer that accelerator.prepare returned",
)  # fmt: skip
USE = "model, optimizer = accelerator.prepare(model, optimizer), then guard(accelerator, model, optimizer)"


class AccelerateGuard(HostGuard):
    """The guard of one prepared optimizer; `guard` makes it."""

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: AcceleratedOptimizer, *, host: str = "Accelerate",
        advice: HostAdvice = ADVICE, **more: Any,
    ) -> None:  # fmt: skip
        name = type(optimizer.optimizer).__name__
        if accelerator.has_lomo_optimizer or name == "LayerWiseDummyOptimizer":  # of GaLore
            raise ConfigError(
                f"{name} cannot be guarded",
                why="it updates weights inside backward, before the gradients of a step can be checked",
                fix="use an optimizer that steps after backward, such as optim='adamw_torch_fused'",
            )
        self.accelerator, self.accelerated = accelerator, optimizer
        super().__init__(
            host, model, optimizer.optimizer, advice, scaler=optimizer.scaler,
            precision=PRECISIONS.get(accelerator.mixed_precision, "fp32"), **more,
        )  # fmt: skip
        self._replace(accelerator, "backward", self._backward)
        self._replace(accelerator, "clip_grad_norm_", self._clip_grad_norm)
        self._replace(accelerator, "clip_grad_value_", self._clip_grad_value)
        self._replace(accelerator, "join_uneven_inputs", self._refuse_uneven_inputs)
        self._replace(accelerator, "end_training", self._end_training)
        self._replace(optimizer, "step", self._step_if_synced)
        self._mark(accelerator)

    def follow_prepared(self, schedulers: Iterable[Any]) -> None:
        """Let the prepared schedulers of this optimizer follow good steps only."""
        for scheduler in schedulers:
            if not any(own is self.accelerated for own in scheduler.optimizers):
                continue
            if scheduler.step_with_optimizer:
                self._undo.append(partial(setattr, scheduler, "scheduler", scheduler.scheduler))
                scheduler.scheduler = self.follow(scheduler.scheduler)
                self._replace(scheduler, "step", self._step_schedule)
            else:
                self.limits.append("the schedule, which step_scheduler_with_optimizer=False leaves to your loop")

    def _backward(self, before: Callable[..., Any], loss: Tensor, **kwargs: Any) -> Any:
        self.record(loss, share=1 / self.accelerator.gradient_accumulation_steps)
        return before(loss, **kwargs)

    def _clip_grad_norm(self, before: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norm = before(parameters, *args, **kwargs)
        self.note_norm(norm, parameters)
        return norm

    def _clip_grad_value(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.look_at_gradients()
        return before(*args, **kwargs)

    def _refuse_uneven_inputs(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.accelerator.num_processes == 1:
            return before(*args, **kwargs)
        raise ConfigError(
            "accelerator.join_uneven_inputs cannot be used with the guard",
            why="all ranks decide on a step together, and a rank without batches would not take part",
            fix="leave it out: a loader that accelerator.prepare returns gives every rank the same number of batches",
        )

    def _end_training(self, before: Callable[..., Any]) -> None:
        try:
            self.finish()
        finally:
            before()

    def _step_if_synced(self, before: Callable[..., Any], closure: Any = None) -> None:
        if self.accelerated.gradient_state.sync_gradients or closure is not None:
            self._step_optimizer(before, closure)
            # What accelerator.optimizer_step_was_skipped reports. Without a wait it is unknown, and `dropped` tells.
            self.accelerated._is_overflow = self.schedule == "read" and self.dropped

    def _step_schedule(self, before: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let the guard decide what a dropped step does to a schedule: Accelerate does not know one by epochs."""
        was_skipped, self.accelerated._is_overflow = self.accelerated._is_overflow, False
        try:
            before(*args, **kwargs)
        finally:
            self.accelerated._is_overflow = was_skipped


def guard(
    accelerator: Accelerator,
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any = None,  # refused: a forgotten one gets an explanation
    **options: Unpack[HostOptions],
) -> AccelerateGuard:
    """Guard the steps of a prepared optimizer: a bad step leaves model, buffers, optimizer, schedule and scaler as
    they were.

    Call it once, after `accelerator.prepare`, with the objects that it returned. ::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        guard = hs.integrations.accelerate.guard(accelerator, model, optimizer)

    Arguments:
        model: the prepared model, or a list of the prepared models that this optimizer trains.
        options: schedule, capsules, max_consecutive, also, as in halfstep.integrations.guard.HostGuard.

    The result has `dropped` (was the newest step dropped?), `num_dropped`, `committed` (these wait for the device),
    `attempted`, `follow(scheduler)` for a scheduler that was not prepared, `finish()` for the end unless you call
    accelerator.end_training(), and `close()`.
    """
    refuse_unfit_accelerator(accelerator)
    prepared = {id(unwrap_model(one)) for one in (*accelerator._models, *accelerator._optimizers)}
    models = check_loop(accelerator, model, optimizer, lambda one: id(unwrap_model(one)) in prepared, USE)
    made = AccelerateGuard(accelerator, models, optimizer, limits=["counters and averages of your loop"], **options)
    made.follow_prepared(accelerator._schedulers)
    if not accelerator._schedulers and hasattr(vars(optimizer.optimizer).get("step"), "_wrapped_by_lr_sched"):
        made.limits.append("the scheduler, which was not prepared: scheduler = guard.follow(scheduler)")
    if len(accelerator._optimizers) > 1:
        made.limits.append(f"{len(accelerator._optimizers) - 1} more prepared optimizers")
    made.announce()
    return made


def refuse_unfit_accelerator(accelerator: Any) -> None:
    """Refuse setups whose gradients or optimizer steps this process does not see as a whole."""
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(f"guard takes an accelerate.Accelerator first, not {type(accelerator).__name__}", fix=USE)
    refuse_second_guard(accelerator)
    config = getattr(accelerator, "parallelism_config", None)
    is_split = config is not None and any(getattr(config, f"{way}_enabled", False) for way in ("tp", "cp", "sp"))
    if is_split or accelerator.distributed_type not in GUARDABLE:
        refuse_unguardable(
            f"Accelerate with {'parallelism_config' if is_split else accelerator.distributed_type.value}",
            "one process per GPU with DDP: accelerate launch --multi_gpu, without DeepSpeed, FSDP or Megatron-LM",
        )
