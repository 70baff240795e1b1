from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import DataError
from halfstep_train.data.files import BadFiles
from halfstep_train.workloads.segmentation.config import UNetDataConfig
from halfstep_train.workloads.segmentation.data import FoundPairs, Pair, find_pairs, split_pairs


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")


def ids(pairs: tuple[Pair, ...]) -> list[str]:
    return [pair.id for pair in pairs]


def settings(root: Path | str | None = None, **values: Any) -> UNetDataConfig:
    return UNetDataConfig(dir=root and str(root), **{"val_fraction": 0, **values})


def find(root: Path, bad_files: BadFiles | None = None, **values: str) -> FoundPairs:
    return find_pairs(settings(root, **values), bad_files or BadFiles("error"))


def numbered(count: int) -> tuple[Pair, ...]:
    return tuple(Pair(id=str(i), image=Path(f"{i}.png"), mask=Path(f"{i}_mask.png")) for i in range(count))


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("imgs/{}.jpg", "masks/{}_mask.gif"),
        ("imgs/{}.png", "masks/{}.png"),
        ("image/{}.tif", "label/{}.npy"),
        ("images/{}.PNG", "labels/{}.png"),
        ("train/image/{}.png", "train/label/{}.png"),
    ],
)
def test_the_common_layouts_are_found_in_natural_order(tmp_path: Path, image: str, mask: str) -> None:
    for name in ("10", "2", "1"):
        touch(tmp_path, image.format(name), mask.format(name))
    touch(tmp_path, str(Path(image).parent / ".DS_Store"), str(Path(image).parent / "readme.txt"))
    found = find(tmp_path)
    assert ids(found.train) == ["1", "2", "10"]
    assert found.val == ()


def test_folder_names_and_suffix_can_be_named(tmp_path: Path) -> None:
    touch(tmp_path, "scans/a.png", "truth/a-seg.png")
    (pair,) = find(tmp_path, images="scans", masks="truth/{id}-seg").train
    assert (pair.id, pair.mask.name) == ("a", "a-seg.png")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["imgs/a.png", "imgs/b.png", "masks/a_mask.png"], "imgs/b.png has no partner"),
        (["imgs/a.png", "masks/a_mask.png", "masks/b_mask.png"], "masks/b_mask.png has no partner"),
        (["imgs/a.png", "imgs/a.jpg", "masks/a_mask.png"], "same id"),
        (["imgs/a.txt", "masks/a_mask.png"], "no images in"),
        (["pictures/a.png"], "no imgs/ and masks/"),
    ],
)
def test_a_wrong_folder_is_explained(tmp_path: Path, names: list[str], said: str) -> None:
    touch(tmp_path, *names)
    with pytest.raises(DataError, match=said):
        find(tmp_path)


def test_lonely_files_are_skipped_and_counted_on_request(tmp_path: Path) -> None:
    touch(tmp_path, "imgs/a.png", "imgs/b.png", "masks/a_mask.png", "masks/c_mask.png")
    bad_files = BadFiles("skip")
    assert ids(find(tmp_path, bad_files).train) == ["a"]
    assert len(bad_files.skipped) == 2


@pytest.mark.parametrize(("count", "fraction", "held"), [(20, 0.25, 5), (2, 0.01, 1), (2, 0.99, 1), (1, 0, 0)])
def test_a_split_is_repeatable_and_leaves_something_to_each_part(count: int, fraction: float, held: int) -> None:
    pairs = numbered(count)
    train, val = split_pairs(pairs, settings(val_fraction=fraction))
    assert len(val) == held
    assert sorted(ids(train) + ids(val)) == sorted(ids(pairs))
    assert (train, val) == split_pairs(pairs, settings(val_fraction=fraction))
    with pytest.raises(DataError, match="only one image"):
        split_pairs(numbered(1), settings(val_fraction=0.1))


def test_a_list_of_ids_is_the_split_and_the_rest_trains(tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("# held out\n4\n\n3.png\n")
    train, val = split_pairs(numbered(5), settings(val_list=str(tmp_path / "val.txt")))
    assert (ids(train), ids(val)) == (["0", "1", "2"], ["4", "3"])


def test_lists_that_overlap_or_name_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n2\n")
    (tmp_path / "b.txt").write_text("2\n")
    (tmp_path / "c.txt").write_text("77\n")
    with pytest.raises(DataError, match="in both lists: 2"):
        split_pairs(numbered(5), settings(train_list=str(tmp_path / "a.txt"), val_list=str(tmp_path / "b.txt")))
    with pytest.raises(DataError, match="77"):
        split_pairs(numbered(5), settings(val_list=str(tmp_path / "c.txt")))
    with pytest.raises(DataError, match=r"none\.txt"):
        split_pairs(numbered(5), settings(val_list=str(tmp_path / "none.txt")))
