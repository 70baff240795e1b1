"""`halfstep plan --memory`: peak memory by component before anything runs, and what fits a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from halfstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from rich.table import Table

    from halfstep.config.schema import RunConfig
    from halfstep.hardware.facts import Hardware
    from halfstep.report.memory_view import MemoryRow
    from halfstep.run.memory_fit import Fit
    from halfstep.run.memory_plan import MemoryPlanner
    from halfstep.tune.modes import Mode

MODES = {"off": "eager", "compile": "compile", "graph": "graph", "auto": "graph"}
"""`train.fast` to the mode that is shown."""
TRACED = {
    "eager": "forward and backward, operation by operation",
    "compile": "the eager trace, cut and fused by the compiler's rules",
    "graph": "our chains of kernels where the model has one, else as compiled; plus the pool's gaps",
}
NO_FOLDER = "random"
TABLE_WIDTH = 125
MADE_UP = "made-up data of the usual shape; yours with --data-dir DIR"


Flags = Mapping[str, object]


def show(
    words: Sequence[str], flags: Flags, *, gpu: str | None, fit: str | None, mode: str | None, picture: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the plan, or write it as JSON; draw it where a picture is asked for."""
    from halfstep.report.memory_view import draw_memory, told_once
    from halfstep.report.picture_file import refuse_unknown_format
    from halfstep.run.memory_fit import fitting, notes_of, precisions_of, refuse_nothing_fits, usable_bytes
    from halfstep.run.memory_plan import MemoryPlanner
    from halfstep.run.planned_step import planned_step

    if picture:
        refuse_unknown_format(picture)
    hardware, memory, where = _device(gpu, fit, flags)
    config, is_made_up = _config(words, flags)
    shown = _mode(mode, config)
    planner = MemoryPlanner(planned_step(config), hardware)
    precisions = _precisions(flags) or precisions_of(hardware)
    rows = _rows(planner, config, shown, precisions)
    limit = usable_bytes(memory)
    fits = fitting(planner, config, limit, shown, precisions, hardware) if memory else []
    if memory and not fits:
        refuse_nothing_fits(planner, config, limit, shown, where)
    notes = [MADE_UP] if is_made_up else []
    notes += list(notes_of(planner, config, fits)) if fits else []
    if picture:
        draw_memory(_title(planner, config, shown), told_once(rows), picture, limit_bytes=memory)
    if as_json:
        typer.echo(json.dumps(_as_json(planner, config, shown, rows, fits, memory, notes), indent=2))
        return
    _print(planner, config, shown, rows, fits, where, notes)


def _device(gpu: str | None, fit: str | None, flags: Flags) -> tuple[Hardware | None, int, str]:
    """Whose formats count, how much memory there is (0: not asked), and how that is called."""
    from halfstep.hardware.gpus import known_gpu
    from halfstep.hardware.probe import probe
    from halfstep.measure.memory import format_bytes
    from halfstep.run.memory_fit import read_size

    size = read_size(fit) if fit else 0
    if gpu:
        hardware: Hardware | None = known_gpu(gpu)
    else:
        here = probe(str(flags["device"] or "auto"))
        hardware = here if here.kind in ("cuda", "rocm") else None
    if size:
        return hardware, size, format_bytes(size)
    if hardware is None:
        return None, 0, ""
    return hardware, hardware.memory_total_bytes, f"{hardware.name} ({format_bytes(hardware.memory_total_bytes)})"


def _config(words: Sequence[str], flags: Flags) -> tuple[RunConfig, bool]:
    """The config at full size: without a folder a workload would take the small size of its demo."""
    from halfstep.workloads import KINDS, load

    loaded = load(words[0], flags=flags, overrides=words[1:])
    kind = KINDS.of(loaded.config.workload)
    if loaded.config.data.dir is not None or kind.over is None or kind.random_store is None:
        return loaded.config, False
    config = load(words[0], flags={**flags, "data_dir": NO_FOLDER}, overrides=words[1:]).config
    return config.model_copy(update={"data": config.data.model_copy(update={"dir": None})}), True


def _mode(asked: str | None, config: RunConfig) -> Mode:
    word = asked or MODES[config.train.fast]
    if word not in TRACED:
        raise ConfigError(f"--mode takes no {word!r}", why=f"it takes {', '.join(TRACED)}", fix=nearest(word, TRACED))
    return word  # type: ignore[return-value]


def _precisions(flags: Flags) -> tuple[str, ...]:
    from halfstep.config.aliases import precision_name

    wish = flags["precision"]
    name = precision_name(str(wish), "--precision") if wish else "auto"
    return () if name == "auto" else (name,)


def _rows(planner: MemoryPlanner, config: RunConfig, mode: Mode, precisions: Sequence[str]) -> list[MemoryRow]:
    from halfstep.report.memory_view import MemoryRow
    from halfstep.run.memory_fit import levels_of
    from halfstep.run.memory_plan import MODES as ALL_MODES
    from halfstep.run.memory_plan import Cell

    train, rows = config.train, []
    for precision in precisions:
        for setting in levels_of(planner, config):
            cells = {
                other: Cell(
                    precision=precision, mode=other, setting=setting, batch_size=train.batch_size,
                    accumulate=train.accumulate,
                )
                for other in ALL_MODES
            }  # fmt: skip
            found = {other: planner.predict(cell) for other, cell in cells.items()}
            totals: dict[str, int] = {other: prediction.total for other, prediction in found.items()}
            row = MemoryRow(
                precision=precision, level=str(setting), components=found[mode].components, totals=totals
            )  # fmt: skip
            rows.append(row)
    return rows


def _title(planner: MemoryPlanner, config: RunConfig, mode: str) -> str:
    accumulated = f" x {config.train.accumulate}" if config.train.accumulate > 1 else ""
    size = f"{planner.step.num_parameters:,} parameters"
    return f"{config.workload}, {size}, batch {config.train.batch_size}{accumulated}, {config.optimizer.name}, {mode}"


def _print(
    planner: MemoryPlanner, config: RunConfig, mode: Mode, rows: Sequence[MemoryRow], fits: Sequence[Fit],
    where: str, notes: Sequence[str],
) -> None:  # fmt: skip
    from rich.console import Console

    from halfstep.report.memory_view import memory_table, told_once

    console = Console(soft_wrap=True, highlight=False)
    is_wide = console.width >= TABLE_WIDTH
    parts = f"by component in {mode} mode, and " if is_wide else ""
    console.print(f"{_title(planner, config, mode)}: predicted peak in GB, {parts}in each mode")
    console.print(memory_table(told_once(rows), with_components=is_wide))
    if not is_wide:
        console.print(f"components: a terminal of {TABLE_WIDTH} columns, --json or --picture FILE", style="dim")
    if fits:
        console.print(f"\nfits {where}, in order of predicted speed")
        console.print(_fit_table(fits))
        console.print(f"to take the first: {' '.join(fits[0].words)}")
    for note in notes:
        console.print(f"note: {note}")
    for name, what in TRACED.items():
        console.print(f"traced for {name}: {what}", style="dim")


def _fit_table(fits: Sequence[Fit]) -> Table:
    from halfstep.report.memory_view import gigabytes, short_level
    from halfstep.report.tables import columns_table

    cells = [fit.prediction.cell for fit in fits]
    columns = {
        "precision": [cell.precision for cell in cells],
        "memory": [short_level(str(cell.setting)) for cell in cells],
        "largest\nbatch": [f"{fit.largest_batch:,}" for fit in fits],
        "batch x\naccumulate": [f"{fit.batch_size} x {fit.accumulate}" for fit in fits],
        "GB": [gigabytes(fit.prediction.total) for fit in fits],
        "predicted\ntime": [f"{fit.relative_time:.2f}x" for fit in fits],
    }
    return columns_table(columns, left=("precision", "memory"))


def _as_json(
    planner: MemoryPlanner, config: RunConfig, mode: str, rows: Sequence[MemoryRow], fits: Sequence[Fit],
    memory: int, notes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    return {
        "workload": config.workload,
        "parameters": planner.step.num_parameters,
        "batch_size": config.train.batch_size,
        "accumulate": config.train.accumulate,
        "mode": mode,
        "traced": TRACED,
        "rows": [
            {"precision": row.precision, "memory": row.level, "peak_bytes": row.total,
             "components": {name: size for name, size in row.components.items() if size},
             "peak_bytes_by_mode": dict(row.totals)}
            for row in rows
        ],
        "memory_bytes": memory or None,
        "fits": [
            {"precision": fit.prediction.cell.precision, "memory": str(fit.prediction.cell.setting),
             "largest_batch": fit.largest_batch, "batch_size": fit.batch_size, "accumulate": fit.accumulate,
             "peak_bytes": fit.prediction.total, "relative_time": fit.relative_time, "words": fit.words}
            for fit in fits
        ],
        "notes": list(notes),
    }  # fmt: skip
