"""A heat map: modules × kinds of numbers, white where a format holds them, red where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfstep.errors import CheckpointError
from halfstep.report.curves import INK


def draw_heat_map(cells: Sequence[tuple[str, str, float]], title: str, path: Path) -> None:
    """Cells are module, kind and a number from 0 (fits) to 1 (does not)."""
    import numpy as np
    from matplotlib.figure import Figure

    modules = list(dict.fromkeys(module for module, *_ in cells))
    kinds = list(dict.fromkeys(kind for _, kind, _ in cells))
    grid = np.full((max(len(modules), 1), max(len(kinds), 1)), np.nan)
    for module, kind, value in cells:
        place = modules.index(module), kinds.index(kind)
        grid[place] = value if np.isnan(grid[place]) else max(grid[place], value)
    figure = Figure(figsize=(2.5 + 1.2 * len(kinds), 1.2 + 0.18 * len(modules)), layout="constrained")
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", cmap="Reds", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(kinds)), kinds, color=INK)
    axes.set_yticks(range(len(modules)), modules, fontsize=7, color=INK)
    axes.set_title(title, color=INK)
    figure.colorbar(shown, ax=axes, ticks=[0, 0.5, 1]).ax.set_yticklabels(["fits", "near the end", "does not fit"])
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        fix = "name a .png in a folder that exists"
        raise CheckpointError(f"cannot write the picture {path}: {error}", fix=fix) from error
