"""`train.fast: auto` and `train.memory: low`: how steps run is chosen by timed trials before the run begins.

Trials cost time, so they must promise to gain some: none for a short run, nor on a CPU (mode_search.py has the
candidates, trials.py the clock). What was found is kept on disk for the next run of the same model, shape, device
and versions, and in the plan of this one, which a resumed run follows without measuring again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from halfstep.config.schema import RunConfig
from halfstep.disk import find_cache_directory
from halfstep.errors import ConfigError, format_count
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.driver import Driver
from halfstep.hardware.facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_gains_once
from halfstep.precision.fp8 import fall_back_to_bf16, judge_whole_steps, measure_layer_gains
from halfstep.precision.ladder import explain_lack
from halfstep.precision.plan import Plan
from halfstep.tune.memory_low import (
    HOTTER,
    CannotRun,
    Cost,
    MemoryChoice,
    MemorySetting,
    by_predicted_peak,
    choose_memory,
    levers_of,
)
from halfstep.tune.mode_search import CachedMode, FoundMode, ModeSearch
from halfstep.tune.modes import NEEDS_CUDA, Mode
from halfstep.tune.own_blocks import described
from halfstep.tune.recompute_check import Recomputable, recomputable
from halfstep.tune.trials import MOST_S, SHARE, Rehearse, TrialTime, cost_in, first_batch, total_steps_of
from halfstep.workloads.base.workload import Workload

FEWEST_STEPS = 300
"""No trials for a run shorter than that: nothing is compiled for it unless a step takes three seconds."""
MEMORY_TRIALS_S = 240.0  # train.memory=low was asked for, so it may take longer: each setting is compiled again
MEMORY_TRIALS_AT_LEAST_S = 30.0
"""In a short run no new setting is begun after so long, nor after what the run itself takes."""
ALWAYS_TRIED = 2
"""The normal step and the most promising lever: low memory is asked for because it may not fit otherwise."""
MEASURED_FOR = (
    "train.fast", "train.tune_kernels", "train.memory", "train.channels_last", "train.deterministic",
    "train.batch_size", "train.accumulate", "train.activation_checkpointing", "data.", "model.",
    "optimizer.name", "optimizer.moment_bits", "ema.enabled",
)  # fmt: skip
"""Settings whose change makes what was found before worth nothing. What of its data makes a family's samples larger
(pixels, frames, latents from disk) is its own affair: where the shapes stay, what was found is read from disk again."""

Say = Callable[[str], None]
Peak = Callable[[Plan, MemorySetting], int | None]
"""Predicted peak bytes of a setting; None where nothing is predicted. Handed in: this room builds no run to trace."""


def tuned(
    config: RunConfig,
    workload: Workload,
    plan: Plan,
    say: Say,
    rehearse: Rehearse,
    *,
    driver: Driver | None = None,
    peak: Peak = lambda plan, setting: None,
) -> Plan:
    """The plan with how steps run; `say` gets what was found. Tests put another machine in the driver's place."""
    tuning = Tuning(config, workload, say, rehearse, driver or Driver(), peak)
    wish = config.train.tune_kernels
    if wish != "auto":
        plan = dataclasses.replace(plan, tunes_kernels=wish)
    return tuning.with_memory(tuning.with_fp8_that_pays(tuning.with_mode(plan)))


def untuned(plan: Plan, *, keeps_memory: bool) -> Plan:
    """The plan without what trials found. The levers of memory low may stay: optimizer states are stored in one."""
    memory, reason = (plan.memory, plan.memory_reason) if keeps_memory else ({}, "")
    lines = plan.memory_trials if keeps_memory else ()
    blocks = plan.blocks if keeps_memory else ()
    plain = dataclasses.replace(plan, memory=memory, memory_reason=reason, memory_trials=lines, blocks=blocks)
    return dataclasses.replace(
        plain, mode="", mode_reason="", channels_last=None, tunes_kernels=False, cudnn_benchmark=False, gains=()
    )


@dataclass(frozen=True, slots=True)
class Tuning:
    config: RunConfig
    workload: Workload
    say: Say
    rehearse: Rehearse
    driver: Driver
    peak: Peak

    # --- the mode ---

    def with_mode(self, plan: Plan) -> Plan:
        mode = asked_mode(self.config, plan)
        if mode is not None:
            reason = (
                f"train.fast={self.config.train.fast}"
                if self.config.train.fast != "auto"
                else _why_unmeasured(self.config, plan)
            )
            if self.config.train.fast == "graph" and not plan.on_cuda:
                self.say(NEEDS_CUDA.format(plan.device))
            return dataclasses.replace(plan, mode=mode, mode_reason=reason)
        kept = CachedMode(self.config, self.workload, plan).for_run(expected_steps(self.config, self.workload))
        fields = kept or self._found_now(plan)
        self.say(f"steps run {fields['mode']}: {fields['mode_reason']}")
        for gain in fields.get("gains", ()):
            self.say(f"  {gain}")
        return dataclasses.replace(plan, **fields)

    def _found_now(self, plan: Plan) -> dict[str, Any]:
        try:
            found = self._measured(plan)
        except CannotRun as error:
            return {"mode": "eager", "mode_reason": str(error)}
        if found is None:
            reason = (
                f"a run of {format_count(expected_steps(self.config, self.workload), 'step')} is too short for trials"
            )
            return {"mode": "eager", "mode_reason": f"{reason} (train.fast=graph compiles all the same)"}
        problem = CachedMode(self.config, self.workload, plan).write(found) if found.is_final else ""
        if problem:
            self.say(problem)
        return found.fields

    def _measured(self, plan: Plan) -> FoundMode | None:
        """None for a run that is too short for any trial."""
        num_steps = expected_steps(self.config, self.workload)
        if num_steps < FEWEST_STEPS:
            return None
        self.say("measuring how fast steps run ...")
        others = self.driver.used_by_others(plan.device)
        found = ModeSearch(self.config, self.workload, plan, TrialTime(num_steps, most_s=MOST_S), self.rehearse).found()
        others = others or self.driver.used_by_others(plan.device)
        if not others:
            return found
        reason = f"{found.fields['mode_reason']}; the GPU was in use by others ({others}): not kept for other runs"
        return dataclasses.replace(found, fields={**found.fields, "mode_reason": reason}, is_final=False)

    # --- fp8 ---

    def with_fp8_that_pays(self, plan: Plan) -> Plan:
        """Whole steps in fp8 and in bf16: layers can gain while the step loses."""
        wish = self.config.precision
        if plan.granted != "fp8" or plan.simulated or wish.force:
            return plan
        self.say("measuring whole steps in fp8 and in bf16 ...")
        mode = plan.mode or "eager"
        try:
            fp8 = cost_in(mode, self.config, self.workload, plan, self.rehearse)
        except CannotRun as error:
            return fall_back_to_bf16(plan, f"its step cannot run {mode}: {error}", strict=wish.strict)
        try:
            bf16 = cost_in(mode, self.config, self.workload, fall_back_to_bf16(plan, "to compare"), self.rehearse)
        except CannotRun as error:
            self.say(f"fp8 is not compared with bf16, whose step cannot run {mode}: {error}")
            return plan
        return judge_whole_steps(plan, fp8_ms=fp8.ms, bf16_ms=bf16.ms, strict=wish.strict)

    # --- memory ---

    def with_memory(self, plan: Plan) -> Plan:
        train = self.config.train
        # In a family of ours the builder recomputes blocks that are asked for.
        is_outright = train.activation_checkpointing and ":" in self.config.workload
        if plan.memory or not is_outright and train.memory != "low":
            return plan
        found = recomputable(self.config, self.workload, plan, self.rehearse)
        plan = dataclasses.replace(plan, blocks=found.names)
        if found.names:
            self.say(f"may be recomputed: {described(self.workload.model, found.names)}")
        if is_outright:
            left = (note for note in found.notes if not note.startswith("recompute pointwise"))
            left_out = (f"train.activation_checkpointing=true leaves this as it is: {note}" for note in left)
            plan = dataclasses.replace(plan, warnings=(*plan.warnings, *left_out))
        return self._with_levers(plan, found) if train.memory == "low" else plan

    def _with_levers(self, plan: Plan, found: Recomputable) -> Plan:
        clock, mode = Stopwatch(), plan.mode or "eager"
        costs: list[Cost | None] = []

        def measure(setting: MemorySetting) -> Cost:
            self.say(f"measuring memory: {setting} ...")
            costs.append(None)
            trial_plan = dataclasses.replace(plan, memory=dataclasses.asdict(setting))
            costs[-1] = cost = cost_in(mode, self.config, self.workload, trial_plan, self.rehearse)
            return cost

        def may_go_on() -> bool:
            ran = [cost.ms / 1e3 for cost in costs if cost is not None]
            limit_s = _memory_trials_s(ran[0] * expected_steps(self.config, self.workload)) if ran else MEMORY_TRIALS_S
            return len(costs) < ALWAYS_TRIED or clock.elapsed_s < limit_s

        optimizer = self.config.optimizer
        levers = levers_of(found.ways, optimizer.name, optimizer.moment_bits, is_compiled=mode != "eager")
        positions = by_predicted_peak(levers.positions, lambda setting: self.peak(plan, setting))
        try:
            choice = choose_memory(
                measure, positions, time_limit=self.config.train.memory_time - HOTTER,
                notes=[*found.notes, *levers.notes], may_go_on=may_go_on,
            )  # fmt: skip
        except CannotRun as error:
            choice = MemoryChoice(setting=MemorySetting(), reason=str(error))
        headline, *lines = choice.lines()
        for line in (headline, *lines):
            self.say(line)
        tried = tuple(line.strip() for line in lines)
        return dataclasses.replace(
            plan, memory=dataclasses.asdict(choice.setting), memory_reason=choice.reason, memory_trials=tried
        )


def _why_unmeasured(config: RunConfig, plan: Plan) -> str:
    if plan.simulated:
        return "simulation is eager only"
    return "train.deterministic" if config.train.deterministic else f"trials are for CUDA, this is {plan.device}"


def expected_steps(config: RunConfig, workload: Workload) -> int:
    return total_steps_of(config, math.ceil(len(workload.train_samples) / config.train.batch_size))


def _memory_trials_s(run_s: float) -> float:
    """Until when a new setting may be begun, in a run that will take so long."""
    return min(MEMORY_TRIALS_S, max(SHARE * run_s, min(MEMORY_TRIALS_AT_LEAST_S, run_s)))


# --- what fp8 gains in the layers of a run ---


def fp8_gains(
    config: RunConfig,
    workload: Workload,
    hardware: Hardware,
    *,
    measure: Callable[..., dict[LayerShape, Fp8Gain]] = measure_gains_once,
) -> dict[str, Fp8Gain]:
    """Gain by module name, for `decide(..., fp8_gains=...)`; empty where nothing is to be measured."""
    wish = config.precision
    is_asked = "fp8" in (wish.default, *wish.modules.values()) and not wish.simulate and not wish.force
    if not is_asked or not hardware.device or explain_lack("fp8", hardware):
        return {}
    batch = workload.prepared(first_batch(config, workload), key=(), training=False)
    forward = partial(workload.forward, workload.model, batch)
    return measure_layer_gains(workload.model, forward, hardware, find_cache_directory(), measure=measure)


def asked_mode(config: RunConfig, plan: Plan) -> Mode | None:
    """What the settings or the stored plan say; None where it is left to measurement (`auto` on a CUDA device)."""
    wish = config.train.fast
    if plan.simulated and wish in ("compile", "graph"):
        raise ConfigError(
            "a simulated precision cannot be compiled", why="simulation is eager only", fix="train.fast=off"
        )
    if plan.mode:
        return plan.mode
    if wish == "auto":
        # A repeatable run needs the same kernels each time, and inductor times its kernels again.
        is_measured = plan.on_cuda and not config.train.deterministic and not plan.simulated
        return None if is_measured else "eager"
    return "eager" if wish == "off" else "compile" if wish == "compile" or not plan.on_cuda else "graph"
