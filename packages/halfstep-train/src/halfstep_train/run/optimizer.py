"""Build the step of a run or of one of its phases: optimizer, parameter groups and schedules as configured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from halfstep.errors import ConfigError, suggest_nearest
from halfstep.precision.plan import Plan
from halfstep.step.clip import Clip
from halfstep.step.ema import Ema
from halfstep.step.guard import SpikeMeter
from halfstep.step.norm_averages import NormAverages
from halfstep.step.optim.by_name import is_within, make_parameter_groups
from halfstep.step.ranks import Ranks
from halfstep.step.scaler import Scaler, ScalerOptions
from halfstep.step.schedule import Schedule, ScheduleOptions, build_schedule
from halfstep.step.step import GuardedStep
from halfstep.step.tables import Values
from halfstep_train.config.schema import ScheduleConfig, StepSettings, TrainConfig
from halfstep_train.config.section import Section
from halfstep_train.tune.trials import MemorySetting, count_total_steps, make_optimizer
from halfstep_train.workloads.base.workload import Group

AnyStep = TypeVar("AnyStep", bound=GuardedStep)
AnySection = TypeVar("AnySection", bound=Section)


class Length(NamedTuple):
    total_steps: int
    steps_per_epoch: int

    @classmethod
    def of(cls, train: TrainConfig, num_batches: int) -> Length:
        """Return the length of a run with so many batches per epoch, if nothing stops it early."""
        return cls(count_total_steps(train, num_batches), math.ceil(num_batches / train.accumulate))


def make_step(
    settings: StepSettings,
    model: nn.Module,
    plan: Plan,
    setting: MemorySetting,
    length: Length,
    *,
    parts: tuple[str, ...] = (),
    scaler: Scaler | None = None,
    ema: Ema | None = None,
    values: Values | None = None,
    groups: tuple[Group, ...] = (),
    ranks: Ranks | Literal["alone"] = "alone",
    kind: type[AnyStep] = GuardedStep,  # type: ignore[assignment]
) -> AnyStep:
    """Build the step over the parameters in `parts` (modules or parameters by name; empty: all)."""
    guard, train = settings.guard, settings.train
    optimizer, schedules = build_optimizer(settings, model, setting, length, parts=parts, groups=groups)
    step = kind(
        model,
        optimizer,
        plan,
        accumulate=train.accumulate,
        clip=Clip(limit=train.clip_norm, kind=train.clip_type),
        schedules=schedules,
        scaler=scaler or ScalerOptions(**select_options(settings.scaler, ScalerOptions)),
        ema=ema,
        values=values,
        ranks=ranks,
        spikes=SpikeMeter(
            torch.device(plan.device), threshold=guard.spike_threshold, size=guard.spike_window, skips=guard.skip_spikes
        ),
    )
    step.norms = NormAverages(model) if train.cumulative_norms else None
    return step


def build_optimizer(
    settings: StepSettings,
    model: nn.Module,
    setting: MemorySetting,
    length: Length,
    *,
    parts: tuple[str, ...] = (),
    groups: tuple[Group, ...] = (),
) -> tuple[Optimizer, list[Schedule]]:
    """Build the optimizer over the parameters in `parts`, and its schedule or one schedule per parameter group."""
    o, train = settings.optimizer, settings.train
    if o.moment_bits == 8:
        if o.name != "adamw":
            raise ConfigError(
                f"optimizer.moment_bits=8 does not work with {o.name}",
                why="8-bit moments exist only for adamw",
                fix="optimizer.name=adamw, or optimizer.moment_bits=32",
            )
        setting = dataclasses.replace(setting, optimizer_bits=8)
    peak_lr = o.compute_peak_lr(train.batch_size * train.accumulate)
    own_groups: list[dict[str, Any]] = []
    schedules: list[Schedule] = []
    for group, names in _split_by_group(model, groups, parts):
        # A group without trained parameters would make an empty parameter group.
        if groups and not names:
            continue
        own = settings
        if group is not None:
            # Without the group's learning rate, which its parameter groups get below.
            decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
            own = override_sections(settings, f"the group of {', '.join(group.modules)}", decay, group.schedule)
        made = make_parameter_groups(model, own.optimizer.weight_decay, decay_all=o.decay_norms_and_biases, parts=names)
        lr = {} if group is None or group.lr is None else {"lr": group.lr}
        own_groups += [{**found, **lr} for found in made]
        schedules += [build_schedule(_make_schedule_options(own.schedule, length))] * len(made)
    half = {"rounding": settings.precision.rounding, "seed": train.seed}
    optimizer = make_optimizer(setting, o.name, own_groups, lr=peak_lr, options=o.collect_options(), **half)  # type: ignore[arg-type]
    # Without groups all parameter groups (with and without weight decay) share one schedule.
    return optimizer, schedules if groups else schedules[:1]


def _split_by_group(
    model: nn.Module, groups: tuple[Group, ...], parts: tuple[str, ...]
) -> list[tuple[Group | None, tuple[str, ...]]]:
    """Return the names of parameters in no group, then those of each group; the first group that matches wins."""
    trained = [n for n, p in model.named_parameters() if p.requires_grad and (not parts or is_within(n, parts))]
    if not groups:
        return [(None, parts)]  # empty parts mean all parameters
    found: list[tuple[Group | None, tuple[str, ...]]] = []
    for group in groups:
        for part in group.modules:
            refuse_unknown(part, model, "a group names")
        found.append((group, tuple(name for name in trained if is_within(name, group.modules))))
        trained = [name for name in trained if not is_within(name, group.modules)]
    return [(None, tuple(trained)), *found]


def refuse_unknown(part: str, model: nn.Module, who: str) -> None:
    """Refuse a part that holds no parameter of the model."""
    if not any(is_within(name, (part,)) for name, _ in model.named_parameters()):
        # Suggest modules only; a list of all parameters would be too long.
        known = [name for name, _ in model.named_modules() if name]
        raise ConfigError(f"{who} {part!r}, which is not a module of the model", fix=suggest_nearest(part, known))


def override_sections(
    settings: StepSettings, who: str, optimizer: Mapping[str, Any], schedule: Mapping[str, Any]
) -> StepSettings:
    """Return the run's settings with the overrides of a workload's phase or group."""
    if schedule.get("name", settings.schedule.name) == "plateau" != settings.schedule.name:
        raise ConfigError(
            f"{who} asks for the schedule plateau",
            why="a plateau of the validation metric cuts all learning rates together",
            fix="schedule.name=plateau in the config, or another schedule here",
        )
    return dataclasses.replace(
        settings,
        optimizer=_change_section(settings.optimizer, optimizer, f"{who}: optimizer"),
        schedule=_change_section(settings.schedule, schedule, f"{who}: schedule"),
    )


def _change_section(section: AnySection, changes: Mapping[str, Any], where: str) -> AnySection:
    """Return the section with these changes, validated like settings of the user."""
    try:
        return type(section).model_validate({**section.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: {key} is {first['input']!r}", why=first["msg"], fix="correct it where the workload defines it"
        ) from error


CUT_EVERY = 10_000
"""Steps between two cuts of the step schedule, unless schedule.milestones are given."""


def _make_schedule_options(s: ScheduleConfig, length: Length) -> ScheduleOptions:
    total_steps, steps_per_epoch = length
    warmup = s.warmup_steps if s.warmup_steps is not None else round(s.warmup_epochs * steps_per_epoch)
    if s.warmup_steps is None:
        # At most a tenth of the run: a warmup by epochs could otherwise be most of a short run.
        warmup = min(warmup, max(total_steps // 10, 1))
    shape = {name: value for name, value in select_options(s, ScheduleOptions).items() if name != "warmup_steps"}
    if not isinstance(s.milestones, tuple) or not s.milestones:
        shape |= {"milestones": (), "step_size": s.milestones or CUT_EVERY}
    return ScheduleOptions(**shape, gamma=s.factor, total_steps=total_steps, warmup_steps=warmup)


def select_options(section: Any, options: type) -> dict[str, Any]:
    """Return the values of a config section whose names an options class in `step` shares."""
    return {name: value for name, value in section.model_dump().items() if name in options.__dataclass_fields__}  # type: ignore[attr-defined]
