"""`halfstep plan`: which precision each module computes in; with --memory, the peak memory of a step, by component."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from halfstep.errors import ConfigError, format_bytes
from halfstep_train.cli.options import Arguments, DataDir, Device, Json, Precision, Simulate, Strict, option

if TYPE_CHECKING:
    from rich.table import Table

    from halfstep.hardware.device_facts import Hardware
    from halfstep_train.config.load import Loaded
    from halfstep_train.config.schema import RunConfig
    from halfstep_train.report.memory_view import MemoryRow
    from halfstep_train.run.memory.planner import Cell, Fit, MemoryPlanner
    from halfstep_train.tune.modes import Mode


def command(
    arguments: Arguments,
    precision: Precision = None,
    data_dir: DataDir = None,
    device: Device = None,
    gpu: Annotated[
        str | None, option("Plan for this GPU, which need not be in this machine: v100, 'RTX 4090'.")
    ] = None,
    strict: Strict = None,
    simulate: Simulate = None,
    memory: Annotated[bool, option("Predict peak memory by component, without running.", "--memory")] = False,
    fit: Annotated[
        str | None, option("With --memory: find the largest batch for this much memory, such as 24GB.")
    ] = None,
    ranks: Annotated[int | None, option("With --memory: predict one rank of this many, with DDP and sharded.")] = None,
    mode: Annotated[
        Literal["eager", "compile", "graph"] | None, option("With --memory: only this; default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the precision plan that `halfstep train` would use: format and reason per module.

    With --memory: the predicted peak memory of a step for each precision, memory level and mode, and what fits a GPU.

    Example:

        halfstep plan unet --precision bf16 --gpu "RTX 2080 Ti"

        halfstep plan resnet50 'precision.modules={fc: fp32}'

        halfstep plan gpt2 --memory --gpu "RTX 3090"

        halfstep plan gpt2_xl --memory --ranks 4 --fit 24GB
    """
    flags = {"precision": precision, "data_dir": data_dir, "device": device, "strict": strict, "simulate": simulate}
    loaded = load_config(arguments, flags, gpu=gpu)
    shown: Mode = mode or SHOWN_MODES[loaded.config.train.fast]
    size = read_size(fit) if fit else 0
    if memory:
        from rich.console import Console

        with Console(stderr=True).status("loading torch and building the model") as status:
            from halfstep_train.run.memory.planner import MODES

            config, is_made_up = _load_full_size(loaded, arguments, flags)
            modes = (shown,) if mode else MODES
            where, tell = _choose_device(gpu, size, flags), status.update
            plan = _plan_memory(config, flags, shown, modes, where, ranks, tell, gpu=gpu, is_made_up=is_made_up)
        return typer.echo(json.dumps(_convert_plan(plan), indent=2)) if as_json else _print_memory(plan)
    for name, value in (("--fit", fit), ("--ranks", ranks), ("--mode", mode)):
        if value is not None:
            raise ConfigError(f"{name} {value} needs --memory", fix=f"--memory {name} {value}")
    from halfstep_train.run.assemble import plan_config

    decided = plan_config(loaded.config, gpu=gpu)
    if as_json:
        return typer.echo(decided.to_json())
    return typer.echo(str(decided))  # its warnings are its last lines


def load_config(arguments: Sequence[str], flags: Flags, *, gpu: str | None) -> Loaded:
    """Load the config; refuse missing paths and an unknown GPU before torch is imported."""
    from halfstep.hardware.gpus import look_up_gpu
    from halfstep_train.run.folder import refuse_missing_paths
    from halfstep_train.run.launch import read_launcher
    from halfstep_train.workloads import load

    if gpu:
        look_up_gpu(gpu)
    loaded = load(arguments[0], flags=flags, overrides=arguments[1:], launcher=read_launcher(os.environ))
    refuse_missing_paths(loaded.config)
    return loaded


SHOWN_MODES: dict[str, Mode] = {"off": "eager", "compile": "compile", "graph": "graph", "auto": "graph"}
"""`train.fast` to the mode that is shown."""
LEVELS = {
    "normal": "nothing is recomputed",
    "pointwise": "pointwise operations are recomputed in backward instead of stored",
    "alternate": "every second block is recomputed",
    "blocks": "all blocks are recomputed",
    "8-bit": "optimizer state in 8 bits",
}
"""What the words in the column `memory` mean."""
TRACED = {
    "eager": "peak of an eager step, traced operation by operation",
    "compile": "peak of the compiled step: the eager trace, partitioned and fused by the compiler's rules",
    "graph": "peak of the CUDA graph: our fused kernels if the model has them, else as compiled; plus its pool",
}
LAYOUTS = (
    "peak on the rank with most samples. ddp: each rank has the whole model; shard: parameters, gradients, optimizer "
    "state and average are divided among the ranks (train.shard=true, FSDP2), with the memory levels that need no "
    "trial on a copy of the model; sharded steps are never captured"
)
NO_FOLDER = "random"
"""Any text: with a data folder a workload has its full size, without one that of its demo."""
UNIT = "1 GB is 10^9 bytes, in every command: a GPU sold with 24 GB has 25.8 GB"
SIZES = {letter: 10 ** (3 * power) for power, letter in enumerate("mgt", 2)}
SIZES |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("mgt", 2)}
MADE_UP = "predicted for synthetic data of the usual shape; --data-dir DIR uses yours"
RECOMPUTED = "recomputation covers {}; a run checks on a copy that it changes no result"

Flags = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
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


def _plan_memory(
    config: RunConfig,
    flags: Flags,
    shown: Mode,
    modes: Sequence[Mode],
    device: tuple[Hardware | None, int, str],
    ranks: int | None,
    tell: Callable[[str], None],
    *,
    gpu: str | None,
    is_made_up: bool,
) -> MemoryPlan:
    """Predict all rows, and find what fits if a memory size is known; `tell` shows the progress, which takes a minute
    for a large model."""
    from halfstep.own_loop.repeated_blocks import describe_blocks
    from halfstep.precision.names import normalise_precision
    from halfstep_train.run.assemble import provide_data
    from halfstep_train.run.memory.planner import (
        MemoryPlanner,
        compute_usable_bytes,
        describe_effects,
        find_fits,
        list_cells,
        list_precisions,
        refuse_nothing_fits,
    )
    from halfstep_train.run.memory.traceable_step import build_traceable_step

    hardware, memory, where = device
    _refuse_unfit_ranks(ranks, config)
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
        rows.append(_predict_row(planner, cell, shown, modes))
    limit = compute_usable_bytes(memory)
    fits = find_fits(planner, config, limit, shown, precisions, hardware, ranks=ranks, tell=tell) if memory else []
    if memory and not fits:
        refuse_nothing_fits(planner, config, limit, shown, where, ranks)
    notes = [*([MADE_UP] if is_made_up else []), *(describe_effects(planner, config, fits) if fits else ())]
    if gpu and hardware:
        notes += _list_gpu_notes(hardware, name, memory)
    if planner.step.blocks:
        notes.append(RECOMPUTED.format(describe_blocks(planner.step.workload.model, planner.step.blocks)))
    return MemoryPlan(
        config=config,
        num_parameters=planner.step.num_parameters,
        mode=shown,
        ranks=ranks,
        rows=rows,
        fits=fits,
        memory_bytes=memory,
        where=where,
        notes=notes,
    )


def _predict_row(planner: MemoryPlanner, cell: Cell, mode: Mode, modes: Sequence[Mode]) -> MemoryRow:
    from halfstep_train.report.memory_view import MemoryRow

    found = {other: planner.predict(cell.run_in(other)) for other in modes}
    return MemoryRow(
        precision=cell.precision,
        level=str(cell.setting),
        components=found[mode].components,
        totals={other: prediction.total for other, prediction in found.items()},
        layout="" if cell.layout == "alone" else cell.layout,
    )


def _refuse_unfit_ranks(ranks: int | None, config: RunConfig) -> None:
    if ranks is not None and not 1 <= ranks <= config.train.batch_size:
        raise ConfigError(
            f"--ranks {ranks} with train.batch_size={config.train.batch_size}",
            why="batch_size counts samples over all ranks, and each rank needs at least one",
            fix=f"--ranks 1 to {config.train.batch_size}, or a larger train.batch_size",
        )


def _choose_device(gpu: str | None, size: int, flags: Flags) -> tuple[Hardware | None, int, str]:
    """Return the hardware that decides the formats, the memory size in bytes (0: not given), and its description."""
    from halfstep.hardware.gpus import look_up_gpu
    from halfstep.hardware.probe import probe

    if gpu:
        hardware: Hardware | None = look_up_gpu(gpu)
    else:
        # Without a GPU the formats of a generic one are planned, for all precisions.
        here = probe(str(flags["device"] or "auto"))
        hardware = here if here.kind in ("cuda", "rocm") else None
    if size:
        return hardware, size, format_bytes(size)
    if hardware is None:
        return None, 0, ""
    return hardware, hardware.memory_total_bytes, f"{hardware.name} ({format_bytes(hardware.memory_total_bytes)})"


def read_size(text: str) -> int:
    """Parse `24GB` or `24 GiB` to bytes; a number alone is gigabytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([mgt]i?)b?)?", text.strip().lower())
    size = int(float(found[1]) * SIZES[found[2] or "g"]) if found else 0
    if not size:
        raise ConfigError(
            f"--fit {text!r} is not a memory size", fix="write a number and its unit: --fit 24GB, or --fit 40GiB"
        )
    return size


def _list_gpu_notes(hardware: Hardware, precision: str, memory: int) -> Iterator[str]:
    """Yield notes about a GPU chosen by name: missing formats and memory sizes."""
    from halfstep.precision.ladder import explain_lack

    if precision != "auto" and (reason := explain_lack(precision, hardware)):
        yield f"{reason}: a run on this GPU would use another precision"
    if not memory:
        yield f"{hardware.name} is sold with several memory sizes: give one with --fit SIZE"
    yield from hardware.notes


def _load_full_size(loaded: Loaded, arguments: Sequence[str], flags: Flags) -> tuple[RunConfig, bool]:
    """Return the config at full size, and whether its data are made up.

    Without a data folder a workload would use the small size of its demo.
    """
    from halfstep_train.workloads import KINDS, load

    kind = KINDS.of(loaded.config.workload)
    if loaded.config.data.dir is not None or kind.synthetic is None:
        return loaded.config, False
    config = load(arguments[0], flags={**flags, "data_dir": NO_FOLDER}, overrides=arguments[1:]).config
    return config.replace(data={"dir": None}), True


def _print_memory(plan: MemoryPlan) -> None:
    """Print the table of predictions, what fits, and notes."""
    from rich.console import Console
    from rich.text import Text

    from halfstep_train.report.console import break_line, print_text
    from halfstep_train.report.memory_view import (
        COMPONENTS,
        build_memory_tables,
        choose_memory_unit,
        merge_equal_rows,
        shorten_level,
    )

    console = Console(soft_wrap=True, highlight=False)
    of_modes = "in each mode" if len(plan.rows[0].totals) > 1 else ""
    unit, unit_bytes = choose_memory_unit(plan.rows)
    by_component = f"by component in {plan.mode} mode"
    title = ", ".join(filter(None, [f"{plan.title}: predicted peak in {unit}", by_component, of_modes]))
    console.print(break_line(title, console.width))
    rows = merge_equal_rows(plan.rows)
    for number, table in enumerate(build_memory_tables(rows, console.width)):
        console.print(*([""] if number else []), table, sep="\n")
    if plan.fits:
        of_each = "" if plan.ranks is None else " on each rank"
        console.print(f"\nfits {plan.where}{of_each}, fastest (predicted) first")
        console.print(_build_fit_table(plan.fits, unit, unit_bytes))
        console.print(f"to use the first: {' '.join(plan.fits[0].arguments)}")
    for note in plan.notes:
        print_text(console, Text(f"note: {note}"))
    levels = {word for row in rows for word in shorten_level(row.level).split(" + ")}
    legend = {
        "memory": "levels of train.memory; "
        + "; ".join(f"{word}: {about}" for word, about in LEVELS.items() if word in levels)
    }
    if plan.ranks is not None:
        legend["ranks"] = LAYOUTS
    used = {name for row in rows for name, size in row.components.items() if size}
    legend |= {name: about for name, about in COMPONENTS.items() if name in used}
    legend |= {name: TRACED[name] for name in plan.rows[0].totals}
    console.print("\ncolumns", style="dim")
    for name, about in legend.items():
        console.print(break_line(f"  {name}: {about}", console.width), style="dim")
    console.print(f"  {UNIT}", style="dim")


def _build_fit_table(fits: Sequence[Fit], unit: str, unit_bytes: float) -> Table:
    """Build the table of settings that fit, in the unit of the table above it."""
    from halfstep_train.report.console import make_columns_table
    from halfstep_train.report.memory_view import format_in_unit, shorten_level

    cells = [fit.prediction.cell for fit in fits]
    columns: dict[str, Sequence[str]] = {
        "precision": [cell.precision for cell in cells],
        "memory": [shorten_level(str(cell.setting)) for cell in cells],
        "ranks": [cell.layout for cell in cells if cell.layout != "alone"],
        "largest\nbatch": [f"{fit.largest_batch:,}" for fit in fits],
        "batch x\naccumulate": [f"{fit.batch_size} x {fit.accumulate}" for fit in fits],
        f"peak\n{unit}": [format_in_unit(fit.prediction.total, unit_bytes) for fit in fits],
        "predicted\ntime": [f"{fit.relative_time:.2f}x" for fit in fits],
    }
    filled = {name: column for name, column in columns.items() if column}
    return make_columns_table(filled, left=("precision", "memory", "ranks"))


def _convert_plan(plan: MemoryPlan) -> dict[str, Any]:
    """Convert the plan to plain JSON types."""
    return {
        "workload": plan.config.workload,
        "parameters": plan.num_parameters,
        "batch_size": plan.config.train.batch_size,
        "accumulate": plan.config.train.accumulate,
        "mode": plan.mode,
        "ranks": plan.ranks,
        "rows": [
            {"precision": row.precision, "memory": row.level, "layout": row.layout or None, "peak_bytes": row.total,
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
