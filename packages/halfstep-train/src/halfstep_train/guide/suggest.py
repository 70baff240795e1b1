"""Suggest two or three configs for a machine, data and a goal, each with reasons and the source of every number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from halfstep.errors import format_bytes, format_count
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.advice import advise
from halfstep.precision.decide import decide
from halfstep_train.config.dump import Dumper
from halfstep_train.config.load import nest_paths
from halfstep_train.config.schema import ADAM_LIKE, RunConfig
from halfstep_train.guide.inspect_data import DataSummary
from halfstep_train.run.memory.sizing import Planners, StepCost, predict_step_cost
from halfstep_train.workloads import KINDS, from_dict
from halfstep_train.workloads.base.guiding import choose_side

ORDER = {
    "fast": ("fast", "lowmem", "stable"),
    "quality": ("quality", "fast", "stable"),
    "lowmem": ("lowmem", "fast", "stable"),
    "stable": ("stable", "quality", "lowmem"),
}
"""Presets for each goal: its own first, then alternatives."""
REASONS = {
    "fast": "the fastest precision of this machine, compiled if that is faster, and the shortest recipe",
    "quick": "small data: small images and 20 epochs, the quickest way to a first result",
    "quality": "a long recipe with averaged weights, validated during training",
    "lowmem": "activations are recomputed instead of stored, about a third slower",
    "stable": "strict fp32 and plain eager PyTorch; faults are rolled back instead of ending the run",
}
HOW_IT_RUNS = ("train.fast", "train.memory", "train.activation_checkpointing", "guard.on_fault")
"""Settings of a preset that apply to demo data, which have their own recipe."""
SMALL_SET = 10_000
"""Training images below which `quick` replaces `fast`: its recipe is for a few thousand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One suggested config, with its expected results."""

    name: str
    values: Mapping[str, Any]
    """Content of its file, nested."""
    config: RunConfig
    facts: tuple[tuple[str, str], ...]
    """Names and values to print, the reason first."""

    def to_yaml(self) -> str:
        """Return the file: reasons as comments, then the values."""
        comments = [f"# {name}: {' '.join(value.split())}" for name, value in self.facts]
        text = yaml.dump(dict(self.values), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
        return "\n".join(["# Written by `halfstep guide`. Change what you like.", *comments, text])


def make_suggestions(situation: Situation) -> tuple[Suggestion, ...]:
    """Return the config for the goal and alternatives, without duplicates."""
    found: list[Suggestion] = []
    planners: Planners = {}
    for preset in ORDER[situation.goal]:
        one = _make_suggestion(situation, _adapt_to_small_data(preset, situation), planners)
        if one.config not in [other.config for other in found]:
            found.append(one)
    return tuple(found)


def _adapt_to_small_data(preset: str, situation: Situation) -> str:
    is_small = situation.data.num_train < SMALL_SET
    has_quick = "quick" in KINDS.of(situation.workload).get_schema(situation.workload).presets and not situation.is_demo
    return "quick" if preset == "fast" and is_small and has_quick else preset


def _make_suggestion(situation: Situation, preset: str, planners: Planners) -> Suggestion:
    """Build one suggestion: choose precision, batch and learning rate, each with its reason."""
    precision = decide("fp32" if preset == "stable" else "auto", situation.hardware).granted
    paths = {"precision": precision, **_choose_base_settings(situation, preset)}
    facts = [("why", REASONS[preset]), ("precision", _explain_precision(situation, precision))]
    size_fact = _fit_to_pictures(situation, preset, paths)
    start = _build_config(situation, preset, paths)
    cost = predict_step_cost(start, situation.data.opened.store, situation.hardware, precision, planners)
    size, size_facts = choose_batch(situation, preset, start, cost)
    rate, rate_fact = choose_learning_rate(start, size["train.batch_size"] * size["train.accumulate"])
    paths |= {**rate, **size}
    facts += [*size_facts, rate_fact, *size_fact, *_list_remarks(situation, paths)]
    values = _nest_settings(situation, preset, paths)
    return Suggestion(name=preset, values=values, config=_build_config(situation, preset, paths), facts=tuple(facts))


def _choose_base_settings(situation: Situation, preset: str) -> dict[str, Any]:
    """Return the settings that follow from the situation alone."""
    values = KINDS.of(situation.workload).get_schema(situation.workload).presets[preset]
    paths: dict[str, Any] = {"device": situation.device} if situation.device else {}
    if situation.is_demo:
        paths |= {key: values[key] for key in HOW_IT_RUNS if key in values}
    if situation.data_dir:
        paths["data.dir"] = situation.data_dir
    if situation.data.on_bad_file == "skip":
        paths["data.on_bad_file"] = "skip"
    return paths | _choose_smaller(situation)


def _fit_to_pictures(situation: Situation, preset: str, paths: dict[str, Any]) -> list[tuple[str, str]]:
    """Limit the image size to that of the data, with matching first layers; update `paths`, return the reason."""
    data, config = situation.data, _build_config(situation, preset, paths)
    if data.opened.sides is None or situation.is_demo:
        return []
    side = choose_side(data.opened.sides)
    if side >= config.data.image_size:
        return []
    paths |= KINDS.of(situation.workload).make_guide().suggest_for_side(config, side)
    width, height = data.opened.sides
    return [("image size", f"{side} pixels: the images have {width}×{height}, and upscaling adds nothing")]


def _choose_smaller(situation: Situation) -> dict[str, Any]:
    if situation.hardware.kind != "cpu" or situation.is_demo:
        return {}
    return dict(KINDS.of(situation.workload).make_guide().small_on_cpu)


def _explain_precision(situation: Situation, precision: str) -> str:
    advice = advise(situation.hardware)
    if precision == advice.precision:
        return advice.headline.removeprefix("use ")
    return f"{precision}: no rounding to fewer digits ({advice.precision} would be faster here)"


def _list_remarks(situation: Situation, paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if situation.is_demo:
        yield "demo", "the demo has a small model and few epochs; your choice changes only how it runs"
    if smaller := _choose_smaller(situation):
        settings = ", ".join(f"{key}={paths[key]}" for key in smaller)
        yield "on a CPU", f"smaller than the default: {settings}"
    elif not situation.is_demo:
        yield from situation.data.opened.remarks


def _nest_settings(situation: Situation, preset: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {} if situation.is_demo else {"preset": preset}
    return nest_paths({"workload": situation.workload, **chosen, **paths})


def _build_config(situation: Situation, preset: str, paths: Mapping[str, Any]) -> RunConfig:
    return from_dict(situation.workload, _nest_settings(situation, preset, paths)).config


STEPS_AN_EPOCH = 10
"""Minimum optimizer steps per epoch: with fewer, a small set learns too slowly."""
SMALLEST_BATCH = 8
"""Minimum batch: BatchNorm's statistics over fewer samples are noise (Wu and He 2018, figure 1)."""
LARGEST_GROWTH = 4
"""Largest factor by which `fast` enlarges its batch: larger ones need more epochs (McCandlish et al. 2018)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """Everything that suggestions depend on."""

    workload: str
    goal: str
    hardware: Hardware
    data: DataSummary
    data_dir: str | None
    device: str | None
    """As given by the user, to be written to the config; None: the run chooses."""

    @property
    def is_demo(self) -> bool:
        return self.data.is_demo


def choose_batch(
    situation: Situation, preset: str, start: RunConfig, cost: StepCost
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Choose batch and accumulation: the recipe's samples per step, more for `fast`, limited by data and memory."""
    num_train, hardware = situation.data.num_train, situation.hardware
    memory = hardware.memory_free_bytes or hardware.memory_total_bytes
    recipe = start.train.batch_size * start.train.accumulate
    fits = _round_to_power_of_two(cost.find_largest_batch(memory)) if memory else recipe
    # A larger batch is not faster on a CPU.
    grows = preset == "fast" and not situation.is_demo and hardware.kind != "cpu"
    grown = max(recipe, min(recipe * LARGEST_GROWTH, fits)) if grows else recipe
    # A quarter if the recipe's batch is small: a U-Net's BatchNorm sees many pixels of few samples.
    smallest = min(SMALLEST_BATCH, max(2, recipe // 4), num_train)
    # Small data limit the batch: an epoch needs at least STEPS_AN_EPOCH steps.
    by_data = _round_to_power_of_two(max(num_train // STEPS_AN_EPOCH, smallest))
    a_step = min(grown, by_data)
    # `lowmem` keeps the recipe's micro-batch and accumulates instead.
    micro = max(1, min(start.train.batch_size if preset == "lowmem" else a_step, a_step, fits))
    accumulate = math.ceil(a_step / micro)
    if a_step < grown:
        steps = math.ceil(num_train / a_step)
        made = f"{format_count(num_train, 'sample')} make {format_count(steps, 'step')} per epoch"
        why = f"less than the recipe's {recipe}: {made}"
    else:
        why = f"the recipe's {recipe}" + (f" times {a_step // recipe}" if a_step > recipe else "")
    times = f" x {accumulate} accumulated" if accumulate > 1 else ""
    facts = [("batch", f"{micro}{times} ({why})"), ("memory", _describe_memory(cost, micro, fits, memory))]
    return {"train.batch_size": micro, "train.accumulate": accumulate}, facts


def _describe_memory(cost: StepCost, micro: int, fits: int, memory: int) -> str:
    a_sample = f"{format_bytes(cost.fixed_bytes)} + {format_bytes(cost.sample_bytes)} per sample"
    needed = f"about {format_bytes(cost.predict_bytes(micro))} ({a_sample}; an estimate)"
    if not memory:
        return f"{needed}; the memory size of this device is unknown"
    if not fits:
        return f"{needed}: NOT EVEN ONE SAMPLE FITS {format_bytes(memory)}; use a smaller data.image_size or model"
    return f"{needed}; {format_bytes(memory)} are free, enough for a batch of {fits:,} (an estimate)"


def _round_to_power_of_two(number: int) -> int:
    """Round down to a power of two; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def choose_learning_rate(start: RunConfig, samples: int) -> tuple[dict[str, Any], tuple[str, str]]:
    """Scale the rate linearly with the batch for SGD (Goyal et al. 2017), by its root for Adam (Malladi 2022)."""
    optimizer, recipe = start.optimizer, start.train.batch_size * start.train.accumulate
    if optimizer.lr_per:
        peak, per, rule = optimizer.compute_peak_lr(samples), optimizer.lr_per, "linear, as in this recipe"
        paths: dict[str, Any] = {}
        shown = f"{optimizer.lr:g} x {samples}/{per}"
    elif optimizer.name in ADAM_LIKE:
        peak, rule = optimizer.lr * math.sqrt(samples / recipe), "square root of the batch, for Adam"
        shown, paths = f"{optimizer.lr:g} x sqrt({samples}/{recipe})", {"optimizer.lr": float(f"{peak:.4g}")}
    else:
        peak, rule = optimizer.lr * samples / recipe, "linear in the batch, for SGD"
        shown, paths = f"{optimizer.lr:g} x {samples}/{recipe}", {"optimizer.lr_per": recipe}
    if samples == recipe and not optimizer.lr_per:
        return {}, (
            "learning rate",
            f"{optimizer.lr:g}, the recipe's own at {format_count(samples, 'sample')} per step",
        )
    return paths, ("learning rate", f"{peak:.4g} = {shown} ({rule})")


def describe_length(config: RunConfig, num_train: int) -> str:
    """Return `20 epochs`, or `5,000 steps` if max_steps ends the run first."""
    train = config.train
    steps = train.epochs * num_train / (train.batch_size * train.accumulate)
    if train.max_steps and train.max_steps <= steps:
        return format_count(train.max_steps, "step")
    return format_count(train.epochs, "epoch")
