"""The training problem that is timed: a workload's model, loss and preparation on random data, the same for all tools.

A peer such as Lightning has its own loop, so a runner trains many steps and calls back after each one. The time between
two calls is the time of a step.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from halfstep.errors import ConfigError, MemoryLimitError, format_bytes
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.ladder import explain_lack
from halfstep.step.batches import count_samples
from halfstep.step.randomness import seed_everything
from halfstep.step.tables import write_values_
from halfstep_train.config.load import Loaded
from halfstep_train.config.schema import RunConfig, ScalerConfig
from halfstep_train.data.loader import Key
from halfstep_train.report.config_view import format_setting
from halfstep_train.run.assemble import build_workload, provide_data
from halfstep_train.run.memory.sizing import predict_step_cost
from halfstep_train.tune.trials import load_first_batch
from halfstep_train.workloads import KINDS, load
from halfstep_train.workloads.base.kind import Kind, Unit, load_part
from halfstep_train.workloads.base.workload import Workload

Batch = dict[str, Tensor]
AfterStep = Callable[[], None]
"""Called by a runner after each optimizer step is queued on the device; must not wait for the device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One model, one batch shape and one loss, the same for every runner."""

    config: RunConfig
    make_model: Callable[[], nn.Module]
    """Returns a model with the same seeded weights each time, on the host, in fp32 and contiguous layout."""
    host_batch: Batch
    """A batch as a loader delivers it: in (pinned) host memory, copied to the device in every step."""
    prepare: Callable[[Batch], Batch]
    """Prepares a batch on the device for the model, without augmentation."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """Forward and loss of a prepared batch, including fp32 islands."""
    device: torch.device
    lr: float
    weight_decay: float
    clip_norm: float
    samples: int
    """Samples per step."""
    num_phases: int = 1
    """Optimizer steps per iteration; a peer's loop makes one."""
    unit: Unit = Unit()
    """What throughput counts."""
    holds_tensors: bool = False
    """True if the loss reads further tensors on the device (frozen modules, scheduled values)."""


class Runner(Protocol):
    """Trains a problem: halfstep in one mode, or a peer."""

    name: str
    """`halfstep`, `lightning`, `accelerate`, `plain`."""
    variant: str
    """halfstep: `eager`, `compile`, `graph`; a peer: `documented`, `tuned` or `graphs`."""
    precision: str
    """The canonical name: fp32, tf32, bf16, fp16, fp8."""

    def train(self, steps: int, after_step: AfterStep) -> float:
        """Train this many steps from the seeded start, call `after_step` after each, and return the last loss."""
        ...


NUM_BATCHES = 10_000
"""Length of the random data set (that of ImageNet in batches of 128): `auto` compares the cost of trials with it."""


class RandomSamples:
    """A data set that repeats the samples of one batch."""

    def __init__(self, batch: Batch) -> None:
        self.values = batch  # not `batch`: samples with that name make whole batches themselves
        self.size = count_samples(batch)

    def __len__(self) -> int:
        return NUM_BATCHES * self.size

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        del key
        return {name: tensor[index % self.size] for name, tensor in self.values.items() if name != "index"}


def build_problem(config: RunConfig, device: torch.device) -> Problem:
    """Build the problem of a config: weights, one pinned batch, preparation and loss."""
    kind = KINDS.of(config.workload)
    workload = build_random_workload(config)
    for part in workload.frozen.values():  # peers autocast them; ours are built again and placed by the plan
        part.module.to(device).eval().requires_grad_(False)
    write_values_(workload.values, 0, device)
    made_up = kind.synthetic
    batch = made_up.make_batch(config, workload.store) if made_up else load_first_batch(config.train, workload)
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    samples = config.train.batch_size
    return Problem(
        config=config,
        make_model=lambda: copy.deepcopy(workload.model),
        host_batch=batch,
        prepare=_choose_preparation(kind, workload, device),
        loss=lambda model, prepared: workload.compute_loss(workload.forward(model, prepared), prepared)[0],
        device=device,
        lr=config.optimizer.compute_peak_lr(samples),
        weight_decay=config.optimizer.weight_decay,
        clip_norm=config.train.clip_norm,
        samples=samples,
        num_phases=max(len(workload.phases), 1),
        unit=kind.make_unit(config, workload.store),
        holds_tensors=bool(workload.frozen or workload.values),
    )


def build_random_workload(config: RunConfig) -> Workload:
    """Build the workload as a run would, with its seeded weights, but without augmentation.

    A workload without synthetic data trains on its first real batch, prepared as in training.
    """
    synthetic = KINDS.of(config.workload).synthetic
    if synthetic is None:
        with provide_data(config) as with_data:
            workload = build_workload(with_data)
            samples = RandomSamples(load_first_batch(with_data.train, workload))
        return replace(workload, train_samples=samples, val_samples=samples)
    seed_everything(config.train.seed)
    store = synthetic.make_store(config)
    return synthetic.build(config, store, RandomSamples(synthetic.make_batch(config, store)))


def _choose_preparation(kind: Kind, workload: Workload, device: torch.device) -> Callable[[Batch], Batch]:
    if kind.synthetic is not None and kind.synthetic.peer_prepare is not None:
        return load_part(kind.synthetic.peer_prepare)(device)
    return lambda batch: workload.prepare_batch(batch, key=Key.for_training(0, 0), training=True)


MATMUL_FORMAT = {"fp8": "fp8_e4m3", "bf16-true": "bf16"}
"""Name of a precision's format in the measurements, if it differs."""


def count_step_flops(problem: Problem) -> int:
    """Count the FLOPs of matmuls, convolutions and attention, forward and backward.

    Uses meta tensors if only the model computes. Returns 0 for a workload with several phases: its training arithmetic
    differs from that of its validation loss.
    """
    if problem.num_phases > 1:
        return 0
    place = problem.device if problem.holds_tensors else torch.device("meta")
    received = {name: tensor.to(problem.device) for name, tensor in problem.host_batch.items()}
    prepared = {name: tensor.to(place) for name, tensor in problem.prepare(received).items()}
    model = problem.make_model().to(place).train()
    with FlopCounterMode(display=False) as counter:
        problem.loss(model, prepared).backward()
    return int(counter.get_total_flops())


def compute_floor_ms(flops: int, hardware: Hardware, precision: str) -> float | None:
    """Return the shortest step this arithmetic allows; None if the format's rate was not measured."""
    measured = hardware.find_measurement("matmul", MATMUL_FORMAT.get(precision, precision))
    return flops / (measured.tflops * 1e9) if flops and measured else None


def refuse_too_large(config: RunConfig, precisions: Sequence[str], modes: Sequence[str], hardware: Hardware) -> None:
    """Raise MemoryLimitError if the largest row would need more than the free memory of a CPU."""
    free_bytes, synthetic = hardware.memory_free_bytes, KINDS.of(config.workload).synthetic
    if hardware.kind != "cpu" or free_bytes is None or synthetic is None:
        return
    precision = next((name for name in precisions if name in ("fp32", "tf32")), precisions[0])
    cost = predict_step_cost(config, synthetic.make_store(config), hardware, precision)
    batch_size = config.train.batch_size
    # Compiled or recomputing rows may keep fewer activations than counted.
    keeps_activations = "eager" in modes and config.train.memory != "low"
    needed = cost.predict_bytes(batch_size if keeps_activations else 0)
    if needed <= free_bytes:
        return
    fits = (free_bytes - cost.fixed_bytes) // cost.sample_bytes
    raise MemoryLimitError(
        f"{config.workload} at batch size {batch_size} needs at least {format_bytes(needed)}, and this machine has "
        f"{format_bytes(free_bytes)} of free memory",
        why=f"{format_bytes(cost.fixed_bytes)} for parameters, gradients and optimizer, "
        f"{format_bytes(cost.sample_bytes)} per sample; the OS would kill the benchmark",
        fix=f"{f'--batch-size {fits} or less' if fits > 0 else 'a smaller model'}, or --device cuda where there is one",
    )


BenchMode = Literal["eager", "compile", "graph", "auto"]
FAST: dict[BenchMode, str] = {"eager": "off", "compile": "compile", "graph": "graph", "auto": "auto"}
"""Value of `train.fast` for each mode."""

COMPARABLE = {
    "optimizer.name": "adamw",
    "optimizer.lr": "1e-4",
    "optimizer.lr_per": "0",
    "optimizer.weight_decay": "0.01",
    "schedule.name": "constant",
    "schedule.warmup_epochs": "0",
    "schedule.warmup_steps": "0",
    "ema.enabled": "false",
}
"""One optimizer and rate for every model and tool; settings of the user take precedence."""
PEER_SETTINGS: dict[str, tuple[object, ...]] = {
    "optimizer.name": ("adamw",),
    "schedule.name": ("constant",),
    "schedule.warmup_epochs": (0,),
    "schedule.warmup_steps": (0, None),
    "train.clip_type": ("l2",),
    "train.deterministic": (False,),
    "ema.enabled": (False,),
    "guard.skip_spikes": (False,),
    "precision.modules": ({},),
    **{f"scaler.{name}": (field.default,) for name, field in ScalerConfig.model_fields.items()},
}
"""Settings that peers do not implement, with the values they train with; the scaler's defaults are torch's."""
UNSTATED = ("default", "demo")
NO_FOLDER = "random"
"""A placeholder: with a data folder a workload uses its full size, without one the small size of its demo."""


def choose_default_precisions(hardware: Hardware) -> tuple[str, ...]:
    """Return the precisions the device supports, except fp8, which changes the results too much to be a default."""
    return tuple(name for name in ("fp32", "tf32", "bf16", "fp16") if not explain_lack(name, hardware))


def choose_default_modes(device: torch.device) -> tuple[BenchMode, ...]:
    return ("eager", "compile", "graph") if device.type == "cuda" else ("eager", "compile")


def load_bench_config(
    target: str, overrides: Sequence[str], flags: Mapping[str, object], *, small: bool, against: Sequence[str] = ()
) -> RunConfig:
    """Load the config of a workload or file; `small` uses the size of the workload's demo, for a CPU."""
    loaded, given = load(target, flags=flags, overrides=overrides), dict(flags)
    makes_data = KINDS.of(loaded.config.workload).synthetic is not None
    if makes_data and not small:
        given = {"data_dir": NO_FOLDER, **flags}
        loaded = load(target, flags=given, overrides=overrides)
    # Only where the user set nothing.
    defaults = [f"{path}={value}" for path, value in COMPARABLE.items() if loaded.origins[path].layer in UNSTATED]
    config = load(target, flags=given, overrides=[*defaults, *overrides]).config
    _refuse_rows_as_settings(loaded)
    if config.train.accumulate > 1:
        raise ConfigError(
            f"train.accumulate={config.train.accumulate} is not supported by bench",
            why="a benchmark times steps of one batch",
            fix="leave it at 1; a step that accumulates N batches takes about N times as long",
        )
    if config.precision.simulate:
        raise ConfigError(
            "precision.simulate=true cannot be timed", why="a simulation shows numerics, not speed", fix="leave it out"
        )
    if against:
        _refuse_what_peers_lack(config)
    return config.replace(data={"dir": None}) if makes_data else config


def _refuse_rows_as_settings(loaded: Loaded) -> None:
    """Raise ConfigError for an override of precision or mode, which the benchmark varies itself."""
    mode = next(mode for mode, fast in FAST.items() if fast == loaded.config.train.fast)
    rows = {"--precisions": ("precision.default", loaded.config.precision.default), "--modes": ("train.fast", mode)}
    for option, (path, value) in rows.items():
        if loaded.origins[path].layer == "override":
            raise ConfigError(
                f"{loaded.origins[path].where} cannot be set for a benchmark",
                why=f"each row has its own value; {option} selects the values",
                fix=f"{option} {value}",
            )


def _refuse_what_peers_lack(config: RunConfig) -> None:
    """Raise ConfigError for settings that peers do not implement: all rows must do the same work."""
    for path, possible in PEER_SETTINGS.items():
        value = operator.attrgetter(path)(config)
        if value not in possible:
            raise ConfigError(
                f"{path}={format_setting(value)}, but peers train with {format_setting(possible[0])}",
                why="all rows must do the same work to be comparable",
                fix=f"leave {path} at {format_setting(possible[0])}, or leave out --against",
            )


def set_precision(config: RunConfig, precision: str) -> RunConfig:
    """Set the precision without fallback: a row must not show the time of another precision."""
    return config.replace(precision={"default": precision, "strict": True})


def set_mode(config: RunConfig, mode: BenchMode) -> RunConfig:
    """Set the mode of the config."""
    return config.replace(train={"fast": FAST[mode]})
