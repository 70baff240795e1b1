"""The rules behind a suggestion: batch from memory and data, learning rate from the batch, workers from decode speed.

Each gives settings by path, and the sentence that explains them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.config.training import ADAM_LIKE
from halfstep.errors import counted, format_bytes, suggested
from halfstep.guide.data import DataLook
from halfstep.guide.trial import Trial
from halfstep.hardware.facts import Hardware
from halfstep.run.memory.sizing import StepCost

STEPS_AN_EPOCH = 10
"""Fewer optimizer steps than this in an epoch, and a small set learns too slowly for its epochs."""
SMALLEST_BATCH = 8
"""Not even for that: BatchNorm's statistics over fewer samples are noise (Wu and He 2018, figure 1)."""
FORWARD_SHARE = 1 / 3
"""Of a training step's time: backward is two products for one of forward."""
LARGEST_GROWTH = 4
"""How far `fast` enlarges its preset's batch: much larger ones need more epochs (McCandlish et al. 2018)."""
TryOut = Callable[[RunConfig, Mapping[str, Any], int], Trial | None]
TIME_UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What is known when a suggestion is made."""

    workload: str
    goal: str
    hardware: Hardware
    num_cores: int
    look: DataLook | None
    """None for a workload of the user's own, whose data only it can read."""
    data_dir: str | None
    device: str | None
    """What the user named, to be written down; None leaves the choice to the run."""
    try_out: TryOut | None = None
    """How a suggestion is tried on the device; None: not at all, and what a trial would measure is estimated."""

    @property
    def is_demo(self) -> bool:
        return self.look is not None and self.look.source == "demo"

    @property
    def memory_bytes(self) -> int:
        return self.hardware.memory_free_bytes or self.hardware.memory_total_bytes


def batch(
    situation: Situation, preset: str, start: RunConfig, cost: StepCost
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Batch and accumulation: the recipe's samples per step, more for `fast`, limited by the data and the memory."""
    assert situation.look is not None
    num_train, memory = situation.look.num_train, situation.memory_bytes
    recipe = start.train.batch_size * start.train.accumulate
    fits = _power_of_two(cost.largest_batch(memory)) if memory else recipe
    # A CPU is no faster with a larger batch.
    grows = preset == "fast" and not situation.is_demo and situation.hardware.kind != "cpu"
    grown = max(recipe, min(recipe * LARGEST_GROWTH, fits)) if grows else recipe
    # A quarter where the recipe itself is small: a U-Net's BatchNorm sees many pixels of few samples.
    smallest = min(SMALLEST_BATCH, max(2, recipe // 4), num_train)
    by_data = _power_of_two(max(num_train // STEPS_AN_EPOCH, smallest))
    a_step = min(grown, by_data)
    micro = max(1, min(start.train.batch_size if preset == "lowmem" else a_step, a_step, fits))
    accumulate = math.ceil(a_step / micro)
    if a_step < grown:
        steps = math.ceil(num_train / a_step)
        why = f"less than the recipe's {recipe}: {counted(num_train, 'sample')} make {counted(steps, 'step')} per epoch"
    else:
        why = f"the recipe's {recipe}" + (f" times {a_step // recipe}" if a_step > recipe else "")
    times = f" x {accumulate} accumulated" if accumulate > 1 else ""
    facts = [("batch", f"{micro}{times} ({why})"), ("memory", _memory(cost, micro, fits, memory))]
    return {"train.batch_size": micro, "train.accumulate": accumulate}, facts


def _memory(cost: StepCost, micro: int, fits: int, memory: int) -> str:
    a_sample = f"{format_bytes(cost.fixed_bytes)} + {format_bytes(cost.sample_bytes)} a sample"
    needed = f"about {format_bytes(cost.bytes_at(micro))} ({a_sample}; an estimate)"
    if not memory:
        return f"{needed}; this device does not say how much it has"
    if not fits:
        return f"{needed}: NOT EVEN ONE SAMPLE FITS {format_bytes(memory)}; smaller data.image_size or model"
    if fits > LARGEST_GROWTH * micro:
        return f"{needed} of {format_bytes(memory)} free: far more than enough"
    return f"{needed}; {format_bytes(memory)} free would take a batch of {fits:,} (an estimate)"


def _power_of_two(number: int) -> int:
    """The largest one that is not larger; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def learning_rate(start: RunConfig, samples: int) -> tuple[dict[str, Any], tuple[str, str]]:
    """Linear in the samples of a step for SGD (Goyal et al. 2017), their root for Adam (Malladi et al. 2022)."""
    optimizer, recipe = start.optimizer, start.train.batch_size * start.train.accumulate
    if optimizer.lr_per:
        peak, per, rule = optimizer.peak_lr(samples), optimizer.lr_per, "linear, as this recipe has it"
        paths: dict[str, Any] = {}
        shown = f"{optimizer.lr:g} x {samples}/{per}"
    elif optimizer.name in ADAM_LIKE:
        peak, rule = optimizer.lr * math.sqrt(samples / recipe), "square root of the batch, for Adam"
        shown, paths = f"{optimizer.lr:g} x sqrt({samples}/{recipe})", {"optimizer.lr": float(f"{peak:.4g}")}
    else:
        peak, rule = optimizer.lr * samples / recipe, "linear in the batch, for SGD"
        shown, paths = f"{optimizer.lr:g} x {samples}/{recipe}", {"optimizer.lr_per": recipe}
    if samples == recipe and not optimizer.lr_per:
        return {}, ("learning rate", f"{optimizer.lr:g}, the recipe's own at {counted(samples, 'sample')} per step")
    return paths, ("learning rate", f"{peak:.4g} = {shown} ({rule})")


def workers(situation: Situation, start: RunConfig, trained: Rate) -> tuple[dict[str, Any], tuple[str, str]]:
    """As many as feed the device at the rate at which it trains, at most one a core."""
    look, cores = situation.look, situation.num_cores
    assert look is not None
    reading = f"one process reads {look.decoded_per_s:,.0f} samples/s (measured)"
    if situation.is_demo:
        return {}, ("workers", f"{start.data.num_workers}: the demo is small; {reading}")
    if trained.per_s is None:
        return {"data.num_workers": cores}, ("workers", f"{cores}: one per core; {reading}")
    workers = max(1, min(cores, math.ceil(trained.per_s / look.decoded_per_s)))
    fact = f"{workers} of {cores} cores: {reading}, the device {trained.words}"
    # Of an upper limit, a training step reaches a quarter to a half.
    if workers * look.decoded_per_s < trained.per_s / (4 if trained.is_limit else 1) and look.counts:
        fact += f"; reading may be the limit: data.cache=true, or `{suggested('pack', situation.data_dir)}`"
    return {"data.num_workers": workers}, ("workers", fact)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How many samples per second the device trains, and how that is known."""

    per_s: float | None
    """None: nothing was measured."""
    is_limit: bool
    """Whether it is only what no training can beat."""
    words: str


def training_rate(situation: Situation, cost: StepCost, precision: str, trial: Trial | None) -> Rate:
    """That of a trial; else the best rate of a matmul or convolution here, which training never reaches."""
    if trial is not None:
        rate = f"{trial.samples_per_s:,.{0 if trial.samples_per_s >= 10 else 1}f} samples/s"
        words = f"trained {rate} (measured: whole eager steps of {trial.batch_size} samples)"
        return Rate(per_s=trial.samples_per_s, is_limit=False, words=words)
    rates = [m.tflops for m in situation.hardware.measurements if m.format == precision]
    if not rates:
        return Rate(per_s=None, is_limit=True, words="was not measured")
    per_s = max(rates) * 1e12 / cost.sample_flops()
    words = f"trains at most {per_s:,.0f} samples/s (an estimate from measured matmuls and convolutions)"
    return Rate(per_s=per_s, is_limit=True, words=words)


def duration(situation: Situation, config: RunConfig, trained: Rate) -> list[tuple[str, str]]:
    """How long training, validation and reading will take; nothing where nothing was measured."""
    look, train = situation.look, config.train
    if trained.per_s is None or look is None:
        return []
    validated = train.epochs / train.validate_every * look.num_val
    computing = (train.epochs * look.num_train + validated * FORWARD_SHARE) / trained.per_s
    on_cpu, readers = situation.hardware.kind == "cpu", config.data.num_workers
    # On a CPU workers take their time from the computing, on all cores; elsewhere the slower one sets the pace.
    rate = look.decoded_per_s * ((situation.num_cores if readers else 1) if on_cpu else max(1, readers))
    reading = (train.epochs * look.num_train + validated) / rate
    seconds = computing + reading if on_cpu else max(computing, reading)
    shown = next(f"{seconds / unit:.1f} {name}" for unit, name in TIME_UNITS if seconds >= unit or unit == 1)
    shown += f" for {counted(train.epochs, 'epoch')}"
    if trained.is_limit:
        return [("time", f"at least {shown}, most likely a few times as long (an estimate)")]
    compiled = "; compiled it may be shorter" if train.fast == "compile" else ""
    return [("time", f"about {shown} (an estimate from measured rates{compiled})")]
