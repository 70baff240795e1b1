"""Matplotlib figures without pyplot, which keeps global state and needs a display."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import CheckpointError

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
