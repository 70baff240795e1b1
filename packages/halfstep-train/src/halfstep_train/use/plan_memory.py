"""`halfstep plan --memory`: predict the peak memory of a step for each precision, memory level and mode; what fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfstep.errors import ConfigError, choose_byte_unit, format_bytes
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.probe import probe
from halfstep.own_loop.repeated_blocks import describe_blocks
from halfstep.precision.ladder import explain_lack
from halfstep.precision.names import normalise_precision
from halfstep_train.config.schema import RunConfig
from halfstep_train.report.console import break_line, make_columns_table, print_text, split_columns
from halfstep_train.run.assemble import provide_data
from halfstep_train.run.memory.planner import (
    COMPONENTS,
    MODES,
    Cell,
    Fit,
    MemoryPlanner,
    compute_usable_bytes,
    describe_effects,
    find_fits,
    list_cells,
    list_precisions,
    refuse_nothing_fits,
)
from halfstep_train.run.memory.traceable_step import build_traceable_step
from halfstep_train.tune.modes import Mode
from halfstep_train.tune.trials import MemorySetting

SHOWN_MODES: dict[str, Mode] = {"off": "eager", "compile": "compile", "graph": "graph", "auto": "graph"}
"""`train.fast` to the mode that is shown."""
UNIT = "1 GB is 10^9 bytes, in every command: a GPU sold with 24 GB has 25.8 GB"
MADE_UP = "predicted for synthetic data of the usual shape; --data-dir DIR uses yours"
RECOMPUTED = "recomputation covers {}; a run checks on a copy that it changes no result"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One precision and memory level: bytes by component in the shown mode, and totals of all modes."""

    cell: Cell
    components: Mapping[str, int]
    totals: Mapping[Mode, int]
    precision: str
    """Of the cell, or of several cells with the same numbers."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Predictions for all precisions and levels, and those that fit if a memory size was given."""

    config: RunConfig
    num_parameters: int
    mode: Mode
    ranks: int | None
    """None: one rank without others."""
    rows: Sequence[MemoryRow]
    fits: Sequence[Fit]
    memory_bytes: int
    """0 if no size was given."""
    where: str
    notes: Sequence[str]

    @property
    def title(self) -> str:
        train = self.config.train
        batch = f"{train.batch_size} x {train.accumulate}" if train.accumulate > 1 else f"{train.batch_size}"
        size = f"{self.num_parameters:,} parameters"
        if self.ranks is not None:
            batch += f" over {self.ranks} ranks"
        return f"{self.config.workload}, {size}, batch {batch}, {self.config.optimizer.name}, {self.mode}"


def plan_memory(
    config: RunConfig,
    flags: Mapping[str, object],
    tell: Callable[[str], None],
    *,
    gpu: str | None = None,
    size: int = 0,
    ranks: int | None = None,
    mode: Mode | None = None,
    is_made_up: bool,
) -> MemoryPlan:
    """Predict all rows, and find what fits `size` or the device; `tell` shows the progress, which takes a minute for a
    large model."""
    hardware, memory, where = _choose_device(gpu, size, flags)
    shown = mode or SHOWN_MODES[config.train.fast]
    if ranks is not None and not 1 <= ranks <= config.train.batch_size:
        raise ConfigError(
            f"--ranks {ranks} does not fit train.batch_size={config.train.batch_size}",
            why="batch_size counts samples over all ranks, and each rank needs at least one",
            fix=f"--ranks 1 to {config.train.batch_size}, or a larger train.batch_size",
        )
    # Real data are read once, for the shapes of a batch.
    with contextlib.nullcontext(config) if is_made_up else provide_data(config) as with_data:
        planner = MemoryPlanner(build_traceable_step(with_data), hardware)
    wish = flags["precision"]
    name = normalise_precision(str(wish), "--precision") if wish else "auto"
    precisions = list_precisions(hardware) if name == "auto" else (name,)
    if name == "auto" and "fp32" in config.precision.modules.values():
        precisions = tuple(one for one in precisions if one != "tf32")  # a run refuses to mix fp32 and tf32
    cells = list_cells(planner, config, shown, precisions, ranks)
    rows = []
    for number, cell in enumerate(cells, 1):
        tell(f"predicting {cell.precision}, {cell.setting} ({number} of {len(cells)})")
        found = {other: planner.predict(cell.run_in(other)) for other in ((mode,) if mode else MODES)}
        totals = {other: prediction.total for other, prediction in found.items()}
        rows.append(MemoryRow(cell, found[shown].components, totals, cell.precision))
    limit = compute_usable_bytes(memory)
    fits = find_fits(planner, config, limit, shown, precisions, hardware, ranks=ranks, tell=tell) if memory else []
    if memory and not fits:
        refuse_nothing_fits(planner, config, limit, shown, where, ranks)
    notes = [*([MADE_UP] if is_made_up else []), *(describe_effects(planner, config, fits) if fits else ())]
    if gpu and hardware:
        if name != "auto" and (reason := explain_lack(name, hardware)):
            notes.append(f"{reason}: a run on this GPU would use a different precision")
        if not memory:
            notes.append(f"{hardware.name} is sold with several memory sizes: give one with --fit SIZE")
        notes += hardware.notes
    if planner.step.blocks:
        notes.append(RECOMPUTED.format(describe_blocks(planner.step.workload.model, planner.step.blocks)))
    num_parameters = planner.step.num_parameters
    return MemoryPlan(config, num_parameters, shown, ranks, rows, fits, memory, where, notes)


def _choose_device(gpu: str | None, size: int, flags: Mapping[str, object]) -> tuple[Hardware | None, int, str]:
    """Return the hardware that decides the formats, the memory size in bytes (0: not given), and its description."""
    asked = look_up_gpu(gpu) if gpu else probe(str(flags["device"] or "auto"))
    # Without a GPU the formats of a generic one are planned, for all precisions.
    hardware = asked if gpu or asked.kind in ("cuda", "rocm") else None
    if size:
        return hardware, size, format_bytes(size)
    if hardware is None:
        return None, 0, ""
    return hardware, hardware.memory_total_bytes, f"{hardware.name} ({format_bytes(hardware.memory_total_bytes)})"


def print_memory(plan: MemoryPlan) -> None:
    """Print the table of predictions, what fits, and notes."""
    console = Console(soft_wrap=True, highlight=False)
    of_modes = "in each mode" if len(plan.rows[0].totals) > 1 else ""
    unit, unit_bytes = choose_byte_unit(max(max(row.totals.values()) for row in plan.rows))
    by_component = f"by component in {plan.mode} mode"
    title = ", ".join(filter(None, [f"{plan.title}: predicted peak in {unit}", by_component, of_modes]))
    console.print(break_line(title, console.width))
    rows = merge_equal_rows(plan.rows)
    for number, table in enumerate(build_memory_tables(rows, unit_bytes, console.width)):
        console.print(*([""] if number else []), table, sep="\n")
    if plan.fits:
        of_each = "" if plan.ranks is None else " on each rank"
        console.print(f"\nfits {plan.where}{of_each}, fastest (predicted) first")
        console.print(_build_fit_table(plan.fits, unit, unit_bytes))
        console.print(f"to use the first: {' '.join(plan.fits[0].arguments)}")
    for note in plan.notes:
        print_text(console, Text(f"note: {note}"))
    console.print(f"\ndocs/memory.md explains the columns; {UNIT}", style="dim")


def build_memory_tables(rows: Sequence[MemoryRow], unit: float, width: int) -> list[Table]:
    """Build the table of peaks by component and mode in a unit of so many bytes, divided to fit the width."""
    names = [name for name in COMPONENTS if any(row.components.get(name) for row in rows)]
    levels = [shorten_level(row.cell.setting) for row in rows]
    columns = {"precision": [row.precision for row in rows], "memory": levels}
    if rows[0].cell.layout != "alone":
        columns["ranks"] = [row.cell.layout for row in rows]
    columns |= {
        name.replace(" ", "\n"): [format_in_unit(row.components.get(name, 0), unit) for row in rows] for name in names
    }
    columns |= {mode: [format_in_unit(row.totals[mode], unit) for row in rows] for mode in rows[0].totals}
    left = [name for name in ("precision", "memory", "ranks") if name in columns]
    return [make_columns_table(one, left=left) for one in split_columns(columns, width, names=left)]


def merge_equal_rows(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Merge rows with equal numbers: list their precisions together, and omit levels that save nothing."""
    found: dict[tuple[object, ...], MemoryRow] = {}
    for row in rows:
        key = (row.cell.layout, tuple(row.components.items()), tuple(row.totals.items()))
        same = found.setdefault(key, row)
        if same.cell.setting == row.cell.setting and row.precision not in same.precision.split(", "):
            found[key] = replace(same, precision=f"{same.precision}, {row.precision}")
    return list(found.values())


def shorten_level(setting: MemorySetting) -> str:
    return str(setting).replace("recompute ", "").replace(" optimizer", "")


def format_in_unit(size: int, unit_bytes: float) -> str:
    value = size / unit_bytes
    return f"{value:.2f}" if 0 < value < 10 else f"{value:.1f}" if size else "-"


def _build_fit_table(fits: Sequence[Fit], unit: str, unit_bytes: float) -> Table:
    """Build the table of settings that fit, in the unit of the table above it."""
    cells = [fit.prediction.cell for fit in fits]
    columns: dict[str, Sequence[str]] = {
        "precision": [cell.precision for cell in cells],
        "memory": [shorten_level(cell.setting) for cell in cells],
        "ranks": [cell.layout for cell in cells if cell.layout != "alone"],
        "largest\nbatch": [f"{fit.largest_batch:,}" for fit in fits],
        "batch x\naccumulate": [f"{fit.batch_size} x {fit.accumulate}" for fit in fits],
        f"peak\n{unit}": [format_in_unit(fit.prediction.total, unit_bytes) for fit in fits],
        "predicted\ntime": [f"{fit.relative_time:.2f}x" for fit in fits],
    }
    filled = {name: column for name, column in columns.items() if column}
    return make_columns_table(filled, left=("precision", "memory", "ranks"))


def convert_plan(plan: MemoryPlan) -> dict[str, Any]:
    """Convert the plan to plain JSON types."""
    return {
        "workload": plan.config.workload,
        "parameters": plan.num_parameters,
        "batch_size": plan.config.train.batch_size,
        "accumulate": plan.config.train.accumulate,
        "mode": plan.mode,
        "ranks": plan.ranks,
        "rows": [
            {"precision": row.precision, "memory": str(row.cell.setting),
             "layout": None if plan.ranks is None else row.cell.layout, "peak_bytes": sum(row.components.values()),
             "components": {name: size for name, size in row.components.items() if size},
             "peak_bytes_by_mode": dict(row.totals)}
            for row in plan.rows
        ],
        "memory_bytes": plan.memory_bytes or None,
        "fits": [
            {"precision": fit.prediction.cell.precision, "memory": str(fit.prediction.cell.setting),
             "layout": None if plan.ranks is None else fit.prediction.cell.layout,
             "largest_batch": fit.largest_batch, "batch_size": fit.batch_size, "accumulate": fit.accumulate,
             "peak_bytes": fit.prediction.total, "relative_time": fit.relative_time, "words": fit.arguments}
            for fit in plan.fits
        ],
        "notes": list(plan.notes),
    }  # fmt: skip
