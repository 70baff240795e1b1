"""Assemble a run from its parts; this is the only place that connects them.

The order is fixed: build the workload, decide the plan, apply it to the model, compile, build the optimizer, build the
step. The optimizer comes after `apply` because storage casts replace parameters. Compilation wraps the loss, not the
model, so that state_dict names stay unchanged and the whole loss is inside the compiled region.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer

from halfstep.distributed.world import World
from halfstep.errors import ConfigError, suggest_nearest
from halfstep.evidence.recorder import Recorder
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.probe import probe
from halfstep.own_loop.repeated_blocks import recompute_blocks_
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan
from halfstep.step.clip import Clip
from halfstep.step.ema import Ema
from halfstep.step.guard import LAG, Guard, GuardOptions, SpikeMeter
from halfstep.step.norm_averages import NormAverages
from halfstep.step.optim.by_name import is_within, make_parameter_groups
from halfstep.step.phases import PhasedGuard, PhasedStep, PhaseStep, SharedScaler
from halfstep.step.randomness import seed_everything
from halfstep.step.ranks import Ranks
from halfstep.step.scaler import Scaler, ScalerOptions
from halfstep.step.schedule import PlateauFactor, Schedule, ScheduleOptions, build_schedule
from halfstep.step.snapshots import Snapshots
from halfstep.step.step import GuardedStep
from halfstep.step.tables import Values
from halfstep_train.config.schema import LogConfig, RunConfig, ScheduleConfig, TrainConfig
from halfstep_train.config.section import Section, fill_from_settings
from halfstep_train.data.loader import Loader
from halfstep_train.models.initial_values import skip_initialisation
from halfstep_train.run.folder import make_paths_absolute
from halfstep_train.run.frozen_modules import get_modules, place_frozen_
from halfstep_train.run.multi_rank import ShardedModel, connect_ranks, gather_samples, shard_frozen_, synchronise_norms
from halfstep_train.run.validate import EarlyStopping
from halfstep_train.tune.channels_last import to_channels_last_, wants_channels_last
from halfstep_train.tune.choose import find_asked_mode, measure_fp8_gains
from halfstep_train.tune.modes import Mode, Region, compile_region, repeats_blocks
from halfstep_train.tune.trials import MemorySetting, count_total_steps, make_optimizer
from halfstep_train.workloads import KINDS, build
from halfstep_train.workloads.base.kind import Export, Unit
from halfstep_train.workloads.base.workload import Group, Phase, Workload


@dataclass(kw_only=True, slots=True)
class Assembly:
    """Everything that a run trains with, connected and placed on its device."""

    name: str  # of the workload, or its import path
    train: TrainConfig
    log: LogConfig
    plan: Plan
    workload: Workload
    model: nn.Module
    device: torch.device
    mode: Mode | None  # how steps run; None (eager) before it is chosen
    region: Region  # forward and loss, compiled when first called
    eager: Region  # the same as it is
    step: GuardedStep | PhasedStep
    values: Values
    phases: tuple[AssembledPhase, ...] = ()  # in order; without phases `step`, `region` and `eager` are the only ones
    guard: Guard
    holds: bool  # whether nothing is committed after a fault until its step is saved
    snapshots: Snapshots | None
    plateau: PlateauFactor | None
    stopping: EarlyStopping
    train_loader: Loader
    val_loader: Loader
    total_steps: int
    unit: Unit  # what throughput counts
    export: Export | None  # writes the best weights for other programs
    recorder: Recorder | None = None  # stores the step of a fault as a capsule; set before the run begins
    world: World | None = None  # the ranks that train this model together; None for a single one
    sharded: ShardedModel | None = None  # if they divide it among them

    @property
    def call(self) -> Callable[..., Any]:
        """Return how a function that uses the model's parameters is called outside of steps; by every rank."""
        return self.sharded.call if self.sharded is not None else lambda function, *arguments: function(*arguments)

    def ask_to_stop(self) -> None:
        """Let the other ranks know with the next step that this one was asked to stop."""
        steps = self.step.steps.values() if isinstance(self.step, PhasedStep) else [self.step]
        for step in steps:
            if step.ranks is not None:
                step.ranks.ask_to_stop()


def decide_plan(config: RunConfig, workload: Workload, hardware: Hardware) -> Plan:
    """Decide the precision plan of a built workload, with one row per module."""
    gains = measure_fp8_gains(config.precision, config.train, workload, hardware)
    return decide(
        config.precision,
        hardware,
        workload.model,
        fragile=workload.fragile,
        fp8_gains=gains,
        frozen=get_modules(workload.frozen),
    )


def assemble(config: RunConfig, workload: Workload, plan: Plan, world: World | None = None) -> Assembly:
    """Place the model as planned and connect it with loaders, optimizer, step and guard.

    `world` holds the ranks that train together; None: a single one.
    """
    train, setting = config.train, MemorySetting(**plan.memory)
    device = torch.device(plan.device)
    shards = plan.shards and world is not None
    model = workload.model
    if world is not None and train.sync_batch_norm:
        model = synchronise_norms(model, device)
    model = place_model(config, model, plan, on_host=shards)
    place_frozen_(train.channels_last, config.workload, workload.frozen, plan)
    if shards:
        shard_frozen_(workload, plan, device)
    recompute = "blocks" if train.activation_checkpointing and setting.recompute == "none" else setting.recompute
    # Models with their own support for recomputation switch it on; in others the repeated blocks are wrapped.
    if setting.recompute != "none" or plan.blocks:
        recompute_blocks_(model, recompute, plan.blocks)
    eager = workload.make_region(model)
    # The search may pick different kernels from one start to the next, which sum in different orders.
    tunes_kernels = plan.tunes_kernels and not train.deterministic
    to_compiled = partial(
        compile_region,
        tunes_kernels=tunes_kernels,
        activation_budget=setting.activation_budget,
        blocks=workload.blocks,
        is_repeated=repeats_blocks(model, plan.granted),
    )
    train_loader, val_loader = _build_loaders(config, workload, world)
    length = Length.of(train, len(train_loader))
    values = Values(workload.values, device)
    region = to_compiled(eager)
    # With phases each phase wraps its own region in DDP, over the parameters that it trains.
    ranks: Ranks | Literal["alone"] = "alone"
    sharded = ShardedModel(train, model, plan, world, device) if shards and world is not None else None
    if sharded is not None:
        eager, region, ranks = sharded.connect(eager, plan, device, tunes_kernels=tunes_kernels)
    elif not workload.phases:
        eager, region, ranks = connect_ranks(world, train, model, (eager, region), device)
    phases, phased = assemble_phases(config, workload, model, plan, setting, length, to_compiled, values, world)
    ema_options = config.ema.model_dump(exclude={"enabled"})
    step = phased or make_step(
        config,
        model,
        plan,
        setting,
        length,
        ema=Ema(model, parts=workload.ema_parts, **ema_options) if config.ema.enabled else None,
        values=values,
        groups=workload.groups,
        ranks=ranks,
    )
    kind = KINDS.of(config.workload)
    return Assembly(
        name=config.workload,
        train=train,
        log=config.log,
        plan=plan,
        workload=workload,
        model=model,
        device=device,
        mode=find_asked_mode(train, plan),
        region=region,
        eager=eager,
        step=step,
        values=values,
        phases=phases,
        guard=_build_guard(config, plan, workload, world),
        holds=config.guard.hold,
        snapshots=_build_snapshots(config, workload),
        plateau=_build_plateau(config, workload),
        stopping=EarlyStopping(mode=workload.mode, patience=train.early_stopping_patience),
        train_loader=train_loader,
        val_loader=val_loader,
        total_steps=length.total_steps,
        unit=kind.make_unit(config, workload.store),
        export=kind.make_export(config, workload.store),
        world=world,
        sharded=sharded,
    )


def build_workload(config: RunConfig, store: dict[str, Any] | None = None) -> Workload:
    """Build the workload with seeded weights, or for a stored run with what its checkpoint stored about the data.

    With a `store` weights stay uninitialised: the caller loads all of them from the checkpoint.
    """
    seed_everything(config.train.seed)
    with nullcontext() if store is None else skip_initialisation():
        return build(config, store)


def apply_settled(config: RunConfig, workload: Workload) -> RunConfig:
    """Return the config with the settings that the data decided, so that a stored run does not decide them again."""
    for path, value in workload.settled.items():
        section, name = path.split(".")
        config = config.replace(**{section: {name: value}})
    return config


def place_model(config: RunConfig, model: nn.Module, plan: Plan, *, on_host: bool = False) -> nn.Module:
    """Move the model to its device, in the plan's storage, compute format and memory layout.

    A model that ranks divide stays `on_host`: it may not fit the device as a whole. FSDP2 cuts contiguous weights only.
    """
    model = plan.apply(model if on_host else model.to(torch.device(plan.device)))
    is_wanted = wants_channels_last(config.train.channels_last, config.workload, plan, model)
    return to_channels_last_(model) if not on_host and is_wanted else model


def _build_loaders(config: RunConfig, workload: Workload, world: World | None) -> tuple[Loader, Loader]:
    size, seed, workers = config.train.batch_size, config.train.seed, config.data.num_workers
    # Each rank loads its own rows of every global batch.
    part = (world.rank, world.size) if world is not None else (0, 1)
    train = Loader(workload.train_samples, batch_size=size, seed=seed, num_workers=workers, shuffle=True, part=part)
    val_size = config.train.val_batch_size or size
    val = Loader(workload.val_samples, batch_size=val_size, seed=seed, num_workers=workers, shuffle=False, part=part)
    return train, val


def _build_guard(config: RunConfig, plan: Plan, workload: Workload, world: World | None) -> Guard:
    options = fill_from_settings(GuardOptions, config.guard)
    names = [phase.name for phase in workload.phases]
    how: dict[str, Any] = {"scaling": plan.needs_loss_scaling, "min_scale": config.scaler.min_scale}
    guard = PhasedGuard(options, names, **how) if names else Guard(options, **how)
    if world is not None:
        guard.complete = partial(gather_samples, world)
    return guard


def _build_snapshots(config: RunConfig, workload: Workload) -> Snapshots | None:
    guard = config.guard
    if guard.on_fault != "rollback":
        return None
    # Other phases commit while a rare phase reaches its limit of consecutive faults.
    longest = max((phase.every for phase in workload.phases), default=0) * guard.max_consecutive
    return Snapshots(every=guard.snapshot_every, margin=guard.margin, lag=LAG + longest)


def _build_plateau(config: RunConfig, workload: Workload) -> PlateauFactor | None:
    s = config.schedule
    if s.name != "plateau":
        return None
    return PlateauFactor(mode=workload.mode, cut=s.factor, patience=s.patience, floor=max(s.min_factor, 1e-6))


# --- phases: each has its own optimizer, step and region; all share one loss scaler ---


@dataclasses.dataclass(slots=True)
class AssembledPhase:
    """One of several alternating phases, with the step that trains its parameters."""

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
) -> tuple[tuple[AssembledPhase, ...], PhasedStep | None]:
    """Assemble the phases in order over the placed model, and the step that runs all of them; refuse phases that could
    never train."""
    if not workload.phases:
        return (), None
    refuse_unfit_phases(workload.phases, model)
    counted = next((phase.name for phase in workload.phases if _is_countable(phase, workload)), "")
    averaged = _split_averaged_names(config, workload, model)
    scaler = SharedScaler(
        torch.device(plan.device),
        enabled=plan.needs_loss_scaling,
        options=fill_from_settings(ScalerOptions, config.scaler),
        accumulate=config.train.accumulate,
    )
    assembled = []
    for phase in workload.phases:
        own = configure_phase(config, phase)
        names = averaged[phase.name]
        # A phase may replace forward; its loss always replaces the workload's.
        named = dataclasses.replace(workload, forward=phase.forward or workload.forward, loss=phase.loss)
        plain = named.make_region(model, name=phase.name)
        trained = [p for name, p in model.named_parameters() if p.requires_grad and has_parameter(phase, name)]
        device = torch.device(plan.device)
        eager, region, ranks = connect_ranks(world, config.train, model, (plain, compiled(plain)), device, trained)
        step = make_step(
            own,
            model,
            plan,
            setting if own.optimizer.name == "adamw" else dataclasses.replace(setting, optimizer_bits=32),
            # A phase's schedule counts only the iterations in which it is due.
            Length(max(phase.count_due(length.total_steps), 1), max(length.steps_per_epoch // phase.every, 1)),
            parts=phase.parameters,
            scaler=scaler,
            ema=Ema(model, parts=names, **config.ema.model_dump(exclude={"enabled"})) if names else None,
            values=values,
            groups=phase.groups,
            ranks=ranks,
            kind=PhaseStep,
        )
        assembled.append(AssembledPhase(phase, step, region, eager, is_counted=phase.name == counted))
    return tuple(assembled), PhasedStep({own.phase.name: own.step for own in assembled}, scaler)


def configure_phase(config: RunConfig, phase: Phase) -> RunConfig:
    return override_sections(config, f"phase {phase.name}", phase.optimizer, phase.schedule)


def make_all_due(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """Return the phases as due in every iteration: a trial measures the largest and slowest iteration."""
    return tuple(dataclasses.replace(phase, every=1, from_step=0) for phase in phases)


def refuse_unfit_phases(phases: Sequence[Phase], model: nn.Module) -> None:
    """Refuse unknown names, parameters that no phase trains, and iterations without a phase."""
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ConfigError(f"two phases have the same name: {', '.join(names)}", fix="give each a different name")
    for phase in phases:
        for part in phase.parameters:
            refuse_unknown(part, model, f"phase {phase.name} trains")
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    idle = [name for name in trained if not any(has_parameter(phase, name) for phase in phases)]
    if idle:
        raise ConfigError(
            f"no phase trains {idle[0]}" + (f" and {len(idle) - 1} more" if len(idle) > 1 else ""),
            why="it would silently keep its initial values",
            fix="name its module in a phase's parameters, or freeze it with requires_grad_(False)",
        )
    # Which phases are due repeats after the least common multiple of their periods, once all have started.
    horizon = max(phase.from_step for phase in phases) + math.lcm(*(phase.every for phase in phases))
    for iteration in range(horizon):
        if not any(phase.is_due(iteration) for phase in phases):
            raise ConfigError(
                f"no phase is due in iteration {iteration}",
                why="the iteration would read data without training on it",
                fix="give one phase every=1 and from_step=0, or let phases alternate",
            )


def has_parameter(phase: Phase, parameter: str) -> bool:
    """True if the phase trains this parameter; a phase without names trains all."""
    return not phase.parameters or is_within(parameter, phase.parameters)


def _is_countable(phase: Phase, workload: Workload) -> bool:
    """True if training metrics can count the outputs of a phase."""
    if phase.counted is not None:
        return phase.counted
    return phase.forward is None or phase.forward is workload.forward


def _split_averaged_names(config: RunConfig, workload: Workload, model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, by phase, the parameters and buffers whose average it updates; shared ones belong to the first phase."""
    left = [name for name, _ in (*model.named_parameters(), *model.named_buffers())] if config.ema.enabled else []
    if workload.ema_parts:
        left = [name for name in left if is_within(name, workload.ema_parts)]
    found: dict[str, tuple[str, ...]] = {}
    for phase in workload.phases:
        found[phase.name] = tuple(name for name in left if has_parameter(phase, name))
        left = [name for name in left if name not in set(found[phase.name])]
    return found


# --- the plan of a config that is not run, for this hardware or for a GPU given by name ---


DEMO_PLAN_NOTE = (
    "no data folder was given: this is the plan of the DEMO, whose model may be smaller; give yours with --data-dir DIR"
)


def plan_config(config: RunConfig, *, gpu: str | None = None) -> Plan:
    """Build the model as training would, on demo data if no folder is given, and decide its plan."""
    hardware = look_up_gpu(gpu) if gpu else probe(config.device)
    with provide_data(config) as with_data, skip_initialisation():
        decided = decide_plan(with_data, build_workload(with_data), hardware)
    notes = [DEMO_PLAN_NOTE] if is_demo(config) else []
    if gpu and decided.granted == "fp8":
        notes.append(f"no layer was timed: a run on {decided.device_name} uses bf16 where fp8 is not faster")
    return dataclasses.replace(decided, warnings=(*decided.warnings, *notes))


def is_demo(config: RunConfig) -> bool:
    return config.data.dir is None and KINDS.of(config.workload).demo is not None


@contextmanager
def provide_data(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the config with a data folder: its own, or temporary demo data."""
    config = make_paths_absolute(config)
    if not is_demo(config):
        yield config
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "demo"
        KINDS.of(config.workload).write_demo(config.workload, data, seed=config.train.seed)
        yield config.replace(data={"dir": str(data)})


# --- the step: optimizer, parameter groups and schedules ---


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
    config: RunConfig,
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
    guard, train = config.guard, config.train
    optimizer, schedules = build_optimizer(config, model, setting, length, parts=parts, groups=groups)
    step = kind(
        model,
        optimizer,
        plan,
        accumulate=train.accumulate,
        clip=Clip(limit=train.clip_norm, kind=train.clip_type),
        schedules=schedules,
        scaler=scaler or fill_from_settings(ScalerOptions, config.scaler),
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
    config: RunConfig,
    model: nn.Module,
    setting: MemorySetting,
    length: Length,
    *,
    parts: tuple[str, ...] = (),
    groups: tuple[Group, ...] = (),
) -> tuple[Optimizer, list[Schedule]]:
    """Build the optimizer over the parameters in `parts`, and its schedule or one schedule per parameter group."""
    o, train = config.optimizer, config.train
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
        own = config
        if group is not None:
            # Without the group's learning rate, which its parameter groups get below.
            decay = {} if group.weight_decay is None else {"weight_decay": group.weight_decay}
            own = override_sections(config, f"the group of {', '.join(group.modules)}", decay, group.schedule)
        made = make_parameter_groups(model, own.optimizer.weight_decay, decay_all=o.decay_norms_and_biases, parts=names)
        lr = {} if group is None or group.lr is None else {"lr": group.lr}
        own_groups += [{**found, **lr} for found in made]
        schedules += [build_schedule(_make_schedule_options(own.schedule, length))] * len(made)
    half = {"rounding": config.precision.rounding, "seed": train.seed}
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
    config: RunConfig, who: str, optimizer: Mapping[str, Any], schedule: Mapping[str, Any]
) -> RunConfig:
    """Return the run's config with the overrides of a workload's phase or group."""
    if schedule.get("name", config.schedule.name) == "plateau" != config.schedule.name:
        raise ConfigError(
            f"{who} asks for the plateau schedule",
            why="a plateau of the validation metric cuts all learning rates together",
            fix="schedule.name=plateau in the config, or another schedule here",
        )
    changed = {
        "optimizer": _change_section(config.optimizer, optimizer, f"{who}: optimizer"),
        "schedule": _change_section(config.schedule, schedule, f"{who}: schedule"),
    }
    return config.model_copy(update=changed)


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
    more: dict[str, Any] = {"gamma": s.factor, "total_steps": total_steps, "warmup_steps": warmup}
    if not isinstance(s.milestones, tuple) or not s.milestones:
        more |= {"milestones": (), "step_size": s.milestones or CUT_EVERY}
    return fill_from_settings(ScheduleOptions, s, **more)
