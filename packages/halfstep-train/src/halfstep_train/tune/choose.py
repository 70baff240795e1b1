"""`train.fast: auto` and `train.memory: low`: choose how steps run by timed trials before the run begins.

Trials cost time, so they must promise to gain some: none for a short run, nor on a CPU (mode_search.py has the
candidates, trials.py the clock). What was found is kept on disk for the next run of the same model, shape, device
and versions, and in the plan of this one, which a resumed run follows without measuring again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.disk import find_cache_directory
from halfstep.errors import ConfigError, format_count, summarise_error
from halfstep.hardware.clock import Stopwatch
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Driver
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_gains_once
from halfstep.own_loop.repeated_blocks import describe_blocks, find_blocks, group_by_kind
from halfstep.precision.decide import needs_fp8_trial
from halfstep.precision.fp8 import fall_back_to_bf16, judge_whole_steps, measure_layer_gains
from halfstep.precision.plan import Plan
from halfstep.recompute import Recompute, Recomputing
from halfstep.step.randomness import read_generators
from halfstep_train.config.schema import PrecisionConfig, TrainConfig
from halfstep_train.tune.mode_search import CachedMode, ModeSearch
from halfstep_train.tune.modes import NEEDS_CUDA, Mode
from halfstep_train.tune.trials import (
    HOTTER,
    MOST_S,
    SHARE,
    TIME_LIMIT,
    CannotRun,
    Cost,
    MemoryChoice,
    MemorySetting,
    Rehearsal,
    Trial,
    TrialTime,
    choose_memory,
    count_total_steps,
    list_levers,
    load_first_batch,
    measure_cost,
    sort_by_peak,
)
from halfstep_train.workloads.base.workload import Workload

# --- which blocks may be recomputed ---
#
# Two eager steps of two samples run as the run would make them, with and without recomputation. Afterwards gradients
# and everything that modules hold (weights, buffers, numbers, lists) must be the same, with tensors compared by a
# weighted sum in fp64; generators must be in the same state, and less must have been kept for backward. So the check
# finds a forward pass that writes a buffer, counts, draws numbers that torch does not restore, or overwrites its input.
# On a device that sums in any order, where two plain steps differ, NOISE times that difference is allowed. What fails
# together is tried kind by kind.


NUM_STEPS = NUM_SAMPLES = 2
NOISE, MOST_NOISE = 10.0, 1e-2


class Recomputable(NamedTuple):
    """Names of blocks that may be recomputed, how, and why others may not."""

    names: tuple[str, ...]
    ways: tuple[Recompute, ...]
    notes: tuple[str, ...] = ()


class StepRecord(NamedTuple):
    """Results of trial steps: the final state by name, the bytes saved for backward, and calls of watched modules."""

    left: Mapping[str, Any]
    kept_bytes: int
    calls: set[tuple[str, Literal["in backward", "kept", "idle"]]]


def find_recomputable(plan: Plan, rehearsal: Rehearsal) -> Recomputable:
    """Find the blocks of a model that may be recomputed when it trains with this plan."""
    if any(isinstance(module, Recomputing) for module in rehearsal.workload.model.modules()):
        return Recomputable((), ("pointwise", "alternate", "blocks"))
    try:
        return _Check(dataclasses.replace(plan, pieces=1), rehearsal).find()
    except CannotRun as error:
        return Recomputable((), (), (f"recomputing: {error}",))


class _Check:
    def __init__(self, plan: Plan, rehearsal: Rehearsal) -> None:
        self.plan, self.rehearsal = plan, rehearsal
        self.model, self.noise = rehearsal.workload.model, dict[str, float]()
        if not (blocks := find_blocks(self.model)):
            raise CannotRun(f"no block of layers is repeated in {type(self.model).__name__}")
        if rehearsal.workload.blocks and plan.mode not in ("", "eager"):
            raise CannotRun("blocks have their own forward in captured steps")
        self.plain = self._record_steps("none", watched=blocks)
        if any(isinstance(mark, tuple) and not math.isfinite(mark[1]) for mark in self.plain.left.values()):
            raise CannotRun(f"a step of {NUM_SAMPLES} samples is not finite, so nothing can be compared")
        if own := [name for name in blocks if (name, "in backward") in self.plain.calls]:
            raise CannotRun(f"{describe_blocks(self.model, own)} already recomputes by itself")
        idle = {name for name, _ in self.plain.calls if (name, "kept") not in self.plain.calls}
        called = find_blocks(self.model, {*blocks} - {name for name, _ in self.plain.calls})
        self.blocks = [name for name in called if name not in idle]
        if not self.blocks:
            raise CannotRun(f"{describe_blocks(self.model, idle)}: nothing in them or before them is trained")

    def find(self) -> Recomputable:
        names, notes = self.blocks, list[str]()
        if self._find_problem("blocks", names):
            names = []
            for some in group_by_kind(self.model, self.blocks):
                if why := self._find_problem("blocks", [*names, *some]):
                    notes.append(f"recompute blocks, {describe_blocks(self.model, some)}: {why}")
                else:
                    names += some
        why = self._find_problem("pointwise", names) if names else ""
        if why:
            notes.append(f"recompute pointwise, {describe_blocks(self.model, names)}: {why}")
        ways: tuple[Recompute, ...] = ("blocks",) if why else ("pointwise", "alternate", "blocks")
        return Recomputable(tuple(names), ways if names else (), tuple(notes))

    def _find_problem(self, how: Recompute, names: Collection[str]) -> str:
        """Return why these blocks may not be recomputed; empty if they may."""
        try:
            tried = self._record_steps(how, names)
        except CannotRun as error:
            return str(error)
        gaps = compare_states(self.plain.left, tried.left)
        if other := next((name for name in gaps if gaps[name] and gaps[name] > self._compute_allowed_gap(name)), None):
            return f"{other} is not the same after {NUM_STEPS} steps"
        return "" if tried.kept_bytes < self.plain.kept_bytes else "they keep nothing for backward"

    def _compute_allowed_gap(self, name: str) -> float:
        self.noise = self.noise or compare_states(self.plain.left, self._record_steps("none").left)
        noise = max(gap for gap in self.noise.values() if math.isfinite(gap))
        return math.inf if math.isinf(self.noise.get(name, 0)) else min(NOISE * noise, MOST_NOISE)

    def _record_steps(self, how: Recompute, names: Collection[str] = (), watched: Collection[str] = ()) -> StepRecord:
        memory = dataclasses.asdict(MemorySetting(recompute=how))
        plan = dataclasses.replace(self.plan, memory=memory, blocks=tuple(names))
        small = {"batch_size": min(NUM_SAMPLES, self.rehearsal.config.train.batch_size), "accumulate": 1}
        with self.rehearsal.begin(plan, train=small, scaler={"init_scale": 1.0}) as trial:
            try:
                return _record_step(trial, watched)
            except Exception as error:  # inside the trial, so that it also ends on other ranks
                reason = f"a step of {NUM_SAMPLES} samples ends in {type(error).__name__}: {summarise_error(error)}"
                raise CannotRun(reason) from error


def _record_step(trial: Trial, watched: Collection[str]) -> StepRecord:
    model, calls, kept = trial.parts.model, set[tuple[str, Any]](), list[int]()

    def watch(name: str) -> Any:
        def called(module: nn.Module, *inputs: Any) -> None:
            values = (*tree_leaves(inputs), *module.parameters())
            is_kept = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in values)
            in_backward = torch._C._current_graph_task_id() != -1
            calls.add((name, "in backward" if in_backward else "kept" if is_kept else "idle"))

        return model.get_submodule(name).register_forward_pre_hook(called, with_kwargs=True)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    handles = [watch(name) for name in watched]
    engine = trial.engine(trial.parts, "eager", lambda text, level: None)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for _ in range(NUM_STEPS):
            engine(trial.window)
    for handle in handles:
        handle.remove()
    return StepRecord(dict(list_state(model)), sum(kept), calls)


def list_state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes and buffers of modules, generator states, gradients, weights: causes before their effects."""
    for prefix, module in model.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters", "_buffers")}
        for key, value in {**held, **module._buffers}.items():
            yield f"{prefix}.{key}".removeprefix("."), [_fingerprint(leaf) for leaf in tree_leaves(value)]
    for name, state in read_generators().items():
        yield f"the state of {name}'s random numbers", [_fingerprint(leaf) for leaf in tree_leaves(state)]
    for name, parameter in model.named_parameters():
        yield f"the gradient of {name}", _fingerprint(parameter.grad)
    for name, parameter in model.named_parameters():
        yield name, _fingerprint(parameter)


def _fingerprint(value: Any) -> Any:
    """Return a tensor's weighted sum and its sum of magnitudes: in fp64 nearly any changed bit shows."""
    if not isinstance(value, Tensor):
        kind = nn.Module if isinstance(value, nn.Module) else type(value)  # its class may be swapped
        return value if isinstance(value, (int, float, str, type(None))) else kind
    flat = (torch.view_as_real(value) if value.is_complex() else value).detach().reshape(-1)
    flat = (flat if flat.is_cuda else flat.cpu()).double()
    weights = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device).cos_()
    size = float(flat.abs().sum())
    finite = flat.nan_to_num(1.25, 1.5, -1.5)
    return float(finite @ weights), size if math.isfinite(size) else math.inf


def compare_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Return relative differences by name; infinite for values other than tensors."""
    return {name: _compute_gap(one.get(name), other.get(name)) for name in {**one, **other}}


def _compute_gap(one: Any, other: Any) -> float:
    if one == other:
        return 0.0
    if isinstance(one, tuple) and isinstance(other, tuple):
        size = max(one[1], other[1])
        return abs(one[0] - other[0]) / (size if math.isfinite(size) else 1.0)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(_compute_gap, one, other), default=0.0)
    return math.inf


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
