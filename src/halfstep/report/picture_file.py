"""Pictures on a `Figure` of their own, since pyplot keeps state and asks for a display; written or a clear error."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, BAD, GOOD, GRID = "#1f2933", "#616e7c", "#d62f3a", "#2f6fde", "#e4e7eb"
"""Red and blue: what is good and bad is told apart by colour-blind readers, too."""
DPI, MARGIN_INCHES = 150, 0.15


def new_figure(inches: tuple[float, float], *, makes_room: bool = True) -> Figure:
    """A white page; one that makes room for its labels, or one whose every place is given."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1) if makes_room else None
    figure = Figure(figsize=inches, dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def refuse_unknown_format(path: Path) -> None:
    """Before minutes of work: a name whose ending is not a picture's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise ConfigError(f"{path} has no ending of a picture", fix=f"{path.stem}.png; known are {', '.join(known)}")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture."""
    try:
        with warnings.catch_warnings():
            # Names in scripts that the font lacks are drawn as boxes; the numbers beside them are still right.
            warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
            figure.savefig(path, bbox_inches="tight", pad_inches=MARGIN_INCHES)
    except (OSError, ValueError) as error:  # no room or no folder, or not a picture's ending
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {path}: {why}", fix="make room, or name a .png elsewhere") from error


def shorten_name(name: str, length: int) -> str:
    """The name, or its two ends."""
    half = (length - 1) // 2
    text = name if len(name) <= length else f"{name[: length - 1 - half]}…{name[-half:]}"
    return text.replace("$", r"\$")  # matplotlib reads $…$ as a formula
