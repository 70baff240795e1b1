"""RadioMapSeer as both stages see it: the training and validation maps, converted from bytes to floats in -1..1."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.config.schema import RunConfig
from halfstep.data.files import BadFiles, list_some
from halfstep.errors import DataError, format_count
from halfstep.workloads.radio.config import RadioDataConfig
from halfstep.workloads.radio.maps import (
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
    """The samples of both splits, with facts and notes for the user."""

    train: Any
    """RadioMaps, or samples made of them."""
    val: RadioMaps
    about: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def val_names(self) -> tuple[str, ...]:
        """Return the names of validation maps; generated samples have none."""
        return tuple(map(self.val.name_of, range(len(self.val)))) if isinstance(self.val, RadioMaps) else ()


def get_data_config(config: RunConfig) -> RadioDataConfig:
    assert isinstance(config.data, RadioDataConfig)
    return config.data


def find_data(config: RunConfig) -> RadioData:
    """Return training and validation maps; raise if the folder lacks either."""
    wish = get_data_config(config)
    bad_files = BadFiles(wish.on_bad_file)
    tree = open_tree(wish)
    split = choose_split(wish, tree)
    train, val = (open_split(wish, tree, split, role, bad_files) for role in ("train", "val"))
    sizes = ", ".join(
        f"{name} {format_count(len(part), 'sample')} of "
        f"{format_count(len({item.number for item in part.items}), 'map')}"
        for name, part in (("training", train), ("validation", val))
    )
    name = "data.val_maps" if wish.val_maps else f"{SPLIT_NAMES[wish.split]}'s split"
    return RadioData(
        train=train,
        val=val,
        about=(("layout", f"RadioMapSeer, {tree.gain_dir.name}"), ("split", f"{name}: {sizes}")),
        notes=(*_describe_leaks(split), *bad_files.notes),
    )


SPLIT_NAMES = {"radiounet": "RadioUNet", "radiodiff": "RadioDiff"}


def open_tree(wish: RadioDataConfig) -> RadioTree:
    assert wish.dir is not None, "a run without data gets its demo before it is built"
    return RadioTree.at(
        Path(wish.dir),
        simulation=wish.simulation,
        with_cars=wish.cars,
        missing_buildings=wish.missing_buildings,
    )


def choose_split(wish: RadioDataConfig, tree: RadioTree) -> Split:
    """Return the split, restricted to the maps that exist."""
    here = tree.numbers()
    if wish.val_maps:
        if strange := sorted({*wish.val_maps, *wish.test_maps} - set(here)):
            raise DataError(
                f"no map {list_some(strange)} in {tree.gain_dir}",
                why="data.val_maps or data.test_maps names it",
                fix=f"there are {list_some(here)}",
            )
        held_out = {*wish.val_maps, *wish.test_maps}
        return {
            "train": tuple(number for number in here if number not in held_out),
            "val": wish.val_maps,
            "test": wish.test_maps,
        }
    present = set(here)
    named = get_public_split(wish.split, wish.simulation)
    return {role: tuple(number for number in numbers if number in present) for role, numbers in named.items()}


def open_split(wish: RadioDataConfig, tree: RadioTree, split: Split, role: Role, bad_files: BadFiles) -> RadioMaps:
    numbers = split[role]
    found = check_pictures(tree.samples(numbers, most=wish.max_transmitters, bad_files=bad_files), bad_files)
    if not found:
        here = tree.numbers()
        whose = "by data.val_maps and data.test_maps" if wish.val_maps else f"in {SPLIT_NAMES[wish.split]}'s split"
        none = f"of its {format_count(len(here), 'map')} ({list_some(here)}) none is one {whose}"
        left_out = f"files were left out: {list_some(error.what for error in bad_files.skipped)}"
        raise DataError(
            f"no {ROLE_NAMES[role]} map in {tree.gain_dir}",
            why=left_out if numbers else none,
            fix="name them when training: data.test_maps=[...]"
            if role == "test"
            else "name maps yourself: data.val_maps=[...]",
        )
    return RadioMaps(found, size=(wish.image_size, wish.image_size))


ROLE_NAMES: dict[Role, str] = {"train": "training", "val": "validation", "test": "test"}


def _describe_leaks(split: Split) -> list[str]:
    """Return a note for each split that contains training maps: scores there mean little."""
    return [
        f"{format_count(len(numbers), f'{ROLE_NAMES[role]} map')} of this split trained too: {list_some(numbers)}; "
        f"scores there are too good (data.split=radiounet has none)"
        for role, numbers in find_leaks(split).items()
    ]


def scale_gain(pixels: Tensor, threshold: float) -> Tensor:
    """Convert bytes to gains in 0..1."""
    gain = pixels.float() / 255
    return ((gain - threshold) / (1 - threshold)).clamp(min=0) if threshold else gain


def to_signed(values: Tensor) -> Tensor:
    """Map 0..1 to -1..1, the range of both networks."""
    return values * 2 - 1


def to_unsigned(values: Tensor) -> Tensor:
    """Map -1..1 to 0..1 and clip values outside."""
    return ((values.float() + 1) / 2).clamp(0, 1)
