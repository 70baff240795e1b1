"""Matplotlib figures without pyplot, which keeps global state and needs a display."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from halfstep.errors import CheckpointError
from halfstep.formats import find_format

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, BAD, GOOD, GRID = "#1f2933", "#616e7c", "#d62f3a", "#2f6fde", "#e4e7eb"
"""Bad is red and good is blue, distinguishable for colour-blind readers."""
DPI, MARGIN_INCHES = 150, 0.15


def make_figure(inches: tuple[float, float]) -> Figure:
    """Return a white figure whose labels matplotlib arranges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=inches, dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture."""
    try:
        with warnings.catch_warnings():
            # Characters that the font lacks are drawn as boxes; the rest of the picture is still right.
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            figure.savefig(path, bbox_inches="tight", pad_inches=MARGIN_INCHES)
    except (OSError, ValueError) as error:  # no space or no folder, or an unknown ending
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write {path}: {why}", fix="free disk space, or choose a .png in another folder"
        ) from error


def shorten_name(name: str, length: int) -> str:
    """Shorten a long name by replacing its middle with an ellipsis."""
    half = (length - 1) // 2
    text = name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}"
    return text.replace("$", r"\$")  # matplotlib reads $…$ as a formula


# --- value ranges per module (replay) and heat maps (dry-run) ---

COLOURS = {"forward": "#2f6fde", "backward": "#e8710a"}
MOST = 60
"""Modules that fit one page; of more, draw the one at fault and those with the largest values."""

Rows = Mapping[str, Sequence[tuple[str, float, float]]]
"""Name, smallest and largest magnitude of each module, forward and backward."""


def draw_ranges(rows: Rows, format: str, path: Path, *, at: str = "") -> None:
    """Draw a bar from the smallest to the largest magnitude of each module, and the limits of the format.

    `at` is the module at fault.
    """
    fmt = find_format(format if format != "fp8" else "bf16")
    names = choose_modules(rows, at)
    figure = make_figure((9, 1.5 + 0.22 * max(len(names), 4)))
    axes = figure.subplots()
    for k, (direction, own) in enumerate(rows.items()):
        for name, low, high in own:
            if name in names and high > 0:
                left, right = math.log2(low), math.log2(high)
                height = names.index(name) + (k - 0.5) * 0.3
                axes.plot([left, max(right, left + 0.2)], [height, height], color=COLOURS[direction], linewidth=3)
    for direction in rows:
        axes.plot([], [], color=COLOURS[direction], linewidth=3, label=direction)
    ends = {"largest": fmt.largest, "smallest normal": fmt.smallest_normal, "smallest": fmt.smallest_subnormal}
    for limit, value in ends.items():
        axes.axvline(math.log2(value), color=BAD if limit != "smallest normal" else FAINT, linewidth=1, linestyle="--")
        side: Literal["left", "right"] = "left" if limit == "smallest normal" else "right"
        axes.text(math.log2(value), -1.3, f" {fmt.name} {limit} ", color=FAINT, fontsize=7, ha=side, va="bottom")
    axes.set_yticks(range(len(names)), names, fontsize=7, color=INK)
    for label in axes.get_yticklabels():
        if label.get_text() == at:
            label.set(color=BAD, fontweight="bold")
    axes.set_ylim(len(names), -1.2)
    axes.set_xlabel("magnitude, power of two", color=INK)
    axes.grid(axis="x", color=GRID)
    axes.legend(loc="lower right", fontsize=8, framealpha=0.9, edgecolor="none")
    save_figure(figure, path)


def choose_modules(rows: Rows, at: str) -> list[str]:
    """Return as many modules as fit a page, in execution order."""
    largest: dict[str, float] = {}
    for name, _, high in (row for own in rows.values() for row in own):
        largest[name] = max(high, largest.get(name, 0.0))
    # False sorts first: the module at fault is always drawn.
    kept = sorted(largest, key=lambda name: (name != at, -largest[name]))[:MOST]
    return [name for name in largest if name in kept]


def draw_heat_map(cells: Sequence[tuple[str, str, float]], title: str, path: Path) -> None:
    """Draw cells of module, kind and a number from 0 (fits) to 1 (does not fit)."""
    import numpy as np

    modules = list(dict.fromkeys(module for module, *_ in cells))
    kinds = list(dict.fromkeys(kind for _, kind, _ in cells))
    grid = np.full((max(len(modules), 1), max(len(kinds), 1)), np.nan)
    for module, kind, value in cells:
        place = modules.index(module), kinds.index(kind)
        # Several tensors may share a cell: show the worst.
        grid[place] = value if np.isnan(grid[place]) else max(grid[place], value)
    figure = make_figure((2.5 + 1.2 * len(kinds), 1.2 + 0.18 * len(modules)))
    axes = figure.subplots()
    shown = axes.imshow(grid, aspect="auto", cmap="Reds", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(len(kinds)), kinds, color=INK)
    axes.set_yticks(range(len(modules)), modules, fontsize=7, color=INK)
    axes.set_title(title, color=INK)
    figure.colorbar(shown, ax=axes, ticks=[0, 0.5, 1]).ax.set_yticklabels(["fits", "near the end", "does not fit"])
    save_figure(figure, path)
