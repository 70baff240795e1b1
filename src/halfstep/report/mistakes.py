"""The most confident mistakes of a classifier, as a page of pictures: mostly wrong labels, or what it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfstep.report.picture_file import BAD, FAINT, GOOD, INK, new_figure, save_figure, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 6
PICTURE, INCHES_WIDE, INCHES_HIGH = 1.8, 2.0, 2.45
"""A picture's side, and what it takes with its lines of text and the space around."""
TITLE_WIDE, TITLE_HIGH = 4.0, 0.32
LINE_LENGTH = 26


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownMistake:
    """One wrong answer, ready to be drawn."""

    image: np.ndarray[Any, Any]
    """(H, W, 3) bytes, as the model saw it."""
    truth: str
    answer: str
    confidence: float
    file: str


def draw_mistakes(mistakes: Sequence[ShownMistake], path: Path, *, total: int) -> None:
    """Write the page, at least one picture, in the order given; `total` mistakes were made in all."""
    across = min(ACROSS, len(mistakes))
    down = -(-len(mistakes) // across)
    wide, high = max(across * INCHES_WIDE, TITLE_WIDE), down * INCHES_HIGH + TITLE_HIGH
    figure = new_figure((wide, high), makes_room=False)
    for place, mistake in enumerate(mistakes):
        row, column = divmod(place, across)
        top = high - TITLE_HIGH - row * INCHES_HIGH
        corner = column * INCHES_WIDE / wide, (top - PICTURE) / high
        _draw(figure.add_axes((*corner, PICTURE / wide, PICTURE / high)), mistake)
    title = f"The most confident mistakes, {len(mistakes):,} of {total:,}"
    figure.text(0, 1, title, va="top", fontsize=11, fontweight="bold", color=INK)
    save_figure(figure, path)


def _draw(axes: Axes, mistake: ShownMistake) -> None:
    axes.imshow(mistake.image, interpolation="nearest", aspect="auto")
    axes.axis("off")
    lines = (
        (f"{shortened(mistake.answer, LINE_LENGTH - 6)}  {mistake.confidence:.0%}", 8.5, BAD, "bold"),
        (f"is {shortened(mistake.truth, LINE_LENGTH - 3)}", 8.5, GOOD, "normal"),
        (shortened(mistake.file, LINE_LENGTH + 4), 7, FAINT, "normal"),
    )
    for place, (text, size, colour, weight) in enumerate(lines):
        style: dict[str, Any] = {"fontsize": size, "color": colour, "fontweight": weight}
        axes.annotate(
            text, (0, 0), (0, -3 - 11 * place), xycoords="axes fraction", textcoords="offset points", va="top", **style
        )
