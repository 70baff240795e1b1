"""RadioMapSeer's folder and its splits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.radio.config import RadioDataConfig
from halfstep_train.workloads.radio.demo import write_demo
from halfstep_train.workloads.radio.maps import (
    RadioMaps,
    RadioTree,
    check_pictures,
    get_public_split,
    read_antenna,
    read_gray,
)

TRAIN, VAL = get_public_split()["train"][0], get_public_split()["val"][0]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("radio") / "RadioMapSeer"
    write_demo(folder, side=16, num_maps={"train": 1, "val": 1}, num_transmitters=3)
    return folder


@pytest.fixture
def tree(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "RadioMapSeer"))


def error() -> BadFiles:
    return BadFiles("error")


def open_tree(folder: Path, **settings: Any) -> RadioTree:
    return RadioTree.open(RadioDataConfig(dir=str(folder), **settings))


def test_the_demo_has_the_originals_layout(original: Path) -> None:
    assert {path.name for path in (original / "gain").iterdir()} == {
        "DPM", "IRT2", "IRT4", "carsDPM", "carsIRT2", "carsIRT4",
    }  # fmt: skip
    names = {path.name for path in (original / "png").iterdir()}
    assert names == {"buildings_complete", "antennas", "cars", *(f"buildings_missing{k}" for k in range(1, 5))}
    assert sorted(path.name for path in (original / "gain/IRT4").iterdir()) == sorted(
        f"{number}_{transmitter}.png" for number in (TRAIN, VAL) for transmitter in (0, 1)
    )
    assert (original / f"png/buildings_missing3/6/{TRAIN}.png").is_file()
    antenna = np.asarray(Image.open(original / f"png/antennas/{TRAIN}_0.png"))
    assert antenna.dtype == np.uint8
    assert (antenna > 0).sum() == 1


def test_samples_are_gains_with_their_inputs(tree: Path) -> None:
    maps = RadioMaps(open_tree(tree).list_samples([TRAIN], bad_files=error()), size=(16, 16))
    assert [maps.name_of(index) for index in range(3)] == [f"{TRAIN}_{transmitter}.png" for transmitter in range(3)]
    found = maps.sample(1, key=(0, 0, 1))
    gain = np.asarray(Image.open(tree / f"gain/DPM/{TRAIN}_1.png"))
    buildings = np.asarray(Image.open(tree / f"png/buildings_complete/{TRAIN}.png"))
    assert np.array_equal(found["gain"][0].numpy(), gain)
    assert np.array_equal(found["condition"][0].numpy(), buildings)
    assert np.array_equal(found["condition"][2].numpy(), buildings)
    assert np.array_equal(maps.sample(1, key=(0, 1, 1))["gain"].numpy(), found["gain"].numpy())


def test_cars_are_the_third_input_and_have_their_own_gains(tree: Path) -> None:
    samples = open_tree(tree, cars=True).list_samples([TRAIN], bad_files=error())
    found = RadioMaps(samples, size=(16, 16)).sample(0, key=(0, 0, 0))
    assert np.array_equal(found["gain"][0], np.asarray(Image.open(tree / f"gain/carsDPM/{TRAIN}_0.png")))
    assert np.array_equal(found["condition"][2], np.asarray(Image.open(tree / f"png/cars/{TRAIN}.png")))


def test_versions_of_missing_buildings_are_drawn_by_the_key(tree: Path) -> None:
    maps = RadioMaps(open_tree(tree, missing_buildings=4).list_samples([TRAIN], bad_files=error()), size=(16, 16))
    first = maps.sample(0, key=(0, 0, 0))["condition"]
    assert np.array_equal(first, maps.sample(0, key=(0, 0, 0))["condition"])
    others = [maps.sample(0, key=(0, epoch, 0))["condition"] for epoch in range(1, 12)]
    assert any(not np.array_equal(first, other) for other in others)


def test_the_parent_folder_will_do_and_other_folders_are_refused(tree: Path, tmp_path: Path) -> None:
    assert open_tree(tree.parent).root == tree
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(DataError, match="is not a RadioMapSeer folder"):
        open_tree(tmp_path / "elsewhere")


def test_missing_antennas_are_one_error_with_their_number(tree: Path) -> None:
    for transmitter in (0, 2):
        (tree / f"png/antennas/{TRAIN}_{transmitter}.png").unlink()
    with pytest.raises(DataError, match=rf"2 gains of .*: no png/antennas/{TRAIN}_0.png"):
        open_tree(tree).list_samples([TRAIN], bad_files=error())
    skipping = BadFiles("skip")
    assert len(open_tree(tree).list_samples([TRAIN], bad_files=skipping)) == 1
    assert len(skipping.skipped) == 1


@pytest.mark.parametrize(
    ("folder", "settings"), [("png/cars", {"cars": True}), ("gain/IRT2", {"simulation": "IRT2"}), ("png/antennas", {})]
)
def test_a_tree_without_a_folder_that_is_read_is_refused(tree: Path, folder: str, settings: dict[str, Any]) -> None:
    shutil.rmtree(tree / folder)
    with pytest.raises(DataError, match=f"no .*{folder}"):
        open_tree(tree, **settings).list_samples([TRAIN], bad_files=error())


def test_an_antenna_without_a_bright_pixel_is_named(tree: Path) -> None:
    path = tree / f"png/antennas/{TRAIN}_0.png"
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(path)
    with pytest.raises(DataError, match="shows no antenna"):
        read_antenna(path, (16, 16))
    skipping = BadFiles("skip")
    assert len(check_pictures(open_tree(tree).list_samples([TRAIN], bad_files=error()), skipping)) == 2


def test_the_antenna_keeps_its_brightness_and_place_at_any_size(tmp_path: Path) -> None:
    pixels = np.zeros((16, 16), np.uint8)
    pixels[5, 12] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    for side in (8, 32):
        found = read_antenna(tmp_path / "a.png", (side, side))
        assert found.max() == 255
        assert np.argwhere(found).tolist() == [[5 * side // 16, 12 * side // 16]]


def test_maps_shrink_by_area(tmp_path: Path) -> None:
    Image.fromarray(np.kron(np.array([[0, 100], [200, 40]], np.uint8), np.ones((4, 4), np.uint8))).save(
        tmp_path / "a.png"
    )
    assert read_gray(tmp_path / "a.png", (2, 2)).tolist() == [[0, 100], [200, 40]]


def test_radiounets_split_is_that_of_the_paper_and_disjoint() -> None:
    split = get_public_split()
    assert [len(split[role]) for role in ("train", "val", "test")] == [501, 100, 99]
    assert set().union(*split.values()) == set(range(1, 701))
    # numpy's seed 42 on 0..699, one added.
    state = np.random.RandomState(42)
    order = np.arange(0, 700, 1, dtype=np.int16)
    state.shuffle(order)
    assert (*split["train"], *split["val"], *split["test"]) == tuple((order + 1).tolist())
