"""Show a memory plan as a table and as stacked bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from halfstep.errors import choose_byte_unit
from halfstep_train.report.console import make_columns_table, split_columns
from halfstep_train.report.picture_file import FAINT, INK, make_figure, save_figure

COLOURS = {
    "weights": "#0072b2", "gathered": "#7f7fd5", "gradients": "#56b4e9", "reductions": "#a6761d",
    "optimizer": "#009e73", "average": "#8fd3c0",
    "frozen parts": "#5d6d7e", "half copies": "#f0e442", "activations": "#e69f00", "inputs": "#bdc3c7",
    "workspaces": "#d55e00", "graph pool": "#cc79a7",
}  # fmt: skip
"""Okabe and Ito's palette, distinguishable for colour-blind readers, and greys."""
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
INCHES_PER_ROW = 0.34


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
    names = [name for name in COLOURS if any(row.components.get(name) for row in rows)]
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


def draw_memory(title: str, rows: Sequence[MemoryRow], path: Path, *, limit_bytes: int = 0) -> None:
    """Draw stacked bars, one per row, and a line at the device's memory size."""
    figure = make_figure((10.5, 1.8 + INCHES_PER_ROW * len(rows)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    axes = figure.subplots()
    places, ends, (unit, unit_bytes) = range(len(rows)), [0.0] * len(rows), choose_memory_unit(rows)
    for name, colour in COLOURS.items():
        sizes = [row.components.get(name, 0) / unit_bytes for row in rows]
        if any(sizes):
            axes.barh(places, sizes, left=ends, height=0.72, color=colour, label=name, edgecolor="white", linewidth=0.4)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for place, end in enumerate(ends):
        axes.annotate(f"{end:.2f} {unit}", (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    if limit_bytes:
        axes.axvline(limit_bytes / unit_bytes, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(places, [f"{row.precision}  {row.level}  {row.layout}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.15 * max([*ends, limit_bytes / unit_bytes]))
    axes.set_xlabel(f"predicted peak memory, {unit}", fontsize=9, color=FAINT)
    axes.tick_params(labelsize=9, labelcolor=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8.5, frameon=False)
    save_figure(figure, path)
