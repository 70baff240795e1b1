"""Size a run by its predicted memory: its micro-batch, the order of memory levers, and settings that would fit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import HalfstepError, MemoryLimitError, format_bytes, format_count
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.probe import probe
from halfstep.own_loop.repeated_blocks import describe_blocks
from halfstep.precision.plan import Plan
from halfstep_train.config.schema import RunConfig, TrainConfig
from halfstep_train.run.assemble import Assembly
from halfstep_train.run.memory.out_of_memory import OutOfMemory, explain_out_of_memory
from halfstep_train.run.memory.planner import (
    USABLE,
    Cell,
    MemoryPlanner,
    find_fits,
    find_largest_batch,
)
from halfstep_train.run.memory.traceable_step import TraceableStep, build_traceable_step
from halfstep_train.run.multi_rank import OF_FROZEN, group_blocks
from halfstep_train.tune.choose import Say
from halfstep_train.tune.modes import Mode
from halfstep_train.tune.trials import MemorySetting
from halfstep_train.workloads import KINDS
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.workload import Workload

USABLE_ON_CPU = 0.8
SUGGESTIONS = 3
"""Settings that an out-of-memory message suggests at most."""
BY_BATCH = ("activations", "workspaces", "inputs", "graph pool")
"""Components that grow with the batch. Some workspaces do not, so large batches are slightly overestimated."""


Trace = Callable[[], TraceableStep]
"""Builds the run's step without its content, where its memory is to be predicted."""


def choose_pieces(train: TrainConfig, plan: Plan, say: Say, trace: Trace, limit: int | None) -> int:
    """Return how many micro-batches `train.auto_batch` cuts each batch into before the first step, as predicted: 1, 2,
    4 ... until a step takes `limit` bytes, or the free ones. A single rank halves them again in training if needed."""
    if not plan.on_cuda:
        return 1
    limit = measure_free_bytes(torch.device(plan.device)) if limit is None else limit
    try:
        pieces = find_fitting_pieces(train, plan, trace, limit)
    except HalfstepError as error:
        say(f"train.auto_batch: the memory of a step cannot be predicted: {error.what}")
        return 1
    if pieces > 1:
        micro = -(-train.batch_size // pieces)
        say(
            f"memory plan: micro-batches of {micro} instead of {train.batch_size}, {pieces} times as many "
            f"of them (same effective batch), to fit {format_bytes(limit)}"
        )
    return pieces


def find_fitting_pieces(train: TrainConfig, plan: Plan, trace: Trace, limit_bytes: int) -> int:
    """Return the predicted number of micro-batches per batch that fits into memory: 1, 2, 4 ..."""
    planner = MemoryPlanner(trace())
    cell = Cell.of_plan(train, plan)
    if planner.predict(cell).total <= limit_bytes:
        return 1
    # With several micro-batches gradients accumulate, so all of them exist during every forward pass but the first.
    largest = find_largest_batch(planner, dataclasses.replace(cell, accumulate=2), limit_bytes)
    pieces = 1
    while -(-cell.batch_size // pieces) > max(largest, 1):
        pieces *= 2
    return pieces


def measure_free_bytes(device: torch.device) -> int:
    """Return the bytes that the tensors of a run may take at their peak: free memory and what torch has reserved."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE * (free + torch.cuda.memory_reserved(device)))


# --- train.shard ---


def choose_sharding(train: TrainConfig, workload: Workload, plan: Plan, num_ranks: int, say: Say, trace: Trace) -> Plan:
    """Return the plan with the decision and its reason, which is also printed; only rank 0 decides."""
    if train.shard is False:
        return plan
    try:
        step = trace()
        blocks, problem = step.shard_blocks, ""
        planner = MemoryPlanner(step, probe(plan.device))
        cell = Cell.of(train, plan.granted, "eager")
        whole, shard = (planner.predict(cell.spread(num_ranks, layout)).total for layout in ("ddp", "shard"))
    except HalfstepError as error:
        blocks, problem, whole, shard = [[]], error.what, 0, 0
    reason = f"train.shard=true: {format_bytes(shard)} per rank are predicted, {format_bytes(whole)} with DDP"
    if train.shard == "auto":
        limit = _measure_limit(plan, num_ranks)
        taken = _compare(whole, limit)
        if problem or whole <= limit:
            why = f"memory cannot be predicted: {problem}" if problem else f"DDP takes {taken} per rank"
            return _set_sharding(plan, False, f"train.shard=auto: not sharded, {why}", (), say)
        reason = f"train.shard=auto: sharded, DDP would take {taken} per rank"
        reason += f", a shard takes {format_bytes(shard)}"
    elif problem:
        reason = f"train.shard=true: {problem}"
    if not blocks[0]:
        return _set_sharding(plan, True, f"{reason}; the model is gathered as a whole: it repeats no block", (), say)
    frozen = (f"{name}{OF_FROZEN}{b}" for name, own in zip(workload.frozen, blocks[1:], strict=False) for b in own)
    num_units = len(group_blocks(workload.model, blocks[0]))
    reason += f"; in {format_count(num_units, 'unit')} of {describe_blocks(workload.model, blocks[0])}"
    return _set_sharding(plan, True, reason, (*blocks[0], *frozen), say)


def choose_reduction(train: TrainConfig, plan: Plan, num_ranks: int, say: Say, trace: Trace) -> Plan:
    """Return the plan of a sharded run with the decision when gradients are reduced: once per step where whole
    gradients have room until then, otherwise after each micro-batch."""
    if train.accumulate == 1:
        return plan
    try:
        planner = MemoryPlanner(trace(), probe(plan.device))
        cell = dataclasses.replace(Cell.of_plan(train, plan).spread(num_ranks, "shard"), reduces_last=True)
        size, limit = planner.predict(cell).total, _measure_limit(plan, num_ranks)
        fits, why = size <= limit, f"with whole gradients a rank needs {_compare(size, limit)}"
    except HalfstepError as error:
        fits, why = False, f"memory cannot be predicted: {error.what}"
    when = "once per step" if fits else "after each micro-batch"
    reason = f"gradients are reduced {when} (train.accumulate={train.accumulate}): {why}"
    say(reason)
    return dataclasses.replace(plan, reduces_last=fits, reduce_reason=reason)


def _set_sharding(plan: Plan, shards: bool, reason: str, blocks: tuple[str, ...], say: Say) -> Plan:
    say(reason)
    return dataclasses.replace(plan, shards=shards, shard_reason=reason, shard_blocks=blocks)


def _compare(size: int, limit: int) -> str:
    return f"{format_bytes(size)} of {format_bytes(limit)}"


def _measure_limit(plan: Plan, num_ranks: int) -> int:
    """Return the bytes that a rank may take: of its GPU, or its part of the host's memory."""
    device = torch.device(plan.device)
    if device.type == "cuda":
        return measure_free_bytes(device)
    return int(USABLE * probe(plan.device).memory_total_bytes) // num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step needs: bytes independent of the batch, and bytes per sample."""

    fixed_bytes: int
    sample_bytes: int
    usable: float = USABLE_ON_CPU
    """The share of the device's memory that a step may use: less where workspaces are not predicted."""

    def predict_bytes(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.sample_bytes

    def find_largest_batch(self, memory_bytes: int) -> int:
        """Return how many samples fit a device; 0 if not even one does."""
        return max(0, int((memory_bytes * self.usable - self.fixed_bytes) / self.sample_bytes))


Planners = dict[str, MemoryPlanner]
NOT_OF_THE_STEP: Any = {
    **dict.fromkeys(("preset", "device", "schedule", "guard"), True),
    "log": {"track", "quiet", "verbose", "ledger"},
    "precision": {"default"},
    "train": {"fast", "memory", "epochs", "batch_size", "accumulate"},
}
"""Settings that are given with each cell, or that do not change what a step allocates."""


def predict_step_cost(
    config: RunConfig, store: Store, hardware: Hardware, precision: str, known: Planners | None = None
) -> StepCost:
    """Return the cost of a step in the config's mode and memory level; `store` describes the data.

    Calls with the same store, hardware and `known` share their traces.
    """
    is_gpu = hardware.kind in ("cuda", "rocm")
    # TF32 has the same tensors as strict fp32 but no cuDNN workspaces, which a CPU does not have either.
    traced = "tf32" if precision == "fp32" and not is_gpu else precision
    mode: Mode = "compile" if config.train.fast in ("compile", "graph") else "eager"
    size = max(config.train.batch_size, 2)
    cell = dataclasses.replace(Cell.of(config.train, traced, mode), batch_size=size, accumulate=1)
    known, key = {} if known is None else known, config.model_dump_json(exclude=NOT_OF_THE_STEP)
    if key not in known:
        known[key] = MemoryPlanner(build_traceable_step(config, store), hardware)
    found = known[key].predict(cell)
    # One prediction is enough: fixed parts do not change, the others grow with the batch.
    by_batch = sum(found.components[name] for name in BY_BATCH)
    return StepCost(
        fixed_bytes=found.total - by_batch,
        sample_bytes=max(1, by_batch // size),
        usable=USABLE if is_gpu else USABLE_ON_CPU,
    )


def suggest_fitting_settings(
    config: RunConfig, plan: Plan, store: Store, limit_bytes: int, ranks: int | None = None
) -> list[str]:
    """Return overrides that are predicted to fit, fastest first; none if the step cannot be traced."""
    half = () if plan.compute in ("bf16", "fp16", "fp8") else ("bf16",)
    try:
        planner = MemoryPlanner(build_traceable_step(config, store))
        precisions, mode = (plan.granted, *half), plan.mode or "eager"
        fits = find_fits(planner, config, limit_bytes, mode, precisions, most=SUGGESTIONS, ranks=ranks)
    except HalfstepError:
        return []
    return [f"{' '.join(fit.arguments)} (predicted {format_bytes(fit.prediction.total)})" for fit in fits]


def explain_step_too_large(error: OutOfMemory, config: RunConfig, parts: Assembly, pieces: int) -> MemoryLimitError:
    """Return the error of a run whose step did not fit, with settings that are predicted to fit."""
    each = KINDS.of(config.workload).describe_sample_size(config)
    ranks, ways = None if parts.world is None else parts.world.size, list[str]()
    if parts.device.type == "cuda":
        limit = measure_free_bytes(parts.device)
        ways = suggest_fitting_settings(config, parts.plan, parts.workload.store, limit, ranks)
    return explain_out_of_memory(error, config.train, each, pieces, parts.device, ranks or 1, ways)


def make_peak_predictor(train: TrainConfig, trace: Trace) -> Callable[[Plan, MemorySetting], int | None]:
    """Return a function that predicts the peak bytes of a memory setting, or None.

    `train.memory=low` tries its levers in the order of these peaks.
    """
    make_planner = functools.cache(lambda: MemoryPlanner(trace()))

    def peak(plan: Plan, setting: MemorySetting) -> int | None:
        if setting.activation_budget < 1:
            return None  # only a trial shows what the compiler does with a budget
        try:
            make_planner().step.blocks = plan.blocks
            return make_planner().predict(Cell.of(train, plan.granted, plan.mode or "eager", setting)).total
        except HalfstepError:
            return None

    return peak
