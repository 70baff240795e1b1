"""The memory plan of a run that is about to begin, or has run out of memory: its micro-batch, levers and ways out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from halfstep.config.schema import RunConfig
from halfstep.errors import HalfstepError
from halfstep.hardware.facts import Hardware
from halfstep.measure.memory import format_bytes
from halfstep.models.recompute import Recompute
from halfstep.precision.plan import Plan
from halfstep.run.assemble import Assembly
from halfstep.run.memory_fit import USABLE, fitting, largest_batch, usable_bytes
from halfstep.run.memory_plan import Cell, MemoryPlanner
from halfstep.run.planned_step import planned_step
from halfstep.tune.memory_low import MemorySetting
from halfstep.tune.modes import Mode
from halfstep.workloads.kind import Store
from halfstep.workloads.workload import Workload

WAYS_OUT = 3
BY_BATCH = ("activations", "workspaces", "inputs", "graph pool")
"""Components that grow with the batch; of workspaces not all do, so that a larger batch is rather overrated."""


def free_for_run(device: torch.device) -> int:
    """Bytes that this process's tensors may take at their peak: what is free, and what torch holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE * (free + torch.cuda.memory_reserved(device)))


def planned_bytes(config: RunConfig, store: Store, hardware: Hardware, precision: str) -> tuple[int, int]:
    """What is there for any batch, and what each sample adds, in the mode and memory level of the config."""
    planner = MemoryPlanner(planned_step(config, store), hardware)
    recompute: Recompute = "blocks" if config.train.activation_checkpointing else "none"
    mode: Mode = "compile" if config.train.fast in ("compile", "graph") else "eager"
    size = max(config.train.batch_size, 2)
    cell = Cell(precision=precision, mode=mode, setting=MemorySetting(recompute=recompute), batch_size=size)
    found = planner.predict(cell)
    by_batch = sum(found.components[name] for name in BY_BATCH)
    return found.total - by_batch, max(1, by_batch // size)


def planned_largest_batch(config: RunConfig, precision: str, mode: Mode, memory_bytes: int) -> int | None:
    """Samples of a micro-batch that fit a device of this memory; None where the step cannot be traced."""
    recompute: Recompute = "blocks" if config.train.activation_checkpointing else "none"
    cell = Cell(precision=precision, mode=mode, setting=MemorySetting(recompute=recompute),
                batch_size=config.train.batch_size, accumulate=config.train.accumulate)  # fmt: skip
    try:
        return largest_batch(MemoryPlanner(planned_step(config)), cell, usable_bytes(memory_bytes))
    except HalfstepError:
        return None


def planned_pieces(config: RunConfig, workload: Workload, plan: Plan, limit_bytes: int) -> int:
    """Micro-batches that each batch has to be cut into to fit: 1, 2, 4 ..."""
    planner = MemoryPlanner(planned_step(config, workload.store))
    size = config.train.batch_size
    cell = Cell(precision=plan.granted, mode=plan.mode or "eager", setting=MemorySetting(**plan.memory),
                batch_size=size, accumulate=config.train.accumulate)  # fmt: skip
    if planner.predict(cell).total <= limit_bytes:
        return 1
    largest = largest_batch(planner, Cell(precision=cell.precision, mode=cell.mode, setting=cell.setting,
                                          batch_size=size, accumulate=2), limit_bytes)  # fmt: skip
    pieces = 1
    while -(-size // pieces) > max(largest, 1):
        pieces *= 2
    return pieces


def pieces_by_plan(config: RunConfig, workload: Workload, plan: Plan, say: Callable[[str], None]) -> int:
    """With train.auto_batch a run begins with the micro-batch that is predicted to fit, not with one that fails."""
    if not plan.on_cuda:
        return 1
    limit = free_for_run(torch.device(plan.device))
    try:
        pieces = planned_pieces(config, workload, plan, limit)
    except HalfstepError as error:
        say(f"the batch is not planned: {error.what}; it is halved where memory runs out")
        return 1
    if pieces > 1:
        micro = -(-config.train.batch_size // pieces)
        say(
            f"memory plan: micro-batches of {micro} instead of {config.train.batch_size}, {pieces} times as many "
            f"of them (same effective batch), to fit {format_bytes(limit)}"
        )
    return pieces


def ways_out(config: RunConfig, plan: Plan, store: Store, limit_bytes: int) -> list[str]:
    """What is predicted to fit, in the words to type; nothing where the step cannot be traced."""
    half = () if plan.compute in ("bf16", "fp16", "fp8") else ("bf16",)
    try:
        planner = MemoryPlanner(planned_step(config, store))
        fits = fitting(planner, config, limit_bytes, plan.mode or "eager", (plan.granted, *half), most=WAYS_OUT)
    except HalfstepError:
        return []
    return [f"{' '.join(fit.words)} (predicted {format_bytes(fit.prediction.total)})" for fit in fits]


def ways_out_of(parts: Assembly) -> Iterable[str]:
    """Of a run on a GPU."""
    if parts.device.type != "cuda":
        return ()
    return ways_out(parts.config, parts.plan, parts.workload.store, free_for_run(parts.device))


def predicted_peak(config: RunConfig, workload: Workload) -> Callable[[Plan, MemorySetting], int | None]:
    """Peak bytes by memory setting, for the order in which levers are tried; None where nothing is predicted."""
    planners: list[MemoryPlanner] = []

    def peak(plan: Plan, setting: MemorySetting) -> int | None:
        if setting.activation_budget < 1:
            return None  # what the compiler makes of it only trials tell
        try:
            if not planners:
                planners.append(MemoryPlanner(planned_step(config, workload.store)))
            cell = Cell(precision=plan.granted, mode=plan.mode or "eager", setting=setting,
                        batch_size=config.train.batch_size, accumulate=config.train.accumulate)  # fmt: skip
            return planners[0].predict(cell).total
        except HalfstepError:
            return None

    return peak
