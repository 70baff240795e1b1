"""The rules behind a suggestion: batch from memory and data, learning rate from the batch, workers from decode speed.

Each gives settings by path, and the sentence that explains them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.config.training import ADAM_LIKE
from halfstep.hardware.facts import Hardware
from halfstep.measure.memory import format_bytes
from halfstep.run.guide_data import DataLook
from halfstep.run.guide_memory import StepCost

STEPS_AN_EPOCH = 10
"""Fewer optimizer steps than this in an epoch, and a small set learns too slowly for its epochs."""
LARGEST_GROWTH = 4
"""How far `fast` enlarges its preset's batch: much larger ones need more epochs (McCandlish et al. 2018)."""
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

    @property
    def is_demo(self) -> bool:
        return self.look is not None and self.look.source == "demo"

    @property
    def memory_bytes(self) -> int:
        return self.hardware.memory_free_bytes or self.hardware.memory_total_bytes


def batch(
    situation: Situation, preset: str, start: RunConfig, cost: StepCost
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Batch and accumulation: the recipe's samples a step, more for `fast`, limited by the data and the memory."""
    assert situation.look is not None
    num_train, memory = situation.look.num_train, situation.memory_bytes
    recipe = start.train.batch_size * start.train.accumulate
    fits = _power_of_two(cost.largest_batch(memory)) if memory else recipe
    # A CPU is no faster with a larger batch.
    grows = preset == "fast" and not situation.is_demo and situation.hardware.kind != "cpu"
    grown = max(recipe, min(recipe * LARGEST_GROWTH, fits)) if grows else recipe
    by_data = max(1, _power_of_two(num_train // STEPS_AN_EPOCH))
    a_step = min(grown, by_data)
    micro = max(1, min(start.train.batch_size if preset == "lowmem" else a_step, a_step, fits))
    accumulate = math.ceil(a_step / micro)
    if a_step < grown:
        why = f"so that {num_train:,} samples make {STEPS_AN_EPOCH} steps an epoch or more"
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
    return f"{needed}; {format_bytes(memory)} would take a batch of {fits:,}"


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
        return {}, ("learning rate", f"{optimizer.lr:g}, the recipe's own at {samples} samples a step")
    return paths, ("learning rate", f"{peak:.4g} = {shown} ({rule})")


def workers(
    situation: Situation, start: RunConfig, cost: StepCost, precision: str
) -> tuple[dict[str, Any], tuple[str, str]]:
    """As many as could feed the device at the best rate that was measured on it, at most one a core."""
    look, cores = situation.look, situation.num_cores
    assert look is not None
    reading = f"one process reads {look.decoded_per_s:,.0f} samples/s (measured)"
    if situation.is_demo:
        return {}, ("workers", f"{start.data.num_workers}: the demo is small; {reading}")
    trained = trained_per_s(situation.hardware, cost, precision)
    if trained is None:
        return {"data.num_workers": cores}, ("workers", f"{cores}: one a core; {reading}")
    workers = max(1, min(cores, math.ceil(trained / look.decoded_per_s)))
    limit = f"at its measured rate the device trains at most {trained:,.0f} samples/s"
    fact = f"{workers} of {cores} cores: {reading}, {limit}"
    if workers * look.decoded_per_s < trained / 4 and look.counts:
        # A training step reaches a quarter to a half of a matmul's rate.
        fact += f"; reading may be the limit: data.cache=true, or `halfstep pack {situation.data_dir}`"
    return {"data.num_workers": workers}, ("workers", fact)


def trained_per_s(hardware: Hardware, cost: StepCost, precision: str) -> float | None:
    """Samples a second if training ran at the best rate that was measured, which it never does; None: not measured."""
    rates = [m.tflops for m in hardware.measurements if m.format == precision]
    return max(rates) * 1e12 / cost.sample_flops if rates else None


def least_time(situation: Situation, config: RunConfig, cost: StepCost, precision: str) -> list[tuple[str, str]]:
    """The training time that no run can beat on this device."""
    trained = trained_per_s(situation.hardware, cost, precision)
    if trained is None or situation.look is None:
        return []
    seconds = config.train.epochs * situation.look.num_train / trained
    shown = next(f"{seconds / unit:.1f} {name}" for unit, name in TIME_UNITS if seconds >= unit or unit == 1)
    return [("time", f"{config.train.epochs} epochs take at least {shown}, most likely a few times as long")]
