"""Inspect a data folder: classes, counts and a few samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.files import OnBadFile, list_some
from halfstep_train.workloads import KINDS, from_dict
from halfstep_train.workloads.base.sheets import draw_captioned
from halfstep_train.workloads.base.using import Guiding, spread_indices, use_folder
from halfstep_train.workloads.base.workload import OpenedData

GRID_SAMPLES, GRID_COLUMNS = 12, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """What a data folder holds."""

    folder: Path
    opened: OpenedData
    is_demo: bool = False
    on_bad_file: OnBadFile = "error"
    pictures: tuple[tuple[str, Image.Image], ...] = ()

    @property
    def num_train(self) -> int:
        return len(self.opened.train)

    @property
    def num_val(self) -> int:
        return len(self.opened.val)


def inspect_data(workload: str, folder: Path) -> DataSummary:
    """Read a folder as training would; if only single files are bad, skip them and note it."""
    try:
        return _inspect(workload, folder)
    # Try again without the bad files; if that fails too, the first error is the better explanation.
    except DataError as first:
        try:
            return _inspect(workload, folder, on_bad_file="skip")
        except DataError:
            raise first from None
    except OSError as error:
        raise DataError(f"cannot read {folder}: {error.strerror}", fix="check its name and permissions") from error


def inspect_demo(workload: str, folder: Path) -> DataSummary:
    """Write the demo data of a workload to `folder` and inspect them."""
    if not folder.exists():
        KINDS.of(workload).write_demo(workload, folder, seed=0)
    return _inspect(workload, folder, is_demo=True)


def describe_data(data: DataSummary) -> list[tuple[str, str]]:
    """Return what was found, as names and values."""
    opened = data.opened
    sizes = [f"{name} ({count})" for name, count in zip(opened.classes, opened.counts, strict=False)] or opened.classes
    rows = [
        ("folder", "demo data, generated" if data.is_demo else str(data.folder)),
        ("samples", f"{data.num_train:,} for training, {data.num_val:,} for validation"),
        *([("images", f"{opened.sides[0]}×{opened.sides[1]} pixels (median)")] if opened.sides else []),
        *(opened.about or [("classes", f"{len(opened.classes)}: {list_some(sizes, 12)}")]),
    ]
    if opened.counts and max(opened.counts) > 10 * min(opened.counts):
        ratio = max(opened.counts) / min(opened.counts)
        rows.append(("balance", f"the largest class has {ratio:.0f} times as many samples as the smallest"))
    if data.on_bad_file == "skip":
        rows.append(
            ("bad files", f"{len(opened.notes)} left out (data.on_bad_file: skip): {list_some(opened.notes, 3)}")
        )
    return rows


def save_grid(data: DataSummary, path: Path) -> None:
    """Save a picture with a few samples and their classes."""
    pictures = [(np.asarray(picture), [(caption[:36], "black")]) for caption, picture in data.pictures]
    draw_captioned("", pictures, columns=GRID_COLUMNS).save(path, format="PNG")


def _inspect(workload: str, folder: Path, *, is_demo: bool = False, on_bad_file: OnBadFile = "error") -> DataSummary:
    """Open a folder with the workload's reader and collect what it holds."""
    # Without a folder the config uses the demo's image size.
    config = from_dict(workload, {} if is_demo else {"data": {"dir": str(folder)}}).config
    family: Guiding = KINDS.of(workload).make_guide()
    opened = family.open(use_folder(config, folder, on_bad_file=on_bad_file))
    samples = opened.val if len(opened.val) else opened.train
    pictures = tuple(
        family.draw_sample(samples.sample(index, key=(0, 0, index)), index, opened.classes)
        for index in spread_indices(len(samples), GRID_SAMPLES)
    )
    return DataSummary(folder=folder, opened=opened, is_demo=is_demo, on_bad_file=on_bad_file, pictures=pictures)
