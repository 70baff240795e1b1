"""The one composition root: build -> decide -> apply -> compile -> optimizer -> step, in this order only.

The optimizer comes after `apply` because storage casts replace parameters; compilation wraps the loss, not the model,
so that state_dict names stay as they are and the whole loss lies inside the compiled region.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from halfstep.config.schema import RunConfig
from halfstep.data.loader import Loader
from halfstep.data.prefetch import RecentWindows
from halfstep.distributed.world import World
from halfstep.evidence.recorder import Recorder
from halfstep.hardware.facts import Hardware
from halfstep.models.first_values import skip_first_values
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.run.frozen import modules_of, place_frozen_
from halfstep.run.optimizing import Length, make_step, steps_per_epoch, taken
from halfstep.run.phases import AssembledPhase, assemble_phases, phased_step
from halfstep.run.ranked import connected, synchronised, with_all_samples
from halfstep.run.validate import EarlyStopping
from halfstep.step.ema import Ema
from halfstep.step.guard import LAG, Guard, GuardOptions
from halfstep.step.phases import PhasedGuard, PhasedStep
from halfstep.step.randomness import seed_everything
from halfstep.step.ranks import Ranks
from halfstep.step.schedule import Plateau
from halfstep.step.snapshots import Snapshots
from halfstep.step.step import Step
from halfstep.step.tabulated import Values
from halfstep.tune.choose import asked_mode, fp8_gains
from halfstep.tune.layout import to_channels_last_, wants_channels_last
from halfstep.tune.memory_low import MemorySetting
from halfstep.tune.modes import Mode, Region, compiled, repeats_blocks
from halfstep.tune.own_blocks import recompute_blocks_
from halfstep.tune.trial_time import total_steps_of
from halfstep.workloads import KINDS, build
from halfstep.workloads.base.kind import Unit
from halfstep.workloads.base.workload import Workload


@dataclass(kw_only=True, slots=True)
class Assembly:
    config: RunConfig
    plan: Plan
    workload: Workload
    model: nn.Module
    device: torch.device
    mode: Mode | None  # how steps run; None before that is chosen: eager
    region: Region  # forward and loss, compiled when first called
    eager: Region  # the same as it is
    step: Step | PhasedStep
    values: Values
    phases: tuple[AssembledPhase, ...] = ()  # in their order; none: `step`, `region` and `eager` are the one there is
    guard: Guard
    snapshots: Snapshots | None
    plateau: Plateau | None
    stopping: EarlyStopping
    train_loader: Loader
    val_loader: Loader
    total_steps: int
    unit: Unit  # what throughput counts
    recent: RecentWindows | None = None
    """Set before the run begins by whoever wants to see the windows of steps that the guard looks at."""
    recorder: Recorder | None = None  # keeps the step of a fault; set before the run begins
    world: World | None = None  # the processes that train this model together; None where there is one

    @property
    def full_batch(self) -> int:
        """Samples of a whole batch that this process has."""
        whole = min(self.config.train.batch_size, len(self.workload.train_samples))
        return whole if self.world is None else self.world.rows(whole)

    def ask_to_stop(self) -> None:
        steps = self.step.steps.values() if isinstance(self.step, PhasedStep) else [self.step]
        for step in steps:
            if step.ranks is not None:
                step.ranks.ask()


def plan_for(config: RunConfig, workload: Workload, hardware: Hardware) -> Plan:
    """Decide with the model at hand, so that the plan has its rows."""
    gains = fp8_gains(config, workload, hardware)
    return decide(
        config.precision,
        hardware,
        workload.model,
        fragile=workload.fragile,
        fp8_gains=gains,
        frozen=modules_of(workload.frozen),
    )


def assemble(config: RunConfig, workload: Workload, plan: Plan, world: World | None = None) -> Assembly:
    setting = MemorySetting(**plan.memory)
    device = torch.device(plan.device)
    model = placed(config, synchronised(config, workload.model, device, world), plan)
    place_frozen_(config, workload.frozen, plan)
    recompute = "blocks" if config.train.activation_checkpointing and setting.recompute == "none" else setting.recompute
    if setting.recompute != "none" or plan.blocks:
        recompute_blocks_(model, recompute, plan.blocks)
    eager = workload.region(model)
    to_compiled = partial(
        compiled,
        # Timing picks kernels that sum in another order from one start to the next.
        tunes_kernels=plan.tunes_kernels and not config.train.deterministic,
        activation_budget=setting.activation_budget,
        blocks=workload.blocks,
        is_repeated=repeats_blocks(model, plan.granted),
    )
    train_loader, val_loader = _loaders(config, workload, world)
    length = Length(total_steps_of(config, len(train_loader)), steps_per_epoch(config, len(train_loader)))
    values = Values(workload.values, device)
    region = to_compiled(eager)
    ranks: Ranks | Literal["alone"] = "alone"
    if not workload.phases:
        eager, region, ranks = connected(world, config, model, (eager, region), device)
    phases = assemble_phases(config, workload, model, plan, setting, length, to_compiled, values, world)
    step = phased_step(phases) or make_step(
        config,
        model,
        plan,
        setting,
        length,
        ema=_average(config, workload, model),
        values=values,
        groups=workload.groups,
        ranks=ranks,
    )
    return Assembly(
        config=config,
        plan=plan,
        workload=workload,
        model=model,
        device=device,
        mode=asked_mode(config, plan),
        region=region,
        eager=eager,
        step=step,
        values=values,
        phases=phases,
        guard=_guard(config, plan, workload, world),
        snapshots=_snapshots(config, workload),
        plateau=_plateau(config, workload),
        stopping=EarlyStopping(mode=workload.mode, patience=config.train.early_stopping_patience),
        train_loader=train_loader,
        val_loader=val_loader,
        total_steps=length.total_steps,
        unit=KINDS.of(config.workload).unit_of(config, workload.store),
        world=world,
    )


def build_workload(config: RunConfig, store: dict[str, Any] | None = None) -> Workload:
    """The workload with freshly seeded weights, or for a stored run with what its checkpoint knows of the data.

    A stored run's weights are in its checkpoint as well: whoever gives its store loads all of them."""
    seed_everything(config.train.seed)
    with nullcontext() if store is None else skip_first_values():
        return build(config, store)


def with_settled(config: RunConfig, workload: Workload) -> RunConfig:
    """The config with what its data decided, so that a stored run never has to decide it again."""
    for path, value in workload.settled.items():
        section, name = path.split(".")
        config = config.changed(**{section: {name: value}})
    return config


def placed(config: RunConfig, model: nn.Module, plan: Plan) -> nn.Module:
    """The model on its device, with the storage, compute and memory layout it trains and predicts in."""
    model = plan.apply(model.to(torch.device(plan.device)))
    return to_channels_last_(model) if wants_channels_last(config, plan, model) else model


def _loaders(config: RunConfig, workload: Workload, world: World | None) -> tuple[Loader, Loader]:
    size, seed, workers = config.train.batch_size, config.train.seed, config.data.num_workers
    part = (world.rank, world.size) if world is not None else (0, 1)
    train = Loader(workload.train_samples, batch_size=size, seed=seed, num_workers=workers, shuffle=True, part=part)
    val_size = config.train.val_batch_size or size
    val = Loader(workload.val_samples, batch_size=val_size, seed=seed, num_workers=workers, shuffle=False, part=part)
    return train, val


def _average(config: RunConfig, workload: Workload, model: nn.Module) -> Ema | None:
    if not config.ema.enabled:
        return None
    return Ema(model, parts=workload.ema_parts, **config.ema.model_dump(exclude={"enabled"}))


def _guard(config: RunConfig, plan: Plan, workload: Workload, world: World | None) -> Guard:
    options = GuardOptions(**taken(config.guard, GuardOptions))
    scaling, min_scale = plan.needs_loss_scaling, config.scaler.min_scale
    if workload.phases:
        names = (phase.name for phase in workload.phases)
        guard: Guard = PhasedGuard(options, names, scaling=scaling, min_scale=min_scale)
    else:
        guard = Guard(options, scaling=scaling, min_scale=min_scale)
    if world is not None:
        guard.complete = partial(with_all_samples, world)
    return guard


def _snapshots(config: RunConfig, workload: Workload) -> Snapshots | None:
    guard = config.guard
    if guard.on_fault != "rollback":
        return None
    # Other phases commit while one that runs seldom comes to its last fault in a row.
    longest = max((phase.every for phase in workload.phases), default=0) * guard.max_consecutive
    return Snapshots(every=guard.snapshot_every, margin=guard.margin, lag=LAG + longest)


def _plateau(config: RunConfig, workload: Workload) -> Plateau | None:
    s = config.schedule
    if s.name != "plateau":
        return None
    return Plateau(mode=workload.mode, cut=s.factor, patience=s.patience, floor=max(s.min_factor, 1e-6))
