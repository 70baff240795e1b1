from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from data import data_sets
from data.picture_folders import write_classes, write_split
from halfstep.errors import DataError
from halfstep_train.data.binary_sets import CLASSES, ROW_BYTES, find_cifar_folder, read_cifar
from halfstep_train.data.image_folder import FolderLayout, check_same_classes, find_images

USUAL = FolderLayout()


def test_classes_are_the_sorted_folder_names_of_train_and_val(tmp_path: Path) -> None:
    found = find_images(write_split(tmp_path), USUAL)
    assert found.classes == ("bird", "cat")
    assert found.train.labels == (0,) * 4 + (1,) * 4
    assert [path.name for path in found.val.paths] == ["0.jpg", "1.jpg"] * 2
    assert all(
        path.parent.name == found.classes[label] for path, label in zip(found.val.paths, found.val.labels, strict=True)
    )


def test_folder_names_can_be_given(tmp_path: Path) -> None:
    write_classes(tmp_path / "big", {"a": 2, "b": 2})
    write_classes(tmp_path / "small", {"a": 1, "b": 1})
    found = find_images(tmp_path, FolderLayout(folders=("big", "small")))
    assert (len(found.train), len(found.val)) == (4, 2)
    with pytest.raises(DataError, match="no folder huge"):
        find_images(tmp_path, FolderLayout(folders=("huge",)))


def test_one_folder_is_divided_class_by_class_the_same_each_time(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 10, "b": 20, "lonely": 1})
    layout = FolderLayout(val_fraction=0.2)
    found = find_images(tmp_path, layout)
    assert Counter(found.val.labels) == {0: 2, 1: 4}
    assert not set(found.train.paths) & set(found.val.paths)
    assert len(found.train) + len(found.val) == 31
    assert find_images(tmp_path, layout) == found
    assert len(find_images(tmp_path, FolderLayout(val_fraction=0)).val) == 0


def test_the_kaggle_archive_is_read_as_it_unpacks(tmp_path: Path) -> None:
    write_classes(tmp_path / "train.X1", {"n01": 2, "n02": 1})
    write_classes(tmp_path / "train.X2", {"n03": 3})
    write_classes(tmp_path / "val.X", {"n01": 1, "n02": 1, "n03": 1})
    (tmp_path / "Labels.json").write_text(json.dumps({"n01": "tench", "n02": "goldfish", "n03": "shark"}))
    found = find_images(tmp_path, USUAL)
    assert found.classes == ("n01", "n02", "n03")
    assert (len(found.train), len(found.val)) == (6, 3)
    assert found.titles["n02"] == "goldfish"


def test_other_files_hidden_ones_and_upper_case_endings(tmp_path: Path) -> None:
    write_split(tmp_path, train=1)
    cats = tmp_path / "train" / "cat"
    (cats / "0.jpg").rename(cats / "0.JPEG")
    (cats / "notes.txt").write_text("not a picture")
    (cats / "._0.jpg").write_bytes(b"")
    assert [path.name for path in find_images(tmp_path, USUAL).train.paths] == ["0.jpg", "0.JPEG"]


def test_every_unusable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone does not exist"):
        find_images(tmp_path / "gone", USUAL)
    with pytest.raises(DataError, match="no class folders"):
        find_images(tmp_path, USUAL)
    write_classes(tmp_path / "train", {"cat": 1})
    with pytest.raises(DataError, match="contains one class, cat"):
        find_images(tmp_path, USUAL)
    (tmp_path / "train" / "dog").mkdir()
    with pytest.raises(DataError, match="no images in class dog"):
        find_images(tmp_path, USUAL)
    write_classes(tmp_path / "train", {"dog": 1})
    write_classes(tmp_path / "val", {"dog": 1, "emu": 1})
    with pytest.raises(DataError, match="only in .*val: emu"):
        find_images(tmp_path, USUAL)


def test_a_split_needs_a_second_picture(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="none is left for validation"):
        find_images(tmp_path, USUAL)


def test_other_classes_than_those_trained_on_are_an_error_that_lists_them() -> None:
    check_same_classes(["a", "b"], ("a", "b"))
    with pytest.raises(DataError) as caught:
        check_same_classes(["a", "b"], ["b", "c"])
    assert caught.value.why == "missing: a; unknown: c"
    with pytest.raises(DataError, match="2 classes"):
        check_same_classes(["a", "b"], ["b", "a"])


def test_cifar_batches_become_images_with_their_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    assert find_cifar_folder(tmp_path) is None
    rows = np.random.default_rng(0).integers(0, 256, (6, ROW_BYTES)).astype(np.uint8)
    rows[:, 0] = [3, 1, 4, 1, 5, 9]
    for name, part in (("data_batch_1", rows[:2]), ("data_batch_2", rows[2:4]), ("test_batch", rows[4:])):
        (folder / f"{name}.bin").write_bytes(part.tobytes())
    assert find_cifar_folder(tmp_path) == folder
    classes, train, test = read_cifar(folder)
    assert classes == CLASSES
    assert train.labels.tolist() == [3, 1, 4, 1]
    assert test.labels.tolist() == [5, 9]
    green = torch.from_numpy(rows[1, 1 + 1024 : 1 + 2048].reshape(32, 32))
    assert torch.equal(train.pixels[1, :, :, 1], green)
    (folder / "data_batch_2.bin").write_bytes(rows[2:4].tobytes()[:-1])
    with pytest.raises(DataError, match="data_batch_2.bin has 6,145 bytes"):
        read_cifar(folder)


@pytest.mark.parametrize("write", [data_sets.tgs, data_sets.drive, data_sets.camvid, data_sets.dsb2018, data_sets.voc])
def test_images_and_masks_are_no_classes(tmp_path: Path, write: Callable[[Path], None]) -> None:
    root = tmp_path / "my data"
    write(root)
    with pytest.raises(DataError, match="images and masks") as refused:
        find_images(root, FolderLayout())
    assert f"halfstep train unet --data-dir '{root}'" in refused.value.fix


def test_classes_that_are_called_as_masks_are_still_possible(tmp_path: Path) -> None:
    write_classes(tmp_path / "other", {"mask": 2, "no_mask": 2})
    assert find_images(tmp_path / "other", FolderLayout()).classes == ("mask", "no_mask")
    write_classes(tmp_path / "same", {"image": 2, "mask": 2})
    with pytest.raises(DataError, match="images and masks") as refused:
        find_images(tmp_path / "same", FolderLayout())
    assert "data.folders=[.]" in refused.value.fix
    assert find_images(tmp_path / "same", FolderLayout(folders=(".",))).classes == ("image", "mask")
