"""From facts to two or three configs to choose from, each with its reason. Every number says where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from halfstep.config.dump import Dumper
from halfstep.config.schema import RunConfig
from halfstep.guide.rules import Situation, batch, duration, learning_rate, training_rate, workers
from halfstep.guide.trial import Trial
from halfstep.hardware.facts import Hardware, Op
from halfstep.precision.advice import advise
from halfstep.precision.decide import decide
from halfstep.run.memory.planned_batch import Planners, step_cost
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


def suggestions(situation: Situation) -> tuple[Suggestion, ...]:
    """The config for the goal, and others worth a look; two that say the same are one."""
    found: list[Suggestion] = []
    planners: Planners = {}
    for preset in ORDER[situation.goal]:
        one = _suggestion(situation, _for_small_data(preset, situation), planners)
        if one.config not in [other.config for other in found]:
            found.append(one)
    return tuple(found)


def _for_small_data(preset: str, situation: Situation) -> str:
    is_small = situation.look is not None and situation.look.num_train < SMALL_SET
    has_quick = "quick" in KINDS.of(situation.workload).schema(situation.workload).presets and not situation.is_demo
    return "quick" if preset == "fast" and is_small and has_quick else preset


def _suggestion(situation: Situation, preset: str, planners: Planners) -> Suggestion:
    precision = _precision(situation, preset)
    paths = {"precision": precision, **_base(situation, preset)}
    facts = [("why", REASONS[preset]), ("precision", _precision_reason(situation, precision))]
    size_fact = _fit_to_pictures(situation, preset, paths)
    start = _config(situation, preset, paths)
    if situation.look is None:
        facts.append(("speed", _speed(situation.hardware, precision)))
        paths |= {"data.num_workers": min(OWN_WORKERS, situation.num_cores), "train.auto_batch": True}
        facts.append(("memory", "not known for your own model: train.auto_batch halves the batch where it must"))
    else:
        cost = step_cost(start, situation.look.store, situation.hardware, precision, planners)
        size, size_facts = batch(situation, preset, start, cost)
        trial, against_fp32 = _tried(situation, preset, paths, size["train.batch_size"])
        trained = training_rate(situation, cost, precision, trial)
        rate, rate_fact = learning_rate(start, size["train.batch_size"] * size["train.accumulate"])
        readers, readers_fact = workers(situation, start, trained)
        paths |= {**readers, **rate, **size}
        facts.append(("speed", against_fp32 or _speed(situation.hardware, precision)))
        facts += [*size_facts, rate_fact, readers_fact]
        facts += duration(situation, _config(situation, preset, paths), trained)
    facts += [*size_fact, *_remarks(situation, paths)]
    return Suggestion(
        name=preset,
        values=_nested(situation, preset, paths),
        config=_config(situation, preset, paths),
        facts=tuple(facts),
    )


def _tried(situation: Situation, preset: str, paths: Mapping[str, Any], batch_size: int) -> tuple[Trial | None, str]:
    """The trial of a config, where trials are made, and what it says of the speed against fp32."""
    if situation.try_out is None or situation.look is None or KINDS.of(situation.workload).synthetic is None:
        return None, ""
    store, precision = situation.look.store, paths["precision"]
    found = situation.try_out(_config(situation, preset, paths), store, batch_size)
    if found is None or precision == "fp32":
        return found, ""
    plain = situation.try_out(_config(situation, preset, {**paths, "precision": "fp32"}), store, batch_size)
    if plain is None:
        return found, ""
    return found, f"{found.samples_per_s / plain.samples_per_s:.1f}x fp32 (measured: whole eager steps)"


def _base(situation: Situation, preset: str) -> dict[str, Any]:
    """What the situation alone asks for, before anything is counted."""
    said = KINDS.of(situation.workload).schema(situation.workload).presets[preset]
    paths: dict[str, Any] = {"device": situation.device} if situation.device else {}
    if situation.is_demo:
        paths |= {key: said[key] for key in HOW_IT_RUNS if key in said}
    if situation.data_dir:
        paths["data.dir"] = situation.data_dir
    if situation.look is not None and situation.look.on_bad_file == "skip":
        paths["data.on_bad_file"] = "skip"
    paths |= _smaller(situation)
    if said.get("train.fast") == "compile" and not _may_compile(situation.hardware):
        paths["train.fast"] = "auto"
    return paths


def _fit_to_pictures(situation: Situation, preset: str, paths: dict[str, Any]) -> list[tuple[str, str]]:
    """Images no larger than the pictures, in place, with the first layers that such images need; and why."""
    look, config = situation.look, _config(situation, preset, paths)
    if look is None or look.sides is None or situation.is_demo:
        return []
    side = max(LEAST_SIDE, -(-max(look.sides) // SIDE_STEP) * SIDE_STEP)
    if side >= config.data.image_size:
        return []
    paths |= KINDS.of(situation.workload).make_guide().for_side(config, side)
    width, height = look.sides
    return [("image size", f"{side} pixels: the pictures have {width}×{height}, and more would be blown up")]


def _smaller(situation: Situation) -> dict[str, Any]:
    if situation.hardware.kind != "cpu" or situation.look is None or situation.is_demo:
        return {}
    return dict(KINDS.of(situation.workload).make_guide().small_on_cpu)


def _may_compile(hardware: Hardware) -> bool:
    return any(setting.name == "compile" and setting.value is True for setting in advise(hardware).settings)


def _precision(situation: Situation, preset: str) -> str:
    return decide("fp32" if preset == "stable" else "auto", situation.hardware).granted


def _precision_reason(situation: Situation, precision: str) -> str:
    advice = advise(situation.hardware)
    if precision == advice.precision:
        return advice.headline.removeprefix("use ")
    return f"{precision}: nothing is rounded to fewer digits ({advice.precision} would be faster here)"


def _speed(hardware: Hardware, precision: str) -> str:
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


def _remarks(situation: Situation, paths: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if situation.is_demo:
        yield "demo", "a small model and few epochs of its own; the choice changes only how it runs"
    if smaller := _smaller(situation):
        settings = ", ".join(f"{key}={paths[key]}" for key in smaller)
        yield "on a CPU", f"so smaller than usual: {settings}"


def _nested(situation: Situation, preset: str, paths: Mapping[str, Any]) -> dict[str, Any]:
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


def _config(situation: Situation, preset: str, paths: Mapping[str, Any]) -> RunConfig:
    return from_dict(situation.workload, _nested(situation, preset, paths)).config
