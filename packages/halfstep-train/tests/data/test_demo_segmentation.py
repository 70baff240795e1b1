from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.run.assemble import build_workload
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.config import UNetDataConfig
from halfstep_train.workloads.segmentation.data import find_pairs
from halfstep_train.workloads.segmentation.demo import write_demo


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.png"))}


def test_the_demo_is_a_function_of_its_seed_in_the_usual_layout(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_demo(tmp_path / name, seed=seed, num_images=4)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")
    found = find_pairs(UNetDataConfig(dir=str(tmp_path / "a"), val_fraction=0), BadFiles("error"))
    pairs = found.train
    assert [pair.mask.name for pair in pairs] == [f"00{i}_mask.png" for i in range(4)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_an_existing_folder_is_never_written_into(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exists already"):
        write_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- a validation set of bad files is an error ---


def spoil(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no picture")


def test_masks_and_images_that_are_all_bad_in_validation_are_an_error(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_demo(tmp_path / part, num_images=3, side=16)
    spoil(tmp_path / "val" / "imgs")
    small = ["data.image_size=16", "model.depth=1", "data.on_bad_file=skip", f"data.dir={tmp_path}"]
    with pytest.raises(DataError, match="left for validation: all 3 were left out") as refused:
        build_workload(load("unet", overrides=small).config)
    assert "cannot read" in refused.value.why


@pytest.mark.parametrize("cache", ["false", "true"])
def test_pictures_that_are_all_bad_in_validation_are_an_error(tmp_path: Path, cache: str) -> None:
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / part / name / "0.png")
    spoil(tmp_path / "val")
    settings = ["data.on_bad_file=skip", f"data.dir={tmp_path}", "data.image_size=32", f"data.cache={cache}"]
    with pytest.raises(DataError, match="left for validation: all 2 were left out"):
        build_workload(load("resnet18", overrides=[*settings, "data.cache_size=32"]).config)
