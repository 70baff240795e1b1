"""A look at a data folder before anything is decided: classes, counts, a few samples, and how fast they decode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from halfstep.config.schema import RunConfig
from halfstep.data.decode import open_picture
from halfstep.data.files import OnBadFile, some_of
from halfstep.data.folder_samples import TrainingFiles
from halfstep.data.images import image_facts
from halfstep.data.loader import Samples
from halfstep.data.segmentation import SegmentationData
from halfstep.data.stored_images import TrainingImages
from halfstep.errors import DataError
from halfstep.workloads import KINDS, from_dict
from halfstep.workloads.classification.config import ClassifierConfig
from halfstep.workloads.classification.data import open_image_data
from halfstep.workloads.segmentation import build as unet
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.pictures import overlay

Source = Literal["folder", "demo"]
SIZED_FILES = 256
"""Pictures whose size is looked up, over the whole set."""
DECODE_FILES, DECODE_S = 32, 1.0
"""At most this many files and seconds to learn how fast pictures decode."""
GRID_SAMPLES, GRID_COLUMNS = 12, 4
CELL, GAP, BAND = 160, 6, 20
"""Sides in pixels: a picture, the space between two, a line of text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLook:
    """What a data folder holds."""

    source: Source
    folder: Path
    num_train: int
    num_val: int
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    """Training samples of each class; empty for masks, where one picture holds many classes."""
    store: Mapping[str, Any]
    """What a model must know of the data, as a run stores it."""
    decoded_per_s: float
    """Samples that one process reads a second, measured."""
    on_bad_file: OnBadFile
    notes: tuple[str, ...]
    pictures: tuple[tuple[str, Image.Image], ...]
    sides: tuple[int, int] | None = None
    """Width and height of the median picture; None where nobody looked."""


def look_at(workload: str, folder: Path) -> DataLook:
    """Read a folder as training would; where only single files are bad, without them, and the look says so."""
    try:
        return _look(workload, folder, "folder", "error")
    except DataError as first:
        try:
            return _look(workload, folder, "folder", "skip")
        except DataError:
            raise first from None
    except OSError as error:
        raise DataError(f"cannot look into {folder}: {error.strerror}", fix="check its name and permissions") from error


def look_at_demo(workload: str, folder: Path) -> DataLook:
    """The same for the demo data of a workload, which are written to `folder`."""
    if not folder.exists():
        KINDS.of(workload).write_demo(workload, folder, seed=0)
    return _look(workload, folder, "demo", "error")


def describe(look: DataLook) -> list[tuple[str, str]]:
    """What was found, as names and values."""
    sizes = [f"{name} ({count})" for name, count in zip(look.classes, look.counts, strict=False)] or look.classes
    rows = [
        ("folder", "demo data, generated" if look.source == "demo" else str(look.folder)),
        ("samples", f"{look.num_train:,} to train on, {look.num_val:,} to validate"),
        *([("pictures", f"{look.sides[0]}×{look.sides[1]} pixels (median)")] if look.sides else []),
        ("classes", f"{len(look.classes)}: {some_of(sizes, 12)}"),
        ("reading", f"{look.decoded_per_s:,.0f} samples/s in one process (measured)"),
    ]
    if look.counts and max(look.counts) > 10 * min(look.counts):
        rows.append(("balance", f"the largest class has {max(look.counts) / min(look.counts):.0f}x the smallest"))
    if look.on_bad_file == "skip":
        rows.append(("bad files", f"{len(look.notes)} left out (data.on_bad_file: skip): {some_of(look.notes, 3)}"))
    return rows


def save_grid(look: DataLook, path: Path) -> None:
    """A picture with a few samples and their classes."""
    num_rows = -(-len(look.pictures) // GRID_COLUMNS)
    sheet = Image.new("RGB", (GRID_COLUMNS * (CELL + GAP) + GAP, num_rows * (CELL + BAND + GAP) + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (caption, picture) in enumerate(look.pictures):
        row, column = divmod(number, GRID_COLUMNS)
        left, top = GAP + column * (CELL + GAP), GAP + row * (CELL + BAND + GAP)
        sheet.paste(picture.resize((CELL, CELL), Image.Resampling.BILINEAR), (left, top))
        draw.text((left, top + CELL + 2), caption[:22], fill="black", font=font)
    sheet.save(path, format="PNG")


def _look(workload: str, folder: Path, source: Source, on_bad_file: OnBadFile) -> DataLook:
    # Without a folder the config has the demo's image size.
    config = from_dict(workload, {"data": {"dir": str(folder)}} if source == "folder" else {}).config
    config = _changed(config, "data", dir=str(folder), on_bad_file=on_bad_file)
    found = _masks(config) if isinstance(config, UNetConfig) else _classes(config)
    train, val, store, classes, notes = found
    return DataLook(
        source=source,
        folder=folder,
        num_train=len(train),
        num_val=len(val),
        classes=classes,
        counts=_counts(train, len(classes)),
        store=store,
        decoded_per_s=_decoded_per_s(train),
        on_bad_file=on_bad_file,
        notes=notes,
        pictures=tuple(_pictures(val if len(val) else train, classes)),
        sides=_sides(train),
    )


Found = tuple[Samples, Samples, Mapping[str, Any], tuple[str, ...], tuple[str, ...]]


def _masks(config: UNetConfig) -> Found:
    # Only the data are looked at; a real U-Net would take a second to initialise.
    built = unet.build(_changed(config, "model", base_channels=1))
    classes = tuple(f"mask value {value}" for value in built.store["mask_values"])
    return built.train_samples, built.val_samples, built.store, classes, built.notes


def _classes(config: RunConfig) -> Found:
    assert isinstance(config, ClassifierConfig)
    data = open_image_data(config.data)
    names = tuple(data.titles.get(name, name) for name in data.classes)
    return data.train, data.val, {"classes": list(data.classes)}, names, data.notes


def _changed(config: Any, section: str, **values: object) -> Any:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def _counts(train: Samples, num_classes: int) -> tuple[int, ...]:
    if isinstance(train, TrainingFiles):
        labels: Sequence[int] = train.listing.labels
    elif isinstance(train, TrainingImages):
        labels = train.images.labels.tolist()
    else:
        return ()
    counted = Counter(labels)
    return tuple(counted[number] for number in range(num_classes))


def _sides(train: Samples) -> tuple[int, int] | None:
    """Of a few pictures, since a header is a file to open."""
    if isinstance(train, TrainingImages):
        sizes = train.images.sizes
    elif isinstance(train, TrainingFiles):
        sizes = np.array([_size_of(train.listing.paths[index]) for index in _spread(len(train), SIZED_FILES)])
    elif isinstance(train, SegmentationData):
        facts = [image_facts(train.pairs[index].image) for index in _spread(len(train), SIZED_FILES)]
        sizes = np.array([one.size[::-1] for one in facts])
    else:
        return None
    width, height = np.median(sizes, axis=0)
    return int(width), int(height)


def _size_of(path: Path) -> tuple[int, int]:
    with open_picture(path) as picture:
        return picture.size


def _decoded_per_s(samples: Samples) -> float:
    began = time.perf_counter()
    num_read = 0
    for index in _spread(len(samples), DECODE_FILES):
        samples.sample(index, key=(0, 0, index))
        num_read += 1
        if time.perf_counter() - began > DECODE_S:
            break
    return num_read / max(time.perf_counter() - began, 1e-9)


def _pictures(samples: Samples, classes: Sequence[str]) -> Iterator[tuple[str, Image.Image]]:
    for index in _spread(len(samples), GRID_SAMPLES):
        sample = {name: tensor.numpy() for name, tensor in samples.sample(index, key=(0, 0, index)).items()}
        if "mask" in sample:
            yield f"sample {index}", overlay(np.moveaxis(sample["image"], 0, -1), sample["mask"])
        else:
            yield classes[int(sample["label"])], Image.fromarray(sample["image"])


def _spread(total: int, wanted: int) -> list[int]:
    """Indices over the whole set: files are sorted by class, so the first ones alone would all be of one."""
    num = min(total, wanted)
    return [index * total // num for index in range(num)]
