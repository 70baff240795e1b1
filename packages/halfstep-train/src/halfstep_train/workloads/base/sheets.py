"""Draw sheets of images: a grid, or a table with headings and row names; choose which samples to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Array = np.ndarray[Any, Any]
CELL, GAP, BAND = 256, 6, 22
"""In pixels: side of a cell, space between two cells, height of a line of text."""


def arrange_grid(images: Array, columns: int = 0, *, gap: int = 2) -> Array:
    """Arrange images (N, h, w, 3) in one image (H, W, 3) with `columns` per row; 0: as square as possible."""
    num, height, width = images.shape[:3]
    columns = columns or int(np.ceil(np.sqrt(num)))
    rows = -(-num // columns)
    sheet = np.full((rows * (height + gap) + gap, columns * (width + gap) + gap, 3), 255, dtype=np.uint8)
    for k, image in enumerate(images):
        top, left = (gap + cell * (side + gap) for cell, side in zip(divmod(k, columns), (height, width), strict=True))
        sheet[top : top + height, left : left + width] = image
    return sheet


def draw_table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[Array]]], *, bands: int = 0) -> Image.Image:
    """Draw images (H, W, 3) in columns with headings, each row with its name below it.

    Leave room at the bottom for `bands` lines of text.
    """
    # The name is below the first image of a row.
    pictures = [
        (cell, [] if number else [(name, "black")]) for name, cells in rows for number, cell in enumerate(cells)
    ]
    return draw_captioned(columns, pictures, columns=len(columns), bands=bands)


def draw_captioned(
    headings: Sequence[str],
    pictures: Sequence[tuple[Array, Sequence[tuple[str, str]]]],
    *,
    columns: int,
    bands: int = 0,
) -> Image.Image:
    """Draw images (H, W, 3) in columns below headings, each with lines of text in their colours below it."""
    height = CELL + GAP + BAND * max((len(lines) for _, lines in pictures), default=0)
    size = (GAP + columns * (CELL + GAP), (1 + bands) * BAND + -(-len(pictures) // columns) * height)
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for column, heading in enumerate(headings):
        draw.text((GAP + column * (CELL + GAP), 3), heading, fill="black", font=font)
    for number, (pixels, lines) in enumerate(pictures):
        row, column = divmod(number, columns)
        left, top = GAP + column * (CELL + GAP), BAND + row * height
        sheet.paste(_fit_cell(pixels), (left, top))
        for line, (text, colour) in enumerate(lines):
            draw.text((left, top + CELL + 2 + line * BAND), text, fill=colour, font=font)
    return sheet


def _fit_cell(pixels: Array) -> Image.Image:
    picture = Image.fromarray(pixels)
    scale = CELL / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)


def pick_worst_to_best(ranked: Sequence[tuple[int, float]], each: int) -> list[tuple[str, int, float]]:
    """Return `each` of the worst, median and best samples as (kind, index, score); all if there are few.

    `ranked` holds (index, score), worst first.
    """
    # If there are few samples, the first half is called worst and the rest best.
    count, half = len(ranked), -(-len(ranked) // 2)
    kinds = {"worst": range(half), "best": range(half, count)}
    if count > 3 * each:
        start = (count - each) // 2
        kinds = {"worst": range(each), "median": range(start, start + each), "best": range(count - each, count)}
    return [(kind, *ranked[position]) for kind, positions in kinds.items() for position in positions]
