"""The bench as one table on the console, with what a reader must know below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from halfstep.report.tables import columns_table

Record = Mapping[str, Any]
NOTHING = "-"
WHO = ("who", "way", "precision")
GAP = 2
"""Blanks between two columns."""


def show_bench(record: Record, console: Console) -> None:
    """Title, table, the rows that could not be measured and why, and the warnings."""
    rows = record["rows"]
    console.print(Text(title(record), style="bold"), soft_wrap=True)
    measured = [row for row in rows if row["window_ms"]]
    for columns in fitting(_columns(measured), console.width) if measured else ():
        console.print(columns_table(columns, left=WHO))
    for line in (*_not_measured(rows), *_remarks(measured), *_meanings(record, measured)):
        console.print(Text(line, style="dim"), soft_wrap=True)
    for warning in record["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if compared := record.get("compared_rows"):
        better = "none is slower or larger" if any(row["peak_bytes"] for row in measured) else "none is slower"
        found = f"{len(record['regressions'])} findings" if record["regressions"] else better
        line = f"{len(compared)} of the baseline's {record['baseline_rows']} rows compared: {found}"
        console.print(Text(line), soft_wrap=True)
    if simulated := record.get("not_compared_rows"):
        line = f"not compared: {', '.join(simulated)}: simulated, so their time means nothing"
        console.print(Text(line), soft_wrap=True)


def title(record: Record) -> str:
    """`unet, 31.0M parameters, batch 8, 512 pixels, adamw, clip 1: NVIDIA H200, torch 2.11.0`."""
    problem = record["problem"]
    return (
        f"{problem['workload']}, {_count(problem['parameters'])} parameters, batch {problem['batch_size']}, "
        f"{problem['image_size']} pixels, {problem['optimizer']}, clip {problem['clip_norm']:g}: "
        f"{record['device']}, torch {record['versions']['torch']}"
    )


def _count(number: int) -> str:
    return f"{digits(number / 1e6)}M" if number >= 1e6 else f"{number:,}"


def digits(value: float | None, significant: int = 3) -> str:
    """So many significant digits, never an exponent: 0.0993, 25.1, 247, 5526."""
    if value is None:
        return NOTHING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, significant - 1 - math.floor(math.log10(abs(value))))}f}"


def start(row: Mapping[str, Any]) -> str:
    """Seconds to the first step: with an empty compiler cache, then with a filled one."""
    if row["cold_start_s"] is not None:
        return f"{digits(row['cold_start_s'])} cold, {digits(row['start_s'])} warm"
    return f"{digits(row['start_s'])} {row['cache']}".rstrip()


def fitting(columns: Mapping[str, Sequence[str]], width: int) -> list[dict[str, Sequence[str]]]:
    """The columns in as few tables as fit the width, each with the names of its rows: nothing is cut off."""
    widths = {name: max(map(len, (name, *cells))) + GAP for name, cells in columns.items()}
    names = {name: columns[name] for name in WHO}
    tables: list[dict[str, Sequence[str]]] = [dict(names)]
    for name in columns:
        if name in WHO:
            continue
        if len(tables[-1]) > len(WHO) and sum(widths[n] for n in (*tables[-1], name)) - GAP > width:
            tables.append(dict(names))
        tables[-1][name] = columns[name]
    return tables


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    def each(name: str, scale: float = 1.0, significant: int = 3) -> list[str]:
        return [digits(None if row[name] is None else row[name] * scale, significant) for row in rows]

    columns = {
        "who": [row["name"] for row in rows],
        "way": [row["variant"] for row in rows],
        "precision": [row["precision"] for row in rows],
        "ms/step": each("ms", significant=4),
        "windows": [f"{digits(row['ms_min'], 4)}–{digits(row['ms_max'], 4)}" for row in rows],
        "samples/s": each("samples_per_s", significant=4),
        "x fp32": [_times(row, "speedup_fp32") for row in rows],
        "x tf32": [_times(row, "speedup_tf32") for row in rows],
        "peak GB": each("peak_bytes", 1e-9),
        "reserved": each("reserved_bytes", 1e-9),
        "J/sample": each("joules_per_sample"),
        "of floor": [NOTHING if row["floor_share"] is None else f"{row['floor_share']:.0%}" for row in rows],
        "loss": each("loss", significant=4),
        "start s": [start(row) for row in rows],
    }
    # Energy on a CPU, TF32 where nobody asked for it: a column of dashes says nothing.
    return {name: cells for name, cells in columns.items() if any(cell != NOTHING for cell in cells)}


def _times(row: Mapping[str, Any], name: str) -> str:
    return NOTHING if row[name] is None else f"{row[name]:.2f}"


def _not_measured(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"not measured: {_label(row)}: {row['reason']}" for row in rows if not row["window_ms"]]


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{_label(row)}: {remark}" for row in rows for remark in row["remarks"]]


def _meanings(record: Record, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the columns mean where the words alone could mislead."""
    if not rows:
        return []
    return [
        f"ms/step: median of {len(rows[0]['window_ms'])} windows of {record['window_steps']} steps, copy of the batch "
        "to the device included; windows: fastest to slowest; samples/s: at that median",
        *_bases(record["speedup_bases"]),
        f"memory: {record['memory']}",
        f"loss: after {record['steps']} steps on one random batch, held against {record['loss_reference']} "
        f"within {record['loss_bound']:.0%}; of floor: counted arithmetic at the measured matmul rate",
    ]


def _bases(bases: Mapping[str, str]) -> list[str]:
    """Which rows the speedups refer to: not always the eager one."""
    said = "; ".join(f"x {precision}: times as fast as {label}" for precision, label in bases.items())
    return [said] if said else []


def _label(row: Mapping[str, Any]) -> str:
    return " ".join(filter(None, (row["name"], row["variant"], row["precision"])))
