"""RadioMapSeer for both stages: the path gain of each transmitter in a city map, with buildings, antenna and cars.

    png/buildings_complete/<map>.png            png/buildings_missing<1..4>/<1..6>/<map>.png
    png/antennas/<map>_<transmitter>.png        one bright pixel
    png/cars/<map>.png
    gain/DPM/<map>_<transmitter>.png            also IRT2 and IRT4, and carsDPM, carsIRT2, carsIRT4

All are grey images of one size, 256×256 in the original.

The split goes by map number, so a subset of the data keeps the same split. RadioDiff's public split is not used: one
map is in all three of its parts, and its IRT4 validation maps are all training maps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from halfstep.errors import DataError, format_count, make_printable
from halfstep.islands import fp32_island
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import Array, BadFiles, list_folders, list_some, require_folder
from halfstep_train.data.images import read_image, read_image_facts, to_bytes
from halfstep_train.data.loader import Samples, make_generator, name_sample
from halfstep_train.data.sample_cache import CACHE_BYTES, SampleCache
from halfstep_train.workloads.base.sheets import draw_table
from halfstep_train.workloads.base.workload import Forward, OpenedData, Prepare, Sample
from halfstep_train.workloads.radio.config import RadioDataConfig

Role = Literal["train", "val", "test"]
Split = Mapping[Role, tuple[int, ...]]
"""Map numbers by role."""

NUM_MAPS, NUM_TRAIN, NUM_VAL = 700, 501, 100


def get_public_split() -> dict[Role, tuple[int, ...]]:
    """Return RadioUNet's split of the maps 1..700, shuffled by numpy's legacy generator with seed 42."""
    order = np.arange(NUM_MAPS)
    np.random.RandomState(42).shuffle(order)
    maps, end = tuple(int(index) + 1 for index in order), NUM_TRAIN + NUM_VAL
    return {"train": maps[:NUM_TRAIN], "val": maps[NUM_TRAIN:end], "test": maps[end:]}


GAIN_NAME = re.compile(r"(\d+)_(\d+)\.png$")
NUM_VERSIONS = 6
"""Versions of each map with missing buildings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RadioFiles:
    """The files of one transmitter in one map."""

    number: int
    transmitter: int
    buildings: tuple[Path, ...]
    """One file, or the versions of a map with missing buildings."""
    antenna: Path
    gain: Path | None
    """The true gain; None if it is unknown, as in prediction."""
    cars: Path | None = None

    @property
    def name(self) -> str:
        return self.antenna.stem

    def list_paths(self) -> list[Path]:
        return [path for path in (*self.buildings, self.antenna, self.gain, self.cars) if path is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RadioTree:
    """A RadioMapSeer folder and the files that the settings choose from it."""

    root: Path
    settings: RadioDataConfig

    @classmethod
    def open(cls, settings: RadioDataConfig) -> RadioTree:
        """Open `data.dir`, or a RadioMapSeer folder inside it."""
        folder = require_folder(settings.dir)
        for root in (folder, folder / "RadioMapSeer"):
            if (root / "gain").is_dir() and (root / "png").is_dir():
                return cls(root=root, settings=settings)
        raise DataError(
            f"{folder} is not a RadioMapSeer folder",
            why="it needs the folders gain/ and png/ of the data set",
            fix="--data-dir RadioMapSeer; other maps: png/buildings_complete/<map>.png, "
            "png/antennas/<map>_<transmitter>.png and gain/DPM/<map>_<transmitter>.png",
        )

    @property
    def gain_dir(self) -> Path:
        return self.root / "gain" / f"{'cars' if self.settings.cars else ''}{self.settings.simulation}"

    @property
    def buildings_dir(self) -> Path:
        missing = self.settings.missing_buildings
        return self.root / "png" / (f"buildings_missing{missing}" if missing else "buildings_complete")

    def list_map_numbers(self) -> tuple[int, ...]:
        """Return the numbers of the maps that have gains."""
        return tuple(sorted({number for number, _ in self._list_gains()}))

    def list_samples(self, numbers: Sequence[int], *, bad_files: BadFiles) -> tuple[RadioFiles, ...]:
        """Return every transmitter of these maps. Those with missing files are reported and left out."""
        wanted = set(numbers)
        pairs = [(number, transmitter) for number, transmitter in self._list_gains() if number in wanted]
        exists: dict[Path, bool] = {}  # buildings are shared by all transmitters of a map
        complete: list[RadioFiles] = []
        missing: list[Path] = []
        for number, transmitter in pairs:
            found = self.get_sample(number, transmitter)
            lacking = [path for path in found.list_paths() if not exists.setdefault(path, path.is_file())]
            missing += lacking
            complete += [] if lacking else [found]
        if missing:  # one error for all: a folder that lacks one antenna often lacks thousands
            num = len(pairs) - len(complete)
            shown = list_some(path.relative_to(self.root) for path in dict.fromkeys(missing))
            bad_files.report(
                DataError(
                    f"{format_count(num, 'gain')} of {self.gain_dir} without an input: no {shown}",
                    why="the model needs buildings and the antenna" + (" and cars" if self.settings.cars else ""),
                    fix="unpack all of png/, or leave those out: data.on_bad_file=skip",
                )
            )
        return tuple(complete)

    def get_sample(self, number: int, transmitter: int) -> RadioFiles:
        """Return the paths of one sample; they need not exist."""
        versions = range(1, NUM_VERSIONS + 1) if self.settings.missing_buildings else ("",)
        return RadioFiles(
            number=number,
            transmitter=transmitter,
            buildings=tuple(self.buildings_dir / str(version) / f"{number}.png" for version in versions),
            antenna=self.root / "png" / "antennas" / f"{number}_{transmitter}.png",
            gain=self.gain_dir / f"{number}_{transmitter}.png",
            cars=self.root / "png" / "cars" / f"{number}.png" if self.settings.cars else None,
        )

    def _list_gains(self) -> list[tuple[int, int]]:
        """Return (map, transmitter) of every gain file, sorted."""
        names = sorted(path.name for path in self.gain_dir.iterdir()) if self.gain_dir.is_dir() else []
        found = [match for name in names if (match := GAIN_NAME.match(name))]
        if not found:
            gains = [path.name for path in list_folders(self.root / "gain")]
            raise DataError(
                f"no gain images in {self.gain_dir}",
                why=f"it contains {list_some(names) or 'nothing'}; data.simulation and data.cars choose the folder",
                fix=f"unpack <map>_<transmitter>.png, or choose among {', '.join(gains)}",
            )
        return sorted((int(match[1]), int(match[2])) for match in found)


class RadioMaps:
    """Samples as uint8: `gain` (1, H, W) and `condition` (3, H, W). The condition holds buildings, antenna and cars;
    without cars, the buildings twice."""

    def __init__(self, files: Sequence[RadioFiles], *, size: tuple[int, int]) -> None:
        self.items, self.size = tuple(files), size
        byte = np.dtype(np.uint8)
        # With missing buildings, each epoch draws a version at random, so there is nothing to cache.
        is_fixed = all(len(item.buildings) == 1 for item in self.items)
        self._cache = SampleCache(
            len(self.items),
            fields={"gain": ((1, *size), byte), "condition": ((3, *size), byte)},
            limit_bytes=CACHE_BYTES if is_fixed else 0,
        )

    def __len__(self) -> int:
        return len(self.items)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        def read() -> dict[str, Array]:
            item = self.items[index]
            assert item.gain is not None
            version = int(torch.randint(len(item.buildings), (), generator=make_generator(*key)))
            condition = read_condition(item, self.size, version=version)
            return {"gain": read_gray(item.gain, self.size)[None], "condition": condition}

        return self._cache.get_or_read(index, read)

    def name_of(self, index: int) -> str:
        return make_printable(f"{self.items[index].name}.png")

    def files(self) -> Iterator[Path]:
        return (path for item in self.items for path in item.list_paths())


def read_condition(item: RadioFiles, size: tuple[int, int], *, version: int = 0) -> Array:
    """Read buildings, antenna and cars (3, H, W); without cars the third channel repeats the buildings, as in
    RadioDiff."""
    buildings = read_gray(item.buildings[version], size)
    last = buildings if item.cars is None else read_gray(item.cars, size)
    return np.stack([buildings, read_antenna(item.antenna, size), last])


def read_gray(path: Path, size: tuple[int, int]) -> Array:
    """Read a grey image as uint8 (H, W); shrinking averages over areas."""
    pixels = _read_bytes(path)
    if pixels.shape == size:
        return pixels
    resized = Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BOX)
    return np.array(resized)


def read_antenna(path: Path, size: tuple[int, int]) -> Array:
    """Read an antenna image as uint8 (H, W). Its bright pixel is kept at any size: averaging would dilute it."""
    pixels = _read_bytes(path)
    rows, columns = np.nonzero(pixels)
    if not len(rows):
        raise DataError(
            f"{path} shows no antenna: all its pixels are 0",
            why="the bright pixel marks the position of the transmitter",
            fix="unpack the file again, or leave bad files out: data.on_bad_file=skip",
        )
    found = np.zeros(size, dtype=np.uint8)
    positions = rows * size[0] // pixels.shape[0], columns * size[1] // pixels.shape[1]
    np.maximum.at(found, positions, pixels[rows, columns])
    return found


def _read_bytes(path: Path) -> Array:
    return np.array(to_bytes(read_image(path, channels=1)[..., 0]))  # a copy: Pillow's array is read-only


def check_pictures(files: Sequence[RadioFiles], bad_files: BadFiles) -> tuple[RadioFiles, ...]:
    """Return the samples whose images can be read; report the others.

    Only headers are read, unless bad files are to be skipped: then every image is decoded.
    """
    paths = list(dict.fromkeys(path for item in files for path in item.list_paths()))

    def read_size(path: Path) -> tuple[int, int]:
        if bad_files.mode == "skip":
            read_antenna(path, (1, 1)) if path.parent.name == "antennas" else _read_bytes(path)
        return read_image_facts(path).size

    found = dict(bad_files.try_each(read_size, paths))
    usable = []
    for item in files:
        sizes = {path: found[path] for path in item.list_paths() if path in found}
        if len(set(sizes.values())) > 1:
            bad_files.report(
                DataError(
                    f"images of one map differ in size: {', '.join(f'{path} is {sizes[path]}' for path in sizes)}",
                    why="a pixel must be the same location in the inputs and the gains",
                    fix="unpack the files again, or leave bad files out: data.on_bad_file=skip",
                )
            )
        elif len(sizes) == len(item.list_paths()):
            usable.append(item)
    return tuple(usable)


# --- both splits, and bytes as floats ---


def find_data(config: RunConfig) -> OpenedData:
    """Open the training and validation maps; raise DataError if there are none of either."""
    settings = config.data
    assert isinstance(settings, RadioDataConfig)
    bad_files = BadFiles(settings.on_bad_file)
    tree = RadioTree.open(settings)
    split = choose_split(tree)
    train, val = (open_split(tree, split, role, bad_files) for role in ("train", "val"))
    sizes = ", ".join(
        f"{name} {format_count(len(part), 'sample')} of "
        f"{format_count(len({item.number for item in part.items}), 'map')}"
        for name, part in (("training", train), ("validation", val))
    )
    return OpenedData(
        train=train,
        val=val,
        about=(("layout", f"RadioMapSeer, {tree.gain_dir.name}"), ("split", f"{_name_split(settings)}: {sizes}")),
        notes=bad_files.notes,
    )


def _name_split(settings: RadioDataConfig) -> str:
    return "data.val_maps" if settings.val_maps else "RadioUNet's split"


def choose_split(tree: RadioTree) -> Split:
    """Return the split, restricted to the maps that exist."""
    settings, here = tree.settings, tree.list_map_numbers()
    if settings.val_maps:
        held_out = {*settings.val_maps, *settings.test_maps}
        if strange := sorted(held_out - set(here)):
            raise DataError(
                f"no map {list_some(strange)} in {tree.gain_dir}",
                why="data.val_maps or data.test_maps names it",
                fix=f"use existing maps: {list_some(here)}",
            )
        train = tuple(number for number in here if number not in held_out)
        return {"train": train, "val": settings.val_maps, "test": settings.test_maps}
    return {role: tuple(number for number in numbers if number in here) for role, numbers in get_public_split().items()}


def open_split(tree: RadioTree, split: Split, role: Role, bad_files: BadFiles) -> RadioMaps:
    """Open the maps of a role (training, validation or test); raise DataError if there are none."""
    settings, numbers = tree.settings, split[role]
    found = check_pictures(tree.list_samples(numbers, bad_files=bad_files), bad_files)
    if not found:
        here = tree.list_map_numbers()
        why = f"none of its {format_count(len(here), 'map')} ({list_some(here)}) is one of {_name_split(settings)}"
        if numbers:
            why = f"files were left out: {list_some(error.what for error in bad_files.skipped)}"
        fix = f"choose the maps when you train: data.{'test' if role == 'test' else 'val'}_maps=[...]"
        raise DataError(f"no {ROLE_NAMES[role]} map in {tree.gain_dir}", why=why, fix=fix)
    return RadioMaps(found, size=(settings.image_size, settings.image_size))


ROLE_NAMES: dict[Role, str] = {"train": "training", "val": "validation", "test": "test"}


def scale_gain(pixels: Tensor, threshold: float) -> Tensor:
    """Convert bytes to gains in 0..1; gains below the threshold become 0, and the rest is stretched to 0..1."""
    gain = pixels.float() / 255
    return ((gain - threshold) / (1 - threshold)).clamp(min=0) if threshold else gain


def to_signed(values: Tensor) -> Tensor:
    """Map 0..1 to -1..1, the range that both networks use."""
    return values * 2 - 1


def to_unsigned(values: Tensor) -> Tensor:
    """Map -1..1 to 0..1 and clip values outside that range."""
    return ((values.float() + 1) / 2).clamp(0, 1)


# --- pictures ---


BUILDING, STREET, ANTENNA, CAR = (40, 40, 40), (225, 225, 225), (213, 94, 0), (0, 114, 178)
TOO_HIGH, TOO_LOW = (213, 94, 0), (0, 114, 178)
LARGEST_ERROR = 0.25
"""Errors of this size and larger are drawn in full colour."""
SHOWN = 4
"""Validation maps in a sheet of samples."""


Row = tuple[str, dict[str, Array]]
"""Name and pictures of a sample, the pictures by their headings."""


def draw_map_sheet(rows: Sequence[Row]) -> Image.Image:
    """Draw one row per sample under headings; all rows have the same ones."""
    return draw_table(list(rows[0][1]), [(name, list(cells.values())) for name, cells in rows])


def draw_cells(predicted: Array, truth: Array | None, condition: Array | None) -> dict[str, Array]:
    """Draw what is known of a sample: maps (H, W) in 0..1, and the condition (3, H, W) as bytes."""
    cells = {} if condition is None else {"buildings, antenna": draw_condition(condition)}
    cells["map"] = draw_gain(predicted)
    return cells if truth is None else cells | {"truth": draw_gain(truth), "error": draw_error(predicted, truth)}


def draw_condition(condition: Array) -> Array:
    """Draw streets, buildings and cars, and the antenna as a cross: a single pixel would not be visible."""
    buildings, antenna, last = condition
    picture = np.empty((*buildings.shape, 3), dtype=np.uint8)
    picture[:] = STREET
    picture[buildings > 127] = BUILDING
    if not np.array_equal(last, buildings):
        picture[last > 127] = CAR
    reach = max(1, buildings.shape[0] // 32)
    for row, column in np.argwhere(antenna > 0):
        picture[max(0, row - reach) : row + reach + 1, column] = ANTENNA
        picture[row, max(0, column - reach) : column + reach + 1] = ANTENNA
    return picture


def draw_gain(gain: Array) -> Array:
    """Draw a gain in 0..1 from black over violet and orange to white, with brightness increasing monotonically."""
    from matplotlib import colormaps

    return np.asarray(colormaps["magma"](gain, bytes=True)[..., :3])


def draw_error(predicted: Array, truth: Array) -> Array:
    """Draw the error: white where both agree, orange where the map is too bright, blue where it is too dark."""
    error = np.clip((predicted - truth) / LARGEST_ERROR, -1, 1)[..., None]
    colour = np.where(error > 0, np.array(TOO_HIGH), np.array(TOO_LOW))
    return np.asarray((255 + (colour - 255) * np.abs(error)).round().astype(np.uint8))


def make_sampler(maps: Samples, prepare: Prepare, forward: Forward) -> Sample:
    """Return a function that runs the model on the first validation maps and draws them as a sheet."""

    def draw(model: nn.Module, key: tuple[int, ...]) -> dict[str, Array]:
        indices = range(min(SHOWN, len(maps)))
        batch = default_collate([maps.sample(index, key=(0, 0, index)) for index in indices])
        device = next(model.parameters()).device
        with torch.no_grad(), fp32_island():
            prepared = prepare({name: value.to(device) for name, value in batch.items()}, key=key, training=False)
        found = forward(model, prepared)["map"]
        rows = [
            (
                name_sample(maps, index),
                draw_cells(one[0].float().cpu().numpy(), gain[0].numpy() / 255, condition.numpy()),
            )
            for index, one, gain, condition in zip(indices, found, batch["gain"], batch["condition"], strict=True)
        ]
        return {"maps": np.asarray(draw_map_sheet(rows))}

    return draw
