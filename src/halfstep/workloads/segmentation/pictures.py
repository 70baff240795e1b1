"""Pictures of segmentation results: overlays, and a contact sheet of image, truth, prediction and error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from halfstep.data.masks import IGNORED

Array = np.ndarray[Any, Any]

# Okabe and Ito's colours, which colour-blind readers can tell apart; the background stays black.
CLASS_COLOURS = np.array(
    [
        (0, 0, 0),
        (86, 180, 233),
        (230, 159, 0),
        (0, 158, 115),
        (240, 228, 66),
        (204, 121, 167),
        (213, 94, 0),
        (0, 114, 178),
    ],
    dtype=np.uint8,
)
MISSED, FALSE_ALARM, CONFUSED, NO_CLASS = (0, 114, 178), (230, 159, 0), (204, 121, 167), (96, 96, 96)
COLUMNS = ("image", "truth", "prediction", "error")
LEGEND = (("missed", MISSED), ("false alarm", FALSE_ALARM), ("wrong class", CONFUSED), ("ignored", NO_CLASS))
CELL, GAP, BAND = 256, 6, 22
"""Sides in pixels: a picture, the space between two, a line of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetRow:
    """One line of the contact sheet; pictures of one size."""

    name: str
    image: Array
    """(H, W, 1 or 3), uint8, or floats in 0..1."""
    truth: Array
    prediction: Array
    """Class maps (H, W)."""


def overlay(image: Array, classes: Array, *, strength: float = 0.5) -> Image.Image:
    """The image with every class but the background tinted."""
    picture = _rgb(image).astype(np.float32)
    tinted = picture * (1 - strength) + class_colours(classes) * np.float32(strength)
    return Image.fromarray(np.where((classes > 0)[..., None], tinted, picture).round().astype(np.uint8))


def contact_sheet(rows: Sequence[SheetRow]) -> Image.Image:
    """One row a sample, with a heading and a legend."""
    width = len(COLUMNS) * (CELL + GAP) + GAP
    sheet = Image.new("RGB", (width, 2 * BAND + len(rows) * (CELL + BAND + GAP)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    lefts = [GAP + column * (CELL + GAP) for column in range(len(COLUMNS))]
    for left, heading in zip(lefts, COLUMNS, strict=True):
        draw.text((left, 3), heading, fill="black", font=font)
    for number, row in enumerate(rows):
        top = BAND + number * (CELL + BAND + GAP)
        for left, cell in zip(lefts, _cells(row), strict=True):
            sheet.paste(_fitted(cell), (left, top))
        draw.text((GAP, top + CELL + 2), row.name, fill="black", font=font)
    _write_legend(draw, font, sheet.height - BAND)
    return sheet


def class_colours(classes: Array) -> Array:
    """(H, W, 3) colours of a class map; past the last colour they start again, background aside."""
    wrapped = np.where(classes == 0, 0, (classes.astype(np.int64) - 1) % (len(CLASS_COLOURS) - 1) + 1)
    return np.where((classes == IGNORED)[..., None], np.array(NO_CLASS, dtype=np.uint8), CLASS_COLOURS[wrapped])


def error_picture(image: Array, truth: Array, prediction: Array) -> Array:
    """The image in pale gray with every wrong pixel in the colour of its kind of error."""
    gray = _rgb(image).mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    picture: Array = (255 - (255 - gray) * 0.5).astype(np.uint8)
    wrong = (truth != prediction) & (truth != IGNORED)
    picture[wrong] = CONFUSED
    picture[wrong & (prediction == 0)] = MISSED
    picture[wrong & (truth == 0)] = FALSE_ALARM
    picture[truth == IGNORED] = NO_CLASS
    return picture


def _cells(row: SheetRow) -> tuple[Array, ...]:
    errors = error_picture(row.image, row.truth, row.prediction)
    return _rgb(row.image), class_colours(row.truth), class_colours(row.prediction), errors


def _rgb(image: Array) -> Array:
    pixels: Array = image if image.dtype == np.uint8 else (image.clip(0, 1) * 255).round().astype(np.uint8)
    return pixels.repeat(3, axis=-1) if pixels.shape[-1] == 1 else pixels[..., :3]


def _fitted(pixels: Array) -> Image.Image:
    picture = Image.fromarray(pixels)
    scale = CELL / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)


def _write_legend(draw: ImageDraw.ImageDraw, font: Any, top: int) -> None:
    left = GAP
    for text, colour in LEGEND:
        draw.rectangle((left, top + 4, left + 12, top + 16), fill=colour)
        draw.text((left + 18, top + 2), text, fill="black", font=font)
        left += 130
