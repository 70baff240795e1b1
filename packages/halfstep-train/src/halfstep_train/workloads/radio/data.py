"""RadioMapSeer for both stages: open the training and validation maps, and convert bytes to floats in -1..1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from halfstep.errors import DataError, format_count
from halfstep_train.config.schema import RunConfig
from halfstep_train.data.files import BadFiles, list_some
from halfstep_train.workloads.radio.config import RadioDataConfig
from halfstep_train.workloads.radio.maps import (
    RadioMaps,
    RadioTree,
    Role,
    Split,
    check_pictures,
    find_leaks,
    get_public_split,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RadioData:
    """Training and validation samples, with facts and notes for the user."""

    train: Any
    """RadioMaps, or samples derived from them."""
    val: RadioMaps
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def list_val_names(self) -> tuple[str, ...]:
        """Return the file names of validation maps; empty for random samples."""
        return tuple(map(self.val.name_of, range(len(self.val)))) if isinstance(self.val, RadioMaps) else ()


def find_data(config: RunConfig) -> RadioData:
    """Open the training and validation maps; raise DataError if there are none of either."""
    settings = config.data
    assert isinstance(settings, RadioDataConfig)
    bad_files = BadFiles(settings.on_bad_file)
    tree = RadioTree.open(settings)
    split = choose_split(settings, tree)
    train, val = (open_split(settings, tree, split, role, bad_files) for role in ("train", "val"))
    sizes = ", ".join(
        f"{name} {format_count(len(part), 'sample')} of "
        f"{format_count(len({item.number for item in part.items}), 'map')}"
        for name, part in (("training", train), ("validation", val))
    )
    name = "data.val_maps" if settings.val_maps else f"{SPLIT_NAMES[settings.split]}'s split"
    return RadioData(
        train=train,
        val=val,
        about=(("layout", f"RadioMapSeer, {tree.gain_dir.name}"), ("split", f"{name}: {sizes}")),
        notes=(*_describe_leaks(split), *bad_files.notes),
    )


SPLIT_NAMES = {"radiounet": "RadioUNet", "radiodiff": "RadioDiff"}


def choose_split(settings: RadioDataConfig, tree: RadioTree) -> Split:
    """Return the split, restricted to the maps that exist."""
    here = tree.list_map_numbers()
    if settings.val_maps:
        if strange := sorted({*settings.val_maps, *settings.test_maps} - set(here)):
            raise DataError(
                f"no map {list_some(strange)} in {tree.gain_dir}",
                why="data.val_maps or data.test_maps names it",
                fix=f"there are {list_some(here)}",
            )
        held_out = {*settings.val_maps, *settings.test_maps}
        return {
            "train": tuple(number for number in here if number not in held_out),
            "val": settings.val_maps,
            "test": settings.test_maps,
        }
    present = set(here)
    named = get_public_split(settings.split, settings.simulation)
    return {role: tuple(number for number in numbers if number in present) for role, numbers in named.items()}


def open_split(settings: RadioDataConfig, tree: RadioTree, split: Split, role: Role, bad_files: BadFiles) -> RadioMaps:
    """Open the maps of a role (training, validation or test); raise DataError if there are none."""
    numbers = split[role]
    found = check_pictures(tree.list_samples(numbers, bad_files=bad_files), bad_files)
    if not found:
        here = tree.list_map_numbers()
        whose = (
            "by data.val_maps and data.test_maps" if settings.val_maps else f"in {SPLIT_NAMES[settings.split]}'s split"
        )
        none = f"none of its {format_count(len(here), 'map')} ({list_some(here)}) is one {whose}"
        left_out = f"files were left out: {list_some(error.what for error in bad_files.skipped)}"
        raise DataError(
            f"no {ROLE_NAMES[role]} map in {tree.gain_dir}",
            why=left_out if numbers else none,
            fix="name them when training: data.test_maps=[...]"
            if role == "test"
            else "name maps yourself: data.val_maps=[...]",
        )
    return RadioMaps(found, size=(settings.image_size, settings.image_size))


ROLE_NAMES: dict[Role, str] = {"train": "training", "val": "validation", "test": "test"}


def _describe_leaks(split: Split) -> list[str]:
    """Return a note for each split that shares maps with training: its scores are too good."""
    return [
        f"{format_count(len(numbers), f'{ROLE_NAMES[role]} map')} of this split are training maps too: "
        f"{list_some(numbers)}; "
        f"their scores are too good (data.split=radiounet has no overlap)"
        for role, numbers in find_leaks(split).items()
    ]


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
