from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
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
