"""`train.fast: auto` and `train.memory: low`: how steps run is chosen by timed trials before the run begins.

Trials cost time, so they must promise to gain some: nothing is compiled for a run of which the compiling would be more
than a twentieth, nor on a CPU. What was found is kept on disk for the next run of the same model, shape, device and
versions, and in the plan of this one, which a resumed run follows without measuring again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halfstep import __version__
from halfstep.config.schema import RunConfig
from halfstep.hardware.cache import cache_directory, read_json, write_json
from halfstep.measure.clock import Stopwatch
from halfstep.precision.fp8_pays import settled, without_fp8
from halfstep.precision.plan import Plan
from halfstep.run.assemble import total_steps_of
from halfstep.run.layout import wants_channels_last
from halfstep.run.memory_levers import levers_of
from halfstep.run.memory_low import CannotRun, Cost, MemoryChoice, MemorySetting, choose_memory
from halfstep.run.trials import Trial, trial_run
from halfstep.run.ways import NEEDS_CUDA, Way, asked_way
from halfstep.workloads.workload import Workload

COMPILE_S = 45.0
"""What a cold start of the compiler takes: 30 to 60 s were seen for U-Net and ResNet-50 beside an H200."""
KERNEL_TUNING_S = 240.0
"""The same when inductor also searches each kernel's block sizes: more than two minutes for U-Net and ResNet-50."""
FEWEST_STEPS = 300
"""No trials for a run shorter than that: nothing is compiled for it unless a step takes three seconds."""
SHARE = 0.05
"""Of the expected run that may be spent on finding out how to run it."""
MEMORY_TRIALS_S = 240.0
"""train.memory=low was asked for, so it may take longer: each setting is compiled anew."""
MEMORY_TRIALS_AT_LEAST_S = 30.0
"""In a short run no new setting is begun after so long."""
WORTH = 1.02
"""A way must be this much faster to be preferred to a simpler one: trials differ by that much."""

MEASURED_FOR = (
    "train.fast", "train.tune_kernels", "train.memory", "train.channels_last", "train.deterministic",
    "train.batch_size", "train.accumulate", "train.activation_checkpointing", "data.image_size", "model.",
    "optimizer.name", "ema.enabled",
)  # fmt: skip
"""Settings whose change makes what was found before worth nothing."""

Say = Callable[[str], None]


def tuned(config: RunConfig, workload: Workload, plan: Plan, say: Say) -> Plan:
    """The plan with how steps run; `say` gets what was found."""
    wish = config.train.tune_kernels
    if wish != "auto":
        plan = dataclasses.replace(plan, tunes_kernels=wish)
    plan = _with_fp8_that_pays(config, workload, _with_way(config, workload, plan, say), say)
    return _with_memory(config, workload, plan, say) if config.train.memory == "low" else plan


def untuned(plan: Plan, *, keeps_memory: bool) -> Plan:
    """The plan without what trials found. The levers of memory low may stay: optimizer states are stored in one."""
    memory, reason = (plan.memory, plan.memory_reason) if keeps_memory else ({}, "")
    return dataclasses.replace(
        plan, way="", way_reason="", channels_last=None, tunes_kernels=False, memory=memory, memory_reason=reason
    )


# --- the way ---


def _with_way(config: RunConfig, workload: Workload, plan: Plan, say: Say) -> Plan:
    way = asked_way(config, plan)
    if way is not None:
        reason = f"train.fast={config.train.fast}" if config.train.fast != "auto" else _why_unmeasured(config, plan)
        if config.train.fast == "graph" and not plan.on_cuda:
            say(NEEDS_CUDA.format(plan.device))
        return dataclasses.replace(plan, way=way, way_reason=reason)
    kept = Kept(config, workload, plan)
    found = kept.read()
    if found is None:
        if expected_steps(config, workload) >= FEWEST_STEPS:
            say("measuring how fast steps run ...")
        try:
            found = _measured(config, workload, plan)
        except CannotRun as error:
            found = {"way": "eager", "way_reason": str(error), "is_final": False}
        problem = kept.write(found) if found.pop("is_final") else ""
        if problem:
            say(problem)
    else:
        found["way_reason"] = f"measured before: {found['way_reason']}"
    say(f"steps run {found['way']}: {found['way_reason']}")
    return dataclasses.replace(plan, **found)


def _why_unmeasured(config: RunConfig, plan: Plan) -> str:
    if plan.simulated:
        return "simulation is eager only"
    return "train.deterministic" if config.train.deterministic else f"trials are for CUDA, this is {plan.device}"


def _measured(config: RunConfig, workload: Workload, plan: Plan) -> dict[str, Any]:
    clock, num_steps = Stopwatch(), expected_steps(config, workload)
    if num_steps < FEWEST_STEPS:
        reason = f"a run of {num_steps} steps is too short for trials (train.fast=graph compiles all the same)"
        return {"way": "eager", "way_reason": reason, "is_final": False}
    found: dict[str, Any] = {"channels_last": wants_channels_last(config, plan)}
    costs: dict[str, Cost] = {}
    eager = _eager(config, workload, plan, found, costs)
    # What does not fit eagerly may fit compiled: how long that takes is then no question.
    expected_s = eager.ms / 1e3 * num_steps if eager is not None else COMPILE_S / SHARE
    if expected_s * SHARE < COMPILE_S:
        reason = (
            f"{_line(costs)}; about {_duration(expected_s)} to go is too short to compile for (train.fast=graph does)"
        )
        return {**found, "way": "eager", "way_reason": reason, "is_final": False}
    wish = config.train.tune_kernels
    found["tunes_kernels"] = expected_s * SHARE >= KERNEL_TUNING_S if wish == "auto" else wish
    problems: list[str] = [] if eager is not None else ["eager not possible: out of memory"]
    with trial_run(config, workload, dataclasses.replace(plan, **found)) as trial:
        for way in ("compile", "graph"):
            _try(trial, way, costs, problems)
    if not costs:
        return {**found, "way": "eager", "way_reason": "; ".join(problems), "is_final": False}
    way = fastest_way(costs)
    gain = f"{eager.ms / costs_of_ways(costs)[way].ms:.2f}x eager" if eager is not None else f"{way} fits"
    reason = "; ".join([_line(costs), gain, *problems, f"{clock.elapsed_s:.0f} s of trials"])
    return {**found, "way": way, "way_reason": reason, "is_final": True}


def _eager(
    config: RunConfig, workload: Workload, plan: Plan, found: dict[str, Any], costs: dict[str, Cost]
) -> Cost | None:
    """The eager step in the usual layout, and in the other where that is left open; the faster one is found."""
    layouts = (found["channels_last"],) if config.train.channels_last != "auto" else (True, False)
    best: Cost | None = None
    for channels_last in layouts:
        with trial_run(config, workload, dataclasses.replace(plan, channels_last=channels_last)) as trial:
            cost = _try(trial, "eager", costs, [], label="eager" if channels_last else "eager NCHW")
        if cost is not None and (best is None or cost.ms * WORTH < best.ms):
            best, found["channels_last"] = cost, channels_last
    return best


def _try(trial: Trial, way: Way, costs: dict[str, Cost], problems: list[str], label: str = "") -> Cost | None:
    try:
        costs[label or way] = trial.cost(way)
    except CannotRun as error:
        problems.append(f"{way} not possible: {error}")
        return None
    return costs[label or way]


def costs_of_ways(costs: dict[str, Cost]) -> dict[Way, Cost]:
    """Those that ran. Eager counts in its better layout."""
    eager = [cost for label, cost in costs.items() if label.startswith("eager")]
    found: dict[Way, Cost] = {"eager": min(eager)} if eager else {}
    return found | {way: costs[way] for way in ("compile", "graph") if way in costs}


def fastest_way(costs: dict[str, Cost]) -> Way:
    """The simplest of the ways that are as fast as the fastest."""
    ways = costs_of_ways(costs)
    limit = min(cost.ms for cost in ways.values()) * WORTH
    return next(way for way, cost in ways.items() if cost.ms <= limit)


def expected_steps(config: RunConfig, workload: Workload) -> int:
    """Steps to the end of the run, before it has a loader."""
    return total_steps_of(config, math.ceil(len(workload.train_samples) / config.train.batch_size))


def _line(costs: dict[str, Cost]) -> str:
    return ", ".join(f"{label} {cost.ms:.1f} ms" for label, cost in costs.items())


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# --- fp8 ---


def _with_fp8_that_pays(config: RunConfig, workload: Workload, plan: Plan, say: Say) -> Plan:
    """Whole steps in fp8 and in bf16: layers can gain while the step loses."""
    wish = config.precision
    if plan.granted != "fp8" or plan.simulated or wish.force:
        return plan
    say("measuring whole steps in fp8 and in bf16 ...")
    way: Way = "eager" if plan.way == "eager" else "compile"
    try:
        with trial_run(config, workload, plan) as trial:
            fp8 = trial.cost(way)
    except CannotRun as error:
        return without_fp8(plan, f"its step cannot run {way}: {error}", strict=wish.strict)
    try:
        with trial_run(config, workload, without_fp8(plan, "to compare")) as trial:
            bf16 = trial.cost(way)
    except CannotRun:
        return plan  # only fp8 fits
    return settled(plan, fp8_ms=fp8.ms, bf16_ms=bf16.ms, force=wish.force, strict=wish.strict)


# --- memory ---


def _with_memory(config: RunConfig, workload: Workload, plan: Plan, say: Say) -> Plan:
    if plan.memory:
        return plan
    clock, costs = Stopwatch(), list[Cost]()
    # A capture changes neither the peak nor the order of the times.
    way: Way = "eager" if plan.way == "eager" else "compile"

    def measure(setting: MemorySetting) -> Cost:
        say(f"measuring memory: {setting} ...")
        trial_plan = dataclasses.replace(plan, memory=dataclasses.asdict(setting))
        with trial_run(config, workload, trial_plan) as trial:
            costs.append(trial.cost(way))
        return costs[-1]

    def may_go_on() -> bool:
        expected_s = costs[0].ms / 1e3 * expected_steps(config, workload) if costs else 0.0
        return clock.elapsed_s < min(MEMORY_TRIALS_S, max(MEMORY_TRIALS_AT_LEAST_S, SHARE * expected_s))

    levers = levers_of(workload.model, config.optimizer.name, is_compiled=way == "compile")
    try:
        choice = choose_memory(measure, levers.positions, notes=levers.notes, may_go_on=may_go_on)
    except CannotRun as error:
        choice = MemoryChoice(setting=MemorySetting(), reason=str(error))
    for line in choice.lines():
        say(line)
    return dataclasses.replace(plan, memory=dataclasses.asdict(choice.setting), memory_reason=choice.reason)


# --- what was found before ---


class Kept:
    """A decision on disk, under everything it depends on."""

    def __init__(self, config: RunConfig, workload: Workload, plan: Plan) -> None:
        identity = (
            str(workload.model),
            [config.train.batch_size, config.train.accumulate, config.data.image_size],
            [config.optimizer.name, config.ema.enabled],
            [config.train.channels_last, config.train.tune_kernels, config.train.activation_checkpointing],
            [plan.granted, plan.device_name, [(row.module, row.compute) for row in plan.rows if row.is_part]],
            [__version__, torch.__version__, torch.version.cuda, torch.backends.cudnn.version()],
        )
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        self.path: Path = cache_directory(os.environ) / f"ways-{digest}.json"

    def read(self) -> dict[str, Any] | None:
        try:
            found = read_json(self.path)
            return {name: found[name] for name in ("way", "way_reason", "channels_last", "tunes_kernels")}
        except (OSError, ValueError, LookupError, TypeError):
            return None  # nothing or nothing usable: measured again

    def write(self, found: dict[str, Any]) -> str:
        """Empty, or why it could not be kept."""
        return write_json(self.path, found)
