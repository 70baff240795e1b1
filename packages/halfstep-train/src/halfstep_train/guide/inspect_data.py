"""Inspect a data folder: classes, counts, a few samples, and how fast they decode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image, ImageDraw, ImageFont

from halfstep.errors import DataError
from halfstep_train.data.files import OnBadFile, list_some
from halfstep_train.data.loader import Samples
from halfstep_train.workloads import KINDS, from_dict
from halfstep_train.workloads.base.guiding import Guiding, OpenedData, spread_indices
from halfstep_train.workloads.base.other_data import use_folder

DataOrigin = Literal["folder", "demo"]
DECODE_FILES, DECODE_S = 32, 1.0
"""Most files and seconds spent on measuring the decoding speed."""
GRID_SAMPLES, GRID_COLUMNS = 12, 4
CELL, GAP, BAND = 160, 6, 20
"""Pixels: side of an image, gap between images, height of a caption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What a data folder holds."""

    source: DataOrigin
    folder: Path
    num_train: int
    num_val: int
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    """Training samples per class; empty for masks, where one image has many classes."""
    store: Mapping[str, Any]
    """Facts about the data that a model needs, as a run stores them."""
    decoded_per_s: float
    """Samples per second that one process reads, measured."""
    on_bad_file: OnBadFile
    notes: tuple[str, ...]
    pictures: tuple[tuple[str, Image.Image], ...]
    sides: tuple[int, int] | None = None
    """Width and height of the median image; None if not determined."""
    about: tuple[tuple[str, str], ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    """Both as in OpenedData."""


def inspect_data(workload: str, folder: Path) -> DataSummary:
    """Read a folder as training would; if only single files are bad, skip them and note it."""
    try:
        return _inspect(workload, folder, "folder", "error")
    # Try again without the bad files; if that fails too, the first error is the better explanation.
    except DataError as first:
        try:
            return _inspect(workload, folder, "folder", "skip")
        except DataError:
            raise first from None
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}", fix="check its name and permissions") from error


def inspect_demo(workload: str, folder: Path) -> DataSummary:
    """Write the demo data of a workload to `folder` and inspect them."""
    if not folder.exists():
        KINDS.of(workload).write_demo(workload, folder, seed=0)
    return _inspect(workload, folder, "demo", "error")


def describe_data(data: DataSummary) -> list[tuple[str, str]]:
    """Return what was found, as names and values."""
    sizes = [f"{name} ({count})" for name, count in zip(data.classes, data.counts, strict=False)] or data.classes
    rows = [
        ("folder", "demo data, generated" if data.source == "demo" else str(data.folder)),
        ("samples", f"{data.num_train:,} for training, {data.num_val:,} for validation"),
        *([("images", f"{data.sides[0]}×{data.sides[1]} pixels (median)")] if data.sides else []),
        *(data.about or [("classes", f"{len(data.classes)}: {list_some(sizes, 12)}")]),
        ("reading", f"{data.decoded_per_s:,.0f} samples/s in one process (measured)"),
    ]
    if data.counts and max(data.counts) > 10 * min(data.counts):
        ratio = max(data.counts) / min(data.counts)
        rows.append(("balance", f"the largest class has {ratio:.0f} times as many samples as the smallest"))
    if data.on_bad_file == "skip":
        rows.append(("bad files", f"{len(data.notes)} left out (data.on_bad_file: skip): {list_some(data.notes, 3)}"))
    return rows


def save_grid(data: DataSummary, path: Path) -> None:
    """Save a picture with a few samples and their classes."""
    num_rows = -(-len(data.pictures) // GRID_COLUMNS)
    sheet = Image.new("RGB", (GRID_COLUMNS * (CELL + GAP) + GAP, num_rows * (CELL + BAND + GAP) + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (caption, picture) in enumerate(data.pictures):
        row, column = divmod(number, GRID_COLUMNS)
        left, top = GAP + column * (CELL + GAP), GAP + row * (CELL + BAND + GAP)
        sheet.paste(picture.resize((CELL, CELL), Image.Resampling.BILINEAR), (left, top))
        draw.text((left, top + CELL + 2), caption[:22], fill="black", font=font)
    sheet.save(path, format="PNG")


def _inspect(workload: str, folder: Path, source: DataOrigin, on_bad_file: OnBadFile) -> DataSummary:
    """Open a folder with the workload's reader and collect what it holds."""
    # Without a folder the config uses the demo's image size.
    config = from_dict(workload, {"data": {"dir": str(folder)}} if source == "folder" else {}).config
    config = use_folder(config, folder, on_bad_file=on_bad_file)
    family: Guiding = KINDS.of(workload).make_guide()
    opened = family.open(config)
    return DataSummary(
        source=source,
        folder=folder,
        num_train=len(opened.train),
        num_val=len(opened.val),
        classes=opened.classes,
        counts=opened.counts,
        store=opened.store,
        decoded_per_s=_measure_decoding(opened.train),
        on_bad_file=on_bad_file,
        notes=opened.notes,
        pictures=tuple(_draw_pictures(family, opened)),
        sides=opened.sides,
        about=opened.about,
        remarks=opened.remarks,
    )


def _measure_decoding(samples: Samples) -> float:
    began = time.perf_counter()
    num_read = 0
    for index in spread_indices(len(samples), DECODE_FILES):
        samples.sample(index, key=(0, 0, index))
        num_read += 1
        if time.perf_counter() - began > DECODE_S:
            break
    return num_read / max(time.perf_counter() - began, 1e-9)


def _draw_pictures(family: Guiding, opened: OpenedData) -> Iterator[tuple[str, Image.Image]]:
    samples = opened.val if len(opened.val) else opened.train
    for index in spread_indices(len(samples), GRID_SAMPLES):
        yield family.draw_sample(samples.sample(index, key=(0, 0, index)), index, opened.classes)
