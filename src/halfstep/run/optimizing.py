"""The optimizer of a run, or of one of its phases, and its schedules: by the config, over the parameters named."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.config.schema import RunConfig
from halfstep.precision.plan import Plan
from halfstep.step.clip import Clip
from halfstep.step.ema import Ema
from halfstep.step.optimizers import parameter_groups
from halfstep.step.scaler import Scaler, ScalerOptions
from halfstep.step.schedule import Schedule, ScheduleOptions, build_schedule
from halfstep.step.spike import SpikeMeter
from halfstep.step.step import Step
from halfstep.tune.memory_levers import optimizer_for
from halfstep.tune.memory_low import MemorySetting

AnyStep = TypeVar("AnyStep", bound=Step)


class Length(NamedTuple):
    """Of a run, or of one of its phases, in steps."""

    total_steps: int
    steps_per_epoch: int


def make_step(
    config: RunConfig,
    model: nn.Module,
    plan: Plan,
    setting: MemorySetting,
    length: Length,
    *,
    parts: tuple[str, ...] = (),
    scaler: Scaler | None = None,
    ema: Ema | None = None,
    kind: type[AnyStep] = Step,  # type: ignore[assignment]
) -> AnyStep:
    """The guarded step of these parts of the model, or of all of it."""
    guard, train = config.guard, config.train
    optimizer, schedules = optimizing(config, model, setting, length, parts=parts)
    return kind(
        model,
        optimizer,
        plan,
        accumulate=train.accumulate,
        clip=Clip(limit=train.clip_norm, kind=train.clip_type),
        schedules=schedules,
        scaler=scaler or ScalerOptions(**taken(config.scaler, ScalerOptions)),
        ema=ema,
        spikes=SpikeMeter(
            torch.device(plan.device),
            threshold=guard.spike_threshold,
            size=guard.spike_window,
            skips=guard.skip_spikes,
        ),
    )


def optimizing(
    config: RunConfig, model: nn.Module, setting: MemorySetting, length: Length, *, parts: tuple[str, ...] = ()
) -> tuple[Optimizer, list[Schedule]]:
    """Over the parameters in `parts` (modules or parameters by name), or over all; one schedule, or one a group."""
    o = config.optimizer
    groups = parameter_groups(model, o.weight_decay, decay_all=o.decay_norms_and_biases, parts=parts)
    peak_lr = o.peak_lr(config.train.batch_size * config.train.accumulate)
    optimizer = optimizer_for(setting, o.name, groups, lr=peak_lr, options=o.options())
    return optimizer, [build_schedule(_schedule_options(config, length))]


def _schedule_options(config: RunConfig, length: Length) -> ScheduleOptions:
    s, (total_steps, steps_per_epoch) = config.schedule, length
    warmup = s.warmup_steps if s.warmup_steps is not None else round(s.warmup_epochs * steps_per_epoch)
    if s.warmup_steps is None:
        # A warmup by epochs longer than a tenth of a short run would be most of it.
        warmup = min(warmup, max(total_steps // 10, 1))
    shape = {name: value for name, value in taken(s, ScheduleOptions).items() if name != "warmup_steps"}
    return ScheduleOptions(**shape, total_steps=total_steps, warmup_steps=warmup)


def steps_per_epoch(config: RunConfig, num_batches: int) -> int:
    return math.ceil(num_batches / config.train.accumulate)


def taken(section: Any, options: type) -> dict[str, Any]:
    """The values of a config section that an options class of the step room knows by the same name."""
    return {name: value for name, value in section.model_dump().items() if name in options.__dataclass_fields__}  # type: ignore[attr-defined]
