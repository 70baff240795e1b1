"""From facts to two or three configs to choose from, each with its reason. Every number says where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from halfstep.config.dump import Dumper
from halfstep.config.schema import ADAM_LIKE, RunConfig
from halfstep.errors import format_bytes, format_count, suggest_command
from halfstep.guide.data import DataLook
from halfstep.guide.trial import Trial
from halfstep.hardware.facts import Hardware, Op
from halfstep.precision.advice import advise
from halfstep.precision.decide import decide
from halfstep.run.memory.sizing import Planners, StepCost, predict_step_cost
from halfstep.workloads import KINDS, from_dict

ORDER = {
    "fast": ("fast", "lowmem", "stable"),
    "quality": ("quality", "fast", "stable"),
    "lowmem": ("lowmem", "fast", "stable"),
    "stable": ("stable", "quality", "lowmem"),
}
"""Goal to presets: its own first, then what a user may like better on seeing the numbers."""
REASONS = {
    "fast": "the fastest precision of this machine, compiled where that pays, and few epochs",
    "quick": "small data: small images and 20 epochs, the quickest way to a first result",
    "quality": "a long recipe with a weight average, validated as it goes",
    "lowmem": "activations are computed twice instead of kept, about a third slower",
    "stable": "strict fp32 and plain eager PyTorch; a bad stretch is rolled back instead of ending the run",
}
HOW_IT_RUNS = ("train.fast", "train.memory", "train.activation_checkpointing", "guard.on_fault")
"""What a preset changes for demo data, which have a recipe of their own."""
SMALL_SET = 10_000
"""Training images below which `quick` stands for `fast`: its recipe is for a few thousand."""
OWN_WORKERS = 4
SIDE_STEP, LEAST_SIDE = 16, 32
"""Image sides are multiples of the first, which the levels and patches of our models divide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One config to choose, with what it is expected to do."""

    name: str
    values: Mapping[str, Any]
    """What its file says, nested."""
    config: RunConfig
    facts: tuple[tuple[str, str], ...]
    """Names and values for the screen, the reason first."""

    def to_yaml(self) -> str:
        """The file: its reasons as comments, then its values."""
        comments = [f"# {name}: {' '.join(value.split())}" for name, value in self.facts]
        text = yaml.dump(dict(self.values), Dumper=Dumper, sort_keys=False, width=120, allow_unicode=True)
        return "\n".join(["# Written by `halfstep guide`. Change what you like.", *comments, text])


def make_suggestions(situation: Situation) -> tuple[Suggestion, ...]:
    """The config for the goal, and others worth a look; two that say the same are one."""
    found: list[Suggestion] = []
    planners: Planners = {}
    for preset in ORDER[situation.goal]:
        one = _make_suggestion(situation, _adapt_to_small_data(preset, situation), planners)
        if one.config not in [other.config for other in found]:
            found.append(one)
    return tuple(found)


def _adapt_to_small_data(preset: str, situation: Situation) -> str:
    is_small = situation.look is not None and situation.look.num_train < SMALL_SET
    has_quick = "quick" in KINDS.of(situation.workload).schema(situation.workload).presets and not situation.is_demo
    return "quick" if preset == "fast" and is_small and has_quick else preset


def _make_suggestion(situation: Situation, preset: str, planners: Planners) -> Suggestion:
    precision = _choose_precision(situation, preset)
    paths = {"precision": precision, **_choose_base_settings(situation, preset)}
    facts = [("why", REASONS[preset]), ("precision", _explain_precision(situation, precision))]
    size_fact = _fit_to_pictures(situation, preset, paths)
    start = _build_config(situation, preset, paths)
    if situation.look is None:
        facts.append(("speed", _describe_speed(situation.hardware, precision)))
        paths |= {"data.num_workers": min(OWN_WORKERS, situation.num_cores), "train.auto_batch": True}
        facts.append(("memory", "not known for your own model: train.auto_batch halves the batch where it must"))
    else:
        cost = predict_step_cost(start, situation.look.store, situation.hardware, precision, planners)
        size, size_facts = choose_batch(situation, preset, start, cost)
        trial, against_fp32 = _try_preset(situation, preset, paths, size["train.batch_size"])
        trained = estimate_rate(situation, cost, precision, trial)
        rate, rate_fact = choose_learning_rate(start, size["train.batch_size"] * size["train.accumulate"])
        readers, readers_fact = choose_workers(situation, start, trained)
        paths |= {**readers, **rate, **size}
        facts.append(("speed", against_fp32 or _describe_speed(situation.hardware, precision)))
        facts += [*size_facts, rate_fact, readers_fact]
        facts += estimate_duration(situation, _build_config(situation, preset, paths), trained)
    facts += [*size_fact, *_list_remarks(situation, paths)]
    return Suggestion(
        name=preset,
        values=_nest_settings(situation, preset, paths),
        config=_build_config(situation, preset, paths),
        facts=tuple(facts),
    )


def _try_preset(
    situation: Situation, preset: str, paths: Mapping[str, Any], batch_size: int
) -> tuple[Trial | None, str]:
    """The trial of a config, where trials are made, and what it says of the speed against fp32."""
    if situation.try_out is None or situation.look is None or KINDS.of(situation.workload).synthetic is None:
        return None, ""
    store, precision = situation.look.store, paths["precision"]
    found = situation.try_out(_build_config(situation, preset, paths), store, batch_size)
    if found is None or precision == "fp32":
        return found, ""
    plain = situation.try_out(_build_config(situation, preset, {**paths, "precision": "fp32"}), store, batch_size)
    if plain is None:
        return found, ""
    return found, f"{found.samples_per_s / plain.samples_per_s:.1f}x fp32 (measured: whole eager steps)"


def _choose_base_settings(situation: Situation, preset: str) -> dict[str, Any]:
    """What the situation alone asks for, before anything is counted."""
    said = KINDS.of(situation.workload).schema(situation.workload).presets[preset]
    paths: dict[str, Any] = {"device": situation.device} if situation.device else {}
    if situation.is_demo:
        paths |= {key: said[key] for key in HOW_IT_RUNS if key in said}
    if situation.data_dir:
        paths["data.dir"] = situation.data_dir
    if situation.look is not None and situation.look.on_bad_file == "skip":
        paths["data.on_bad_file"] = "skip"
    paths |= _choose_smaller(situation)
    if said.get("train.fast") == "compile" and not _may_compile(situation.hardware):
        paths["train.fast"] = "auto"
    return paths


def _fit_to_pictures(situation: Situation, preset: str, paths: dict[str, Any]) -> list[tuple[str, str]]:
    """Images no larger than the pictures, in place, with the first layers that such images need; and why."""
    look, config = situation.look, _build_config(situation, preset, paths)
    if look is None or look.sides is None or situation.is_demo:
        return []
    side = max(LEAST_SIDE, -(-max(look.sides) // SIDE_STEP) * SIDE_STEP)
    if side >= config.data.image_size:
        return []
    paths |= KINDS.of(situation.workload).make_guide().for_side(config, side)
    width, height = look.sides
    return [("image size", f"{side} pixels: the pictures have {width}×{height}, and more would be blown up")]


def _choose_smaller(situation: Situation) -> dict[str, Any]:
    if situation.hardware.kind != "cpu" or situation.look is None or situation.is_demo:
        return {}
    return dict(KINDS.of(situation.workload).make_guide().small_on_cpu)


def _may_compile(hardware: Hardware) -> bool:
    return any(setting.name == "compile" and setting.value is True for setting in advise(hardware).settings)


def _choose_precision(situation: Situation, preset: str) -> str:
    return decide("fp32" if preset == "stable" else "auto", situation.hardware).granted


def _explain_precision(situation: Situation, precision: str) -> str:
    advice = advise(situation.hardware)
    if precision == advice.precision:
        return advice.headline.removeprefix("use ")
    return f"{precision}: nothing is rounded to fewer digits ({advice.precision} would be faster here)"


def _describe_speed(hardware: Hardware, precision: str) -> str:
    if precision == "fp32":
        return "that of fp32, by definition"
    ops: tuple[tuple[Op, str], ...] = (("matmul", "matmul"), ("conv_nchw", "conv"), ("conv_nhwc", "channels_last conv"))
    measured = [(name, hardware.measured(op, precision)) for op, name in ops]
    rates = ", ".join(f"{name} {m.speedup:.1f}x" for name, m in measured if m is not None)
    if rates:
        return f"{rates} fp32 (measured here on these operations; a whole training step gains less)"
    published = hardware.speedup(precision)
    if published is not None:
        return f"published peak {published:.1f}x fp32, not measured here; a whole training step gains less"
    return "not measured"


def _list_remarks(situation: Situation, paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if situation.is_demo:
        yield "demo", "a small model and few epochs of its own; the choice changes only how it runs"
    if smaller := _choose_smaller(situation):
        settings = ", ".join(f"{key}={paths[key]}" for key in smaller)
        yield "on a CPU", f"so smaller than usual: {settings}"


def _nest_settings(situation: Situation, preset: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"workload": situation.workload}
    if not situation.is_demo:
        tree["preset"] = preset
    for path, value in paths.items():
        section, _, name = path.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree


def _build_config(situation: Situation, preset: str, paths: Mapping[str, Any]) -> RunConfig:
    return from_dict(situation.workload, _nest_settings(situation, preset, paths)).config


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


def choose_batch(
    situation: Situation, preset: str, start: RunConfig, cost: StepCost
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Batch and accumulation: the recipe's samples per step, more for `fast`, limited by the data and the memory."""
    assert situation.look is not None
    num_train, memory = situation.look.num_train, situation.memory_bytes
    recipe = start.train.batch_size * start.train.accumulate
    fits = _round_to_power_of_two(cost.largest_batch(memory)) if memory else recipe
    # A CPU is no faster with a larger batch.
    grows = preset == "fast" and not situation.is_demo and situation.hardware.kind != "cpu"
    grown = max(recipe, min(recipe * LARGEST_GROWTH, fits)) if grows else recipe
    # A quarter where the recipe itself is small: a U-Net's BatchNorm sees many pixels of few samples.
    smallest = min(SMALLEST_BATCH, max(2, recipe // 4), num_train)
    by_data = _round_to_power_of_two(max(num_train // STEPS_AN_EPOCH, smallest))
    a_step = min(grown, by_data)
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
    a_sample = f"{format_bytes(cost.fixed_bytes)} + {format_bytes(cost.sample_bytes)} a sample"
    needed = f"about {format_bytes(cost.bytes_at(micro))} ({a_sample}; an estimate)"
    if not memory:
        return f"{needed}; this device does not say how much it has"
    if not fits:
        return f"{needed}: NOT EVEN ONE SAMPLE FITS {format_bytes(memory)}; smaller data.image_size or model"
    if fits > LARGEST_GROWTH * micro:
        return f"{needed} of {format_bytes(memory)} free: far more than enough"
    return f"{needed}; {format_bytes(memory)} free would take a batch of {fits:,} (an estimate)"


def _round_to_power_of_two(number: int) -> int:
    """The largest one that is not larger; 0 for 0."""
    return 1 << (number.bit_length() - 1) if number > 0 else 0


def choose_learning_rate(start: RunConfig, samples: int) -> tuple[dict[str, Any], tuple[str, str]]:
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
        return {}, (
            "learning rate",
            f"{optimizer.lr:g}, the recipe's own at {format_count(samples, 'sample')} per step",
        )
    return paths, ("learning rate", f"{peak:.4g} = {shown} ({rule})")


def choose_workers(situation: Situation, start: RunConfig, trained: Rate) -> tuple[dict[str, Any], tuple[str, str]]:
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
        fact += f"; reading may be the limit: data.cache=true, or `{suggest_command('pack', situation.data_dir)}`"
    return {"data.num_workers": workers}, ("workers", fact)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """How many samples per second the device trains, and how that is known."""

    per_s: float | None
    """None: nothing was measured."""
    is_limit: bool
    """Whether it is only what no training can beat."""
    words: str


def estimate_rate(situation: Situation, cost: StepCost, precision: str, trial: Trial | None) -> Rate:
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


def estimate_duration(situation: Situation, config: RunConfig, trained: Rate) -> list[tuple[str, str]]:
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
    shown += f" for {format_count(train.epochs, 'epoch')}"
    if trained.is_limit:
        return [("time", f"at least {shown}, most likely a few times as long (an estimate)")]
    compiled = "; compiled it may be shorter" if train.fast == "compile" else ""
    return [("time", f"about {shown} (an estimate from measured rates{compiled})")]
