"""The memory plan of a run that is about to begin, or has run out of memory: its micro-batch, levers and ways out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep.config.schema import RunConfig
from halfstep.errors import HalfstepError, format_bytes
from halfstep.hardware.facts import Hardware
from halfstep.precision.advice import USABLE_MEMORY
from halfstep.precision.plan import Plan
from halfstep.run.assemble import Assembly
from halfstep.run.checkpoint import read_document
from halfstep.run.folder import RunFolder, load_stored
from halfstep.run.memory.fit import USABLE, fitting, largest_batch, usable_bytes
from halfstep.run.memory.plan import Cell, MemoryPlanner
from halfstep.run.memory.planned_step import planned_step
from halfstep.tune.memory_low import MemorySetting
from halfstep.tune.modes import Mode
from halfstep.workloads.base.kind import Store
from halfstep.workloads.base.workload import Workload

WAYS_OUT = 3
BY_BATCH = ("activations", "workspaces", "inputs", "graph pool")
"""Components that grow with the batch; of workspaces not all do, so that a larger batch is rather overrated."""


def free_for_run(device: torch.device) -> int:
    """Bytes that this process's tensors may take at their peak: what is free, and what torch holds already."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE * (free + torch.cuda.memory_reserved(device)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step needs: bytes for any batch, and bytes and operations for each sample."""

    num_parameters: int
    fixed_bytes: int
    sample_bytes: int
    sample_flops: Callable[[], int]
    """Counted when asked for: that takes another pass."""
    usable: float = USABLE_MEMORY
    """The share of a device's memory that may be taken: less where workspaces are not counted."""

    def bytes_at(self, batch_size: int) -> int:
        return self.fixed_bytes + batch_size * self.sample_bytes

    def largest_batch(self, memory_bytes: int) -> int:
        """Samples that fit a device; 0 where not even one does."""
        return max(0, int((memory_bytes * self.usable - self.fixed_bytes) / self.sample_bytes))


Planners = dict[str, MemoryPlanner]
NOT_OF_THE_STEP: Any = {
    **dict.fromkeys(("preset", "device", "schedule", "guard", "log"), True),
    "precision": {"default"},
    "train": {"fast", "memory", "epochs", "batch_size", "accumulate"},
}
"""Settings that a planner is told with each cell, or that change nothing of what a step allocates."""


def step_cost(
    config: RunConfig, store: Store, hardware: Hardware, precision: str, known: Planners | None = None
) -> StepCost:
    """Of a step in the mode and memory level of the config; `store` says what the data are. Steps of this store and
    hardware that are planned with the same `known` share what was traced."""
    is_gpu = hardware.kind in ("cuda", "rocm")
    # The same tensors in strict fp32, but for what cuDNN takes besides.
    traced = "tf32" if precision == "fp32" and not is_gpu else precision
    mode: Mode = "compile" if config.train.fast in ("compile", "graph") else "eager"
    size = max(config.train.batch_size, 2)
    cell = dataclasses.replace(Cell.of(config, traced, mode), batch_size=size, accumulate=1)
    known, key = {} if known is None else known, config.model_dump_json(exclude=NOT_OF_THE_STEP)
    if key not in known:
        made, plain = planned_step(config, store), _but_for_recomputing(config)
        like = next((one for one in known.values() if _but_for_recomputing(one.step.config) == plain), None)
        known[key] = like.recomputing(made) if like else MemoryPlanner(made, hardware)
    step, found = known[key].step, known[key].predict(cell)
    by_batch = sum(found.components[name] for name in BY_BATCH)
    return StepCost(
        num_parameters=step.num_parameters,
        fixed_bytes=found.total - by_batch,
        sample_bytes=max(1, by_batch // size),
        sample_flops=step.sample_flops,
        usable=USABLE if is_gpu else USABLE_MEMORY,
    )


def _but_for_recomputing(config: RunConfig) -> str:
    switched_off = config.changed(train={"activation_checkpointing": False})
    return switched_off.model_dump_json(exclude=NOT_OF_THE_STEP)


def planned_largest_batch(config: RunConfig, precision: str, mode: Mode, memory_bytes: int) -> int | None:
    """Samples of a micro-batch that fit a device of this memory; None where the step cannot be traced."""
    try:
        planner = MemoryPlanner(planned_step(config))
        return largest_batch(planner, Cell.of(config, precision, mode), usable_bytes(memory_bytes))
    except HalfstepError:
        return None


def planned_pieces(config: RunConfig, workload: Workload, plan: Plan, limit_bytes: int) -> int:
    """Micro-batches that each batch has to be cut into to fit: 1, 2, 4 ..."""
    planner = MemoryPlanner(planned_step(config, workload.store))
    cell = Cell.of_plan(config, plan)
    if planner.predict(cell).total <= limit_bytes:
        return 1
    largest = largest_batch(planner, dataclasses.replace(cell, accumulate=2), limit_bytes)
    pieces = 1
    while -(-cell.batch_size // pieces) > max(largest, 1):
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


def predicted_memory(path: Path) -> dict[str, int]:
    """Peak bytes by component of one micro-batch's step as a stored run took it. Nothing runs, and custom code is
    not imported: `halfstep report` must be safe on a run from someone else."""
    folder = RunFolder.open(str(path))
    config, plan = load_stored(folder.config, {}, trust=False).config, folder.stored_plan()
    newest = folder.checkpoints().all()[-1:]  # what it knew of its data, which may be gone
    store = read_document(newest[0])["state"]["store"] if newest else None
    whole = Cell.of_plan(config, plan)
    size, accumulate = math.ceil(whole.batch_size / plan.pieces), whole.accumulate * plan.pieces
    cell = dataclasses.replace(whole, batch_size=size, accumulate=accumulate)
    return dict(MemoryPlanner(planned_step(config, store)).predict(cell).components)


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
                planners[0].step.blocks = plan.blocks
            return planners[0].predict(Cell.of(config, plan.granted, plan.mode or "eager", setting)).total
        except HalfstepError:
            return None

    return peak
