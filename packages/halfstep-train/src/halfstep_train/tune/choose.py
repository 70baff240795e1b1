"""`train.fast: auto` and `train.memory: low`: choose how steps run by timed trials before the run begins.

Trials cost time, so they must promise to gain some: none for a short run, nor on a CPU (mode_search.py has the
candidates, trials.py the clock). What was found is kept on disk for the next run of the same model, shape, device
and versions, and in the plan of this one, which a resumed run follows without measuring again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from halfstep.disk import find_cache_directory
from halfstep.errors import ConfigError, format_count
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Driver
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_gains_once
from halfstep.own_loop.repeated_blocks import describe_blocks
from halfstep.precision.decide import needs_fp8_trial
from halfstep.precision.fp8 import fall_back_to_bf16, judge_whole_steps, measure_layer_gains
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import PrecisionConfig, TrainConfig
from halfstep_train.tune.memory_low import (
    HOTTER,
    TIME_LIMIT,
    CannotRun,
    Cost,
    MemoryChoice,
    MemorySetting,
    choose_memory,
    list_levers,
    sort_by_peak,
)
from halfstep_train.tune.mode_search import CachedMode, ModeSearch
from halfstep_train.tune.modes import NEEDS_CUDA, Mode
from halfstep_train.tune.recompute_check import Recomputable, find_recomputable
from halfstep_train.tune.trials import (
    MOST_S,
    SHARE,
    Rehearsal,
    TrialTime,
    count_total_steps,
    load_first_batch,
    measure_cost,
)
from halfstep_train.workloads.base.workload import Workload

FEWEST_STEPS = 300
"""No trials for shorter runs: compiling would pay only if a step took three seconds."""
MEMORY_TRIALS_S = 240.0  # longer than for modes, since train.memory=low was requested: each setting is compiled again
MEMORY_TRIALS_AT_LEAST_S = 30.0
"""In a short run no new setting is tried after this time, nor after the expected time of the run itself."""
ALWAYS_TRIED = 2
"""The normal step and the most promising lever are always tried: without it the run may not fit."""
MEASURED_FOR = (
    "train.fast", "train.tune_kernels", "train.memory", "train.channels_last", "train.deterministic",
    "train.batch_size", "train.accumulate", "train.activation_checkpointing", "data.", "model.",
    "optimizer.name", "optimizer.moment_bits", "ema.enabled",
)  # fmt: skip
"""Settings whose change invalidates what trials found. Which data settings make a family's samples larger
(pixels, frames, latents from disk) depends on the family; if the shapes stay, the result is read from disk again."""

Say = Callable[[str], None]
Peak = Callable[[Plan, MemorySetting], int | None]
"""Predict the peak bytes of a setting, or None. Passed in, because this package does not build runs."""


def tune_plan(
    plan: Plan,
    rehearsal: Rehearsal,
    say: Say,
    *,
    driver: Driver | None = None,
    peak: Peak = lambda plan, setting: None,
) -> Plan:
    """Return the plan with mode, fp8 decision and memory levers; `say` gets the results. Tests replace the driver."""
    tuning = Tuning(rehearsal, say, driver or Driver(), peak)
    wish = rehearsal.config.train.tune_kernels
    if wish != "auto":
        plan = dataclasses.replace(plan, tunes_kernels=wish)
    return tuning.add_memory_levers(tuning.check_fp8(tuning.add_mode(plan)))


def strip_tuning(plan: Plan, *, keeps_memory: bool) -> Plan:
    """Return the plan without the results of trials; memory levers may stay, since they decide the optimizer's
    state."""
    memory: dict[str, Any] = {"memory": {}, "memory_reason": "", "memory_trials": (), "blocks": ()}
    modes: dict[str, Any] = {"mode": "", "mode_reason": "", "channels_last": None, "gains": ()}
    modes |= {"tunes_kernels": False, "cudnn_benchmark": False}
    return dataclasses.replace(plan, **modes, **({} if keeps_memory else memory))


class Tuning:
    """The trials of one run: mode, fp8, then memory levers, each added to the plan."""

    def __init__(self, rehearsal: Rehearsal, say: Say, driver: Driver, peak: Peak) -> None:
        self.rehearsal, self.say, self.driver, self.peak = rehearsal, say, driver, peak
        self.config, self.model = rehearsal.config, rehearsal.workload.model
        train, num_samples = self.config.train, len(rehearsal.workload.train_samples)
        self.num_steps = count_total_steps(train, math.ceil(num_samples / train.batch_size))

    # --- the mode ---

    def add_mode(self, plan: Plan) -> Plan:
        train = self.config.train
        mode = find_asked_mode(train, plan)
        if mode is not None:
            reason = f"train.fast={train.fast}"
            if train.fast == "auto":
                where = "train.deterministic" if train.deterministic else f"trials are for CUDA, this is {plan.device}"
                reason = "simulation is eager only" if plan.simulated else where
            if train.fast == "graph" and not plan.on_cuda:
                self.say(NEEDS_CUDA.format(plan.device))
            return dataclasses.replace(plan, mode=mode, mode_reason=reason)
        kept = CachedMode(plan, self.rehearsal).choose_for_run(self.num_steps)
        fields = kept or self._search(plan)
        self.say(f"steps run {fields['mode']}: {fields['mode_reason']}")
        for gain in fields.get("gains", ()):
            self.say(f"  {gain}")
        return dataclasses.replace(plan, **fields)

    def _search(self, plan: Plan) -> dict[str, Any]:
        """Search for the fastest mode, and keep it for other runs if it also holds for them."""
        if self.num_steps < FEWEST_STEPS:
            reason = f"a run of {format_count(self.num_steps, 'step')} is too short for trials"
            return {"mode": "eager", "mode_reason": f"{reason} (train.fast=graph compiles anyway)"}
        self.say("measuring how fast steps run ...")
        others = self.driver.describe_other_use(plan.device)
        try:
            found = ModeSearch(plan, TrialTime(self.num_steps, most_s=MOST_S), self.rehearsal).search()
        except CannotRun as error:
            return {"mode": "eager", "mode_reason": str(error)}
        if others := others or self.driver.describe_other_use(plan.device):
            reason = f"{found.fields['mode_reason']}; the GPU was in use by others ({others}): not kept for other runs"
            return {**found.fields, "mode_reason": reason}
        if found.is_final and (problem := CachedMode(plan, self.rehearsal).write(found)):
            self.say(problem)
        return found.fields

    # --- fp8 ---

    def check_fp8(self, plan: Plan) -> Plan:
        """Compare whole steps in fp8 and bf16: single layers can gain while the step loses."""
        wish = self.config.precision
        if plan.granted != "fp8" or plan.simulated or wish.force:
            return plan
        self.say("measuring whole steps in fp8 and in bf16 ...")
        mode = plan.mode or "eager"
        try:
            fp8 = measure_cost(mode, plan, self.rehearsal)
        except CannotRun as error:
            return fall_back_to_bf16(plan, f"its step cannot run {mode}: {error}", strict=wish.strict)
        try:
            bf16 = measure_cost(mode, fall_back_to_bf16(plan, "to compare"), self.rehearsal)
        except CannotRun as error:
            self.say(f"fp8 is not compared with bf16, whose step cannot run {mode}: {error}")
            return plan
        return judge_whole_steps(plan, fp8_ms=fp8.ms, bf16_ms=bf16.ms, strict=wish.strict)

    # --- memory ---

    def add_memory_levers(self, plan: Plan) -> Plan:
        train = self.config.train
        # The builders of our own families recompute blocks by themselves.
        is_outright = train.activation_checkpointing and ":" in self.config.workload
        if plan.memory or not is_outright and train.memory != "low":
            return plan
        found = find_recomputable(plan, self.rehearsal)
        plan = dataclasses.replace(plan, blocks=found.names)
        if found.names:
            self.say(f"may be recomputed: {describe_blocks(self.model, found.names)}")
        if is_outright:
            left = (note for note in found.notes if not note.startswith("recompute pointwise"))
            left_out = (f"train.activation_checkpointing=true leaves this as it is: {note}" for note in left)
            plan = dataclasses.replace(plan, warnings=(*plan.warnings, *left_out))
        return self._choose_levers(plan, found) if train.memory == "low" else plan

    def _choose_levers(self, plan: Plan, found: Recomputable) -> Plan:
        clock, mode = Stopwatch(), plan.mode or "eager"
        costs: list[Cost | None] = []

        def measure(setting: MemorySetting) -> Cost:
            self.say(f"measuring memory: {setting} ...")
            costs.append(None)
            trial_plan = dataclasses.replace(plan, memory=dataclasses.asdict(setting))
            costs[-1] = cost = measure_cost(mode, trial_plan, self.rehearsal)
            return cost

        def may_go_on() -> bool:
            ran = [cost.ms / 1e3 for cost in costs if cost is not None]
            run_s = ran[0] * self.num_steps if ran else math.inf
            limit_s = min(MEMORY_TRIALS_S, max(SHARE * run_s, min(MEMORY_TRIALS_AT_LEAST_S, run_s)))
            return len(costs) < ALWAYS_TRIED or clock.elapsed_s < limit_s

        optimizer = self.config.optimizer
        levers = list_levers(found.ways, optimizer.name, optimizer.moment_bits, is_compiled=mode != "eager")
        positions = sort_by_peak(levers.positions, lambda setting: self.peak(plan, setting))
        try:
            choice = choose_memory(
                measure, positions, time_limit=TIME_LIMIT - HOTTER,
                notes=[*found.notes, *levers.notes], may_go_on=may_go_on,
            )  # fmt: skip
        except CannotRun as error:
            choice = MemoryChoice(setting=MemorySetting(), reason=str(error))
        lines = choice.format_lines()
        for line in lines:
            self.say(line)
        chosen, tried = dataclasses.asdict(choice.setting), tuple(line.strip() for line in lines[1:])
        return dataclasses.replace(plan, memory=chosen, memory_reason=choice.reason, memory_trials=tried)


# --- the gain of fp8 in the layers of a run ---


def measure_fp8_gains(
    wish: PrecisionConfig,
    train: TrainConfig,
    workload: Workload,
    hardware: Hardware,
    *,
    measure: Callable[..., dict[LayerShape, Fp8Gain]] = measure_gains_once,
) -> dict[str, Fp8Gain]:
    """Return fp8's gain by module name for `decide(..., fp8_gains=...)`; empty if fp8 is not requested or not
    possible."""
    if not needs_fp8_trial(wish, hardware) or not hardware.device:
        return {}
    batch = workload.prepare_batch(load_first_batch(train, workload), key=(), training=False)
    forward = partial(workload.forward, workload.model, batch)
    return measure_layer_gains(
        workload.model, forward, hardware, find_cache_directory(), wish.fp8_recipe, measure=measure
    )


def find_asked_mode(train: TrainConfig, plan: Plan) -> Mode | None:
    """Return the mode that settings or the stored plan fix; None if it is measured (`auto` on a CUDA device)."""
    wish = train.fast
    if plan.simulated and wish in ("compile", "graph"):
        raise ConfigError(
            "a simulated precision cannot be compiled", why="simulation is eager only", fix="train.fast=off"
        )
    if plan.mode:
        return plan.mode
    if wish == "auto":
        # A deterministic run needs the same kernels each time, and inductor times its kernels again.
        is_measured = plan.on_cuda and not train.deterministic and not plan.simulated
        return None if is_measured else "eager"
    return "eager" if wish == "off" else "compile" if wish == "compile" or not plan.on_cuda else "graph"
