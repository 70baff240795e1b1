"""Show a memory plan as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from halfstep.errors import choose_byte_unit
from halfstep_train.report.console import make_columns_table, split_columns

COMPONENTS = {
    "weights": "parameters and buffers",
    "gathered": "sharded: parameters of the blocks in use, whole, and the buffers they are gathered into",
    "gradients": "those that exist at the peak",
    "reductions": "several ranks: gradients on their way to the other ranks",
    "optimizer": "optimizer state",
    "average": "averaged weights (EMA)",
    "frozen parts": "networks that are not trained",
    "half copies": "half-precision copies of fp32 weights (autocast)",
    "activations": "tensors stored for backward",
    "inputs": "the batch",
    "workspaces": "temporary tensors, those of a watch, and the scratch memory of cuDNN and cuBLAS",
    "graph pool": "fragmentation of a CUDA graph's memory",
}
"""What each component of a peak holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One precision and memory level: bytes by component in the shown mode, and totals of all modes."""

    precision: str
    level: str
    components: Mapping[str, int]
    totals: Mapping[str, int]
    layout: str = ""
    """Several ranks: whether each has the whole model (ddp) or a shard of it."""

    @property
    def total(self) -> int:
        return sum(self.components.values())


def build_memory_tables(rows: Sequence[MemoryRow], width: int) -> list[Table]:
    """Build the table of peaks by component and mode in the unit of the largest, divided to fit the width."""
    names = [name for name in COMPONENTS if any(row.components.get(name) for row in rows)]
    columns = {"precision": [row.precision for row in rows], "memory": [shorten_level(row.level) for row in rows]}
    if rows[0].layout:
        columns["ranks"] = [row.layout for row in rows]
    _, unit = choose_memory_unit(rows)
    columns |= {
        name.replace(" ", "\n"): [format_in_unit(row.components.get(name, 0), unit) for row in rows] for name in names
    }
    columns |= {mode: [format_in_unit(row.totals[mode], unit) for row in rows] for mode in rows[0].totals}
    left = [name for name in ("precision", "memory", "ranks") if name in columns]
    return [make_columns_table(one, left=left) for one in split_columns(columns, width, names=left)]


def choose_memory_unit(rows: Sequence[MemoryRow]) -> tuple[str, float]:
    return choose_byte_unit(max(max(row.total, *row.totals.values()) for row in rows))


def merge_equal_rows(rows: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Merge rows with equal numbers: list their precisions together, and omit levels that save nothing."""
    found: dict[tuple[object, ...], MemoryRow] = {}
    for row in rows:
        key = (row.layout, tuple(row.components.items()), tuple(row.totals.items()))
        same = found.setdefault(key, row)
        if same.level == row.level and row.precision not in same.precision.split(", "):
            found[key] = replace(same, precision=f"{same.precision}, {row.precision}")
    return list(found.values())


def shorten_level(level: str) -> str:
    return level.replace("recompute ", "").replace(" optimizer", "")


def format_in_unit(size: int, unit_bytes: float) -> str:
    value = size / unit_bytes
    return f"{value:.2f}" if 0 < value < 10 else f"{value:.1f}" if size else "-"
