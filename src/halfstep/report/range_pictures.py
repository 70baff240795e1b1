"""How large the numbers of a step are, module by module, against what a format can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from halfstep.formats import format_named
from halfstep.report.curves import TRAIN, VALIDATION
from halfstep.report.picture_file import BAD, FAINT, GRID, INK, new_figure, save_figure

COLOURS = {"forward": TRAIN, "backward": VALIDATION}
MOST = 60
"""Modules that can be read on one page; of more, those nearest to the format's ends."""


def draw_ranges(rows: Mapping[str, Sequence[tuple[str, float, float]]], format: str, path: Path) -> None:
    """A bar from the smallest to the largest magnitude of each module; lines where the format ends."""
    fmt = format_named(format if format != "fp8" else "bf16")
    names = list(dict.fromkeys(name for own in rows.values() for name, *_ in own))[:MOST]
    figure = new_figure((9, 1.5 + 0.22 * max(len(names), 4)))
    axes = figure.subplots()
    for k, (word, own) in enumerate(rows.items()):
        for name, low, high in own:
            if name in names and high > 0:
                left, right = math.log2(low), math.log2(high)
                height = names.index(name) + (k - 0.5) * 0.3
                axes.plot([left, max(right, left + 0.2)], [height, height], color=COLOURS[word], linewidth=3)
    for word in rows:
        axes.plot([], [], color=COLOURS[word], linewidth=3, label=word)
    ends = {"largest": fmt.largest, "smallest normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    for word, value in ends.items():
        axes.axvline(math.log2(value), color=BAD if word != "smallest normal" else FAINT, linewidth=1, linestyle="--")
        axes.text(math.log2(value), -1.0, f"{fmt.name} {word}", color=FAINT, fontsize=7, ha="center", va="bottom")
    axes.set_yticks(range(len(names)), names, fontsize=7, color=INK)
    axes.set_ylim(len(names), -1.2)
    axes.set_xlabel("magnitude, power of two", color=INK)
    axes.grid(axis="x", color=GRID)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    save_figure(figure, path)


def draw_heat_map(cells: Sequence[tuple[str, str, float]], title: str, path: Path) -> None:
    """Cells are module, kind and a number from 0 (fits) to 1 (does not)."""
    import numpy as np

    modules = list(dict.fromkeys(module for module, *_ in cells))
    kinds = list(dict.fromkeys(kind for _, kind, _ in cells))
    grid = np.full((max(len(modules), 1), max(len(kinds), 1)), np.nan)
    for module, kind, value in cells:
        place = modules.index(module), kinds.index(kind)
        grid[place] = value if np.isnan(grid[place]) else max(grid[place], value)
    figure = new_figure((2.5 + 1.2 * len(kinds), 1.2 + 0.18 * len(modules)))
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", cmap="Reds", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(kinds)), kinds, color=INK)
    axes.set_yticks(range(len(modules)), modules, fontsize=7, color=INK)
    axes.set_title(title, color=INK)
    figure.colorbar(shown, ax=axes, ticks=[0, 0.5, 1]).ax.set_yticklabels(["fits", "near the end", "does not fit"])
    save_figure(figure, path)
