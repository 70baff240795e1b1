"""Draw segmentation results: overlays, and a contact sheet of image, truth, prediction and error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from halfstep_train.workloads.base.sheets import BAND, GAP, Array, draw_table
from halfstep_train.workloads.segmentation.data import IGNORED

# The seven colours of Okabe and Ito are distinguishable for colour-blind readers: three mark errors, four are the first
# classes. Each further colour is the farthest (in CIELAB) from those before it, from black and from NO_CLASS; no two
# are closer than 26.
CLASS_COLOURS = np.frombuffer(
    bytes.fromhex(
        "56b4e9 009e73 f0e442 d55e00 0000ff 00ff00 ff00dd ffffdd ff0066 0066ff 667700 99ff88 771188 882222 00ffff "
        "dd9977 cc88ff 009900 bbff00 aa44ff ff0022 ffddff cc1188 664400 99aa77 225522 663366 00ffbb ffdd88 ee6666 "
        "99cccc 7799ff 3344aa aaffcc 0022cc 88bb00 007777 aa0000 992255 00dd44 aacc66 ff77dd aa99aa aa8833 885544"
    ),
    dtype=np.uint8,
).reshape(-1, 3)
"""Colours of class 1, 2, …; class 0 comes last, as it is nearly always the background, which is black."""
BACKGROUND = (0, 0, 0)
MISSED, FALSE_ALARM, CONFUSED, NO_CLASS = (0, 114, 178), (230, 159, 0), (204, 121, 167), (96, 96, 96)
COLUMNS = ("image", "truth", "prediction", "error")
Legend = tuple[tuple[str, tuple[int, ...]], ...]
LEGEND: Legend = (("missed", MISSED), ("false alarm", FALSE_ALARM), ("wrong class", CONFUSED), ("ignored", NO_CLASS))
LEGEND_COLUMNS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SheetRow:
    """One row of a contact sheet; truth and prediction are class maps (H, W)."""

    name: str
    image: Array
    """(H, W, 1 or 3), uint8 or floats in 0..1."""
    truth: Array
    prediction: Array


def draw_overlay(image: Array, classes: Array, *, background: int | None = 0) -> Image.Image:
    """Blend the image with the colours of all classes but the background."""
    picture = _to_rgb(image).astype(np.float32)
    tinted = (picture + colour_classes(classes, background)) * np.float32(0.5)
    is_plain = _is_background(classes, background)[..., None]
    return Image.fromarray(np.where(is_plain, picture, tinted).round().astype(np.uint8))


def draw_contact_sheet(
    rows: Sequence[SheetRow], *, background: int | None = 0, names: Sequence[str] = ()
) -> Image.Image:
    """Draw one row per sample, with a heading and a legend of errors and named classes."""
    legends = [LEGEND if background is not None else LEGEND[2:], *_make_class_legends(rows, names, background)]
    sheet = draw_table(COLUMNS, [(row.name, _draw_cells(row, background)) for row in rows], bands=len(legends))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(14)
    for number, legend in enumerate(legends):
        _write_legend(draw, font, sheet.height - (len(legends) - number) * BAND, legend)
    return sheet


def colour_classes(classes: Array, background: int | None = 0) -> Array:
    """Return the colours (H, W, 3) of a class map. Colours repeat after the last one, but never that of the
    background."""
    colours = CLASS_COLOURS[(classes.astype(np.int64) - 1) % len(CLASS_COLOURS)]
    colours[_is_background(classes, background)] = BACKGROUND
    colours[classes == IGNORED] = NO_CLASS
    return colours


def draw_errors(image: Array, truth: Array, prediction: Array, background: int | None = 0) -> Array:
    """Return the image in pale gray, with wrong pixels coloured by the kind of error."""
    gray = _to_rgb(image).mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    picture: Array = (255 - (255 - gray) * 0.5).astype(np.uint8)
    wrong = (truth != prediction) & (truth != IGNORED)
    picture[wrong] = CONFUSED
    picture[wrong & _is_background(prediction, background)] = MISSED
    picture[wrong & _is_background(truth, background)] = FALSE_ALARM
    picture[truth == IGNORED] = NO_CLASS
    return picture


def _is_background(classes: Array, background: int | None) -> Array:
    """Return booleans (H, W): true where the class is the background; all false if there is none."""
    return np.zeros(classes.shape, dtype=bool) if background is None else classes == background


def _draw_cells(row: SheetRow, background: int | None) -> tuple[Array, ...]:
    errors = draw_errors(row.image, row.truth, row.prediction, background)
    maps = (colour_classes(classes, background) for classes in (row.truth, row.prediction))
    return _to_rgb(row.image), *maps, errors


def _make_class_legends(rows: Sequence[SheetRow], names: Sequence[str], background: int | None) -> list[Legend]:
    """Return the lines of the legend for the classes that occur on the sheet."""
    shown = {int(k) for row in rows for classes in (row.truth, row.prediction) for k in np.unique(classes)}
    entries = [
        (names[k], tuple(int(part) for part in colour_classes(np.array([[k]]), background)[0, 0]))
        for k in sorted(shown)
        if k < len(names)
    ]
    return [tuple(entries[start : start + LEGEND_COLUMNS]) for start in range(0, len(entries), LEGEND_COLUMNS)]


def _to_rgb(image: Array) -> Array:
    pixels: Array = image if image.dtype == np.uint8 else (image.clip(0, 1) * 255).round().astype(np.uint8)
    return pixels[..., :3] if pixels.shape[-1] >= 3 else pixels[..., :1].repeat(3, axis=-1)


def _write_legend(draw: ImageDraw.ImageDraw, font: Any, top: int, legend: Legend) -> None:
    left = GAP
    for text, colour in legend:
        draw.rectangle((left, top + 4, left + 12, top + 16), fill=colour)
        draw.text((left + 18, top + 2), text, fill="black", font=font)
        left += 130
