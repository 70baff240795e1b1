"""The phases of a workload, assembled: each with its optimizer, its step and its region; one scaler for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from halfstep.config.schema import RunConfig
from halfstep.distributed.world import World
from halfstep.errors import ConfigError
from halfstep.precision.plan import Plan
from halfstep.run.optimizing import Length, make_step, refuse_unknown, taken, with_own
from halfstep.run.ranked import connected
from halfstep.step.ema import Ema
from halfstep.step.optim.by_name import is_within
from halfstep.step.phases import PhasedStep, PhaseStep, SharedScaler
from halfstep.step.scaler import ScalerOptions
from halfstep.step.tables import Values
from halfstep.tune.memory_low import MemorySetting
from halfstep.tune.modes import Region
from halfstep.workloads.base.workload import Phase, Workload


@dataclasses.dataclass(kw_only=True, slots=True)
class AssembledPhase:
    phase: Phase
    step: PhaseStep
    region: Region  # forward and loss, compiled when first called
    eager: Region
    is_counted: bool  # whether training metrics count its outputs


def assemble_phases(
    config: RunConfig,
    workload: Workload,
    model: nn.Module,
    plan: Plan,
    setting: MemorySetting,
    length: Length,
    compiled: Callable[[Region], Region],
    values: Values,
    world: World | None = None,
) -> tuple[AssembledPhase, ...]:
    """The phases in their order, over the placed model; one that could never train is refused."""
    if not workload.phases:
        return ()
    refuse_unfit_phases(workload.phases, model)
    counted = next((phase.name for phase in workload.phases if _is_countable(phase, workload)), "")
    averaged = _averaged_names(config, workload, model)
    scaler = SharedScaler(
        torch.device(plan.device),
        enabled=plan.needs_loss_scaling,
        options=ScalerOptions(**taken(config.scaler, ScalerOptions)),
        accumulate=config.train.accumulate,
    )
    assembled = []
    for phase in workload.phases:
        own = phase_config(config, phase)
        names = averaged[phase.name]
        named = dataclasses.replace(workload, forward=phase.forward or workload.forward, loss=phase.loss)
        plain = named.region(model, name=phase.name)
        trained = [p for name, p in model.named_parameters() if p.requires_grad and trains(phase, name)]
        device = torch.device(plan.device)
        eager, region, ranks = connected(world, config, model, (plain, compiled(plain)), device, trained)
        step = make_step(
            own,
            model,
            plan,
            setting if own.optimizer.name == "adamw" else dataclasses.replace(setting, optimizer_bits=32),
            Length(max(phase.num_due(length.total_steps), 1), max(length.steps_per_epoch // phase.every, 1)),
            parts=phase.parameters,
            scaler=scaler,
            ema=Ema(model, parts=names, **config.ema.model_dump(exclude={"enabled"})) if names else None,
            values=values,
            groups=phase.groups,
            ranks=ranks,
            kind=PhaseStep,
        )
        assembled.append(
            AssembledPhase(phase=phase, step=step, region=region, eager=eager, is_counted=phase.name == counted)
        )
    return tuple(assembled)


def phased_step(phases: Sequence[AssembledPhase]) -> PhasedStep | None:
    """All of them as one, for whoever counts and stores; None where the workload has no phases."""
    if not phases:
        return None
    scaler = phases[0].step.scaler
    assert isinstance(scaler, SharedScaler)
    return PhasedStep({own.phase.name: own.step for own in phases}, scaler)


def phase_config(config: RunConfig, phase: Phase) -> RunConfig:
    return with_own(config, f"phase {phase.name}", phase.optimizer, phase.schedule)


def all_due(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Phases that run in every iteration: what a trial has to time, and to find room for."""
    return tuple(dataclasses.replace(phase, every=1, from_step=0) for phase in phases)


def refuse_unfit_phases(phases: Sequence[Phase], model: nn.Module) -> None:
    """Names that lead nowhere, parameters that nobody trains, iterations in which nothing happens."""
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ConfigError(f"two phases have the same name: {', '.join(names)}", fix="give each a name of its own")
    for phase in phases:
        for part in phase.parameters:
            refuse_unknown(part, model, f"phase {phase.name} trains")
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    idle = [name for name in trained if not any(trains(phase, name) for phase in phases)]
    if idle:
        raise ConfigError(
            f"no phase trains {idle[0]}" + (f" and {len(idle) - 1} more" if len(idle) > 1 else ""),
            why="it would keep its first values without a word",
            fix="name its module in a phase's parameters, or requires_grad_(False) where that is meant",
        )
    _refuse_idle_iterations(phases)


def trains(phase: Phase, parameter: str) -> bool:
    return not phase.parameters or is_within(parameter, phase.parameters)


def _refuse_idle_iterations(phases: Sequence[Phase]) -> None:
    if any(phase.every == 1 and phase.from_step == 0 for phase in phases):
        return
    horizon = max(phase.from_step for phase in phases) + math.lcm(*(phase.every for phase in phases))
    for iteration in range(horizon):
        if not any(phase.is_due(iteration) for phase in phases):
            raise ConfigError(
                f"no phase is due in iteration {iteration}",
                why="an iteration takes data, and nothing would be trained on it",
                fix="one phase with every=1 and from_step=0, or phases that take turns",
            )


def _is_countable(phase: Phase, workload: Workload) -> bool:
    """Whether its outputs are those that the workload's metrics know."""
    if phase.counted is not None:
        return phase.counted
    return phase.forward is None or phase.forward is workload.forward


def _averaged_names(config: RunConfig, workload: Workload, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """What moves with each phase's commits: parameters and buffers of its parts; those of two belong to the first."""
    left = [name for name, _ in (*model.named_parameters(), *model.named_buffers())] if config.ema.enabled else []
    if workload.ema_parts:
        left = [name for name in left if is_within(name, workload.ema_parts)]
    found: dict[str, tuple[str, ...]] = {}
    for phase in workload.phases:
        found[phase.name] = tuple(name for name in left if trains(phase, name))
        left = [name for name in left if name not in set(found[phase.name])]
    return found
