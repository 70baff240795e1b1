"""Show a benchmark: the table of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.errors import format_count
from halfstep_train.report.config_view import format_setting
from halfstep_train.report.console import make_columns_table, print_text, split_columns

Record = Mapping[str, Any]
NOTHING = "-"
WHO = ("who", "mode", "precision")


def show_bench(record: Record, console: Console) -> None:
    """Print title, table, unmeasured rows with reasons, remarks and warnings."""
    rows = record["rows"]
    title = f"{format_problem(record)}: {record['device']}, torch {record['versions']['torch']}"
    console.print(Text(title, style="bold"), soft_wrap=True)
    measured = [row for row in rows if row["window_ms"]]
    columns = _build_columns(measured, record["unit"])
    for table in split_columns(columns, console.width, names=WHO) if measured else ():
        console.print(make_columns_table(table, left=WHO))
    missing = [f"not measured: {_format_label(row)}: {row['reason']}" for row in rows if not row["window_ms"]]
    remarks = [f"{_format_label(row)}: {remark}" for row in measured for remark in row["remarks"]]
    lines = [*missing, *remarks, *_explain_columns(record, measured, columns)]
    if changed := record["problem"].get("reduced"):
        settings = ", ".join(f"{path}={format_setting(value)}" for path, value in changed.items())
        lines.insert(0, f"reduced: this is the demo's small network ({settings}); data.dir=DIR times the full one")
    for line in lines:
        print_text(console, Text(line, style="dim"))
    for warning in record["warnings"]:
        print_text(console, Text(f"warning: {warning}", style="yellow"))


def format_problem(record: Record) -> str:
    """Format `unet, 31.0M parameters, batch 8, 512 pixels, adamw, clip 1`."""
    problem = record["problem"]
    size = record["sample_size"]
    number = problem["parameters"]
    count = f"{format_digits(number / 1e6)}M" if number >= 1e6 else f"{number:,}"
    parameters = f"{' reduced to' if problem.get('reduced') else ','} {count} parameters"
    return (
        f"{problem['workload']}{parameters}, batch {problem['batch_size']}, "
        f"{f'{size}, ' if size else ''}{problem['optimizer']}, clip {problem['clip_norm']:g}"
    )


def format_digits(value: float | None, significant: int = 3) -> str:
    """Format with significant digits and without exponent: 0.0993, 25.1, 247, 5526."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, significant - 1 - math.floor(math.log10(abs(value))))}f}"


def _build_columns(rows: Sequence[Record], unit: Record) -> dict[str, list[str]]:
    """Build the cells of the measured rows by column title."""

    def format_each(name: str, scale: float = 1.0, significant: int = 3) -> list[str]:
        return [format_digits(None if row[name] is None else row[name] * scale, significant) for row in rows]

    columns = {
        "who": [row["name"] for row in rows],
        "mode": [row["variant"] for row in rows],
        "precision": [row["precision"] for row in rows],
        "ms/step": format_each("ms", significant=4),
        "windows": [f"{format_digits(row['ms_min'], 4)}–{format_digits(row['ms_max'], 4)}" for row in rows],
        f"{unit['name']}s/s": format_each("samples_per_s", unit["per_sample"], significant=4),
        "x fp32": format_each("speedup_fp32"),
        "x tf32": format_each("speedup_tf32"),
        "peak GB": format_each("peak_bytes", 1e-9),
        "reserved": format_each("reserved_bytes", 1e-9),
        f"J/{unit['name']}": format_each("joules_per_sample", 1 / unit["per_sample"]),
        "of floor": [NOTHING if row["floor_share"] is None else f"{row['floor_share']:.0%}" for row in rows],
        "loss": format_each("loss", significant=4),
        "start s": [f"{format_digits(row['start_s'])} {row['cache']}".rstrip() for row in rows],
    }
    # Drop columns of dashes only, such as energy on a CPU.
    return {name: cells for name, cells in columns.items() if any(cell != NOTHING for cell in cells)}


def _explain_columns(record: Record, rows: Sequence[Record], columns: Iterable[str]) -> list[str]:
    """Return explanations of the columns whose titles could mislead."""
    if not rows:
        return []
    meanings = {
        **{f"x {name}": f"times as fast as {label}" for name, label in record["speedup_bases"].items()},
        "loss": f"after {format_count(record['steps'], 'step')} on one random batch, compared with "
        f"{record['loss_reference']} within {record['loss_bound']:.0%}",
    }
    return [f"{name}: {meanings[name]}" for name in columns if name in meanings]


def _format_label(row: Record) -> str:
    return " ".join(filter(None, (row["name"], row["variant"], row["precision"])))
