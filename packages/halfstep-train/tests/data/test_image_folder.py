from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import data_sets
from data.picture_folders import smooth_picture, write_classes, write_split
from halfstep.errors import DataError
from halfstep_train.data.binary_sets import CLASSES, ROW_BYTES, find_cifar_folder, find_idx_folder, read_cifar, read_idx
from halfstep_train.data.image_folder import FolderLayout, ImageFolder, check_same_classes, find_images
from halfstep_train.data.image_samples import PackSettings, fingerprint_folder
from halfstep_train.workloads import from_dict
from halfstep_train.workloads.base.workload import OpenedData
from halfstep_train.workloads.classification.data import open_image_data

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
    with pytest.raises(DataError, match=r"data_batch_2.bin\n.*it has 6,145 bytes"):
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


def idx_bytes(values: np.ndarray) -> bytes:  # type: ignore[type-arg]
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, dtype=">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


def write_idx(folder: Path, *, mark: str = "-", packed: bool = False) -> np.ndarray:  # type: ignore[type-arg]
    """Ten training and four test images; gives the training pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 10), ("t10k", 4)):
        pixels = generator.integers(0, 256, (count, 28, 28))
        made[part] = pixels
        for kind, values in (("images", pixels), ("labels", np.arange(count) % 10)):
            path = folder / f"{part}-{kind}{mark}idx{values.ndim}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx_bytes(values)) if packed else idx_bytes(values))
    return made["train"]


def opened(folder: Path) -> OpenedData:
    config = from_dict("resnet18", {"data": {"dir": str(folder), "image_size": 28}}).config
    return open_image_data(config.data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("below", "mark", "packed"), [("", "-", False), ("", ".", False), ("MNIST/raw", "-", False), ("raw", "-", True)]
)
def test_idx_files_are_a_classifiers_data_with_the_test_part_as_validation(
    tmp_path: Path, below: str, mark: str, packed: bool
) -> None:
    pixels = write_idx(tmp_path / below, mark=mark, packed=packed)
    data = opened(tmp_path)
    assert data.store["classes"] == list("0123456789")
    assert (len(data.train), len(data.val)) == (10, 4)
    sample = data.train.sample(3, key=(0, 0, 3))
    assert int(sample["label"]) == 3
    assert torch.equal(sample["image"], torch.from_numpy(pixels[3].astype(np.uint8))[..., None].expand(-1, -1, 3))
    assert data.val.sample(1, key=(0, 0, 1))["image"].shape == (28, 28, 3)
    assert "idx" in data.about[0][1]


def test_a_folder_without_idx_files_is_none(tmp_path: Path) -> None:
    assert find_idx_folder(tmp_path) is None


def test_a_missing_a_cut_and_a_strange_file_are_named(tmp_path: Path) -> None:
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\n.*is not an idx file"):
        read_idx(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"0 bytes|no idx file"):
        read_idx(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "t10k-labels-idx1-ubyte").rename(tmp_path / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(DataError, match=r"cannot read .*t10k-labels"):
        read_idx(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="no t10k-labels-idx1-ubyte"):
        read_idx(tmp_path)


def write_table(folder: Path, rows: list[dict[str, Any]], *, name: str = "metadata.jsonl") -> None:
    """The table and the pictures that it names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        path = folder / row["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        smooth_picture(number).save(path)
    if name.endswith(".csv"):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        (folder / name).write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")


def rows_of(*labels: Any, column: str = "label", folder: str = "") -> list[dict[str, Any]]:
    return [{"file_name": f"{folder}{k}.png", column: label} for k, label in enumerate(labels)]


def found(root: Path, **layout: Any) -> ImageFolder:
    return find_images(root, FolderLayout(**layout))


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_words_are_classes_and_each_split_has_its_table(tmp_path: Path, name: str) -> None:
    write_table(tmp_path / "train", rows_of("cat", "dog", "cat"), name=name)
    write_table(tmp_path / "validation", rows_of("dog"), name=name)
    folder = found(tmp_path)
    assert folder.classes == ("cat", "dog")
    assert [(path.name, label) for path, label in zip(folder.train.paths, folder.train.labels, strict=True)] == [
        ("0.png", 0),
        ("2.png", 0),
        ("1.png", 1),
    ]
    assert folder.val.labels == (1,)


def test_numbers_are_classes_in_the_order_of_numbers(tmp_path: Path) -> None:
    write_table(tmp_path, rows_of(10, 2, 0, 10, 2, 0))
    folder = found(tmp_path, val_fraction=0.5)
    assert folder.classes == ("0", "2", "10")
    assert (len(folder.train), len(folder.val)) == (3, 3)


def test_one_table_at_the_root_may_serve_both_splits(tmp_path: Path) -> None:
    rows = rows_of("a", "b", folder="train/") + rows_of("b", folder="test/pictures/")
    write_table(tmp_path, rows)
    folder = found(tmp_path)
    assert (folder.train.labels, folder.val.labels) == ((0, 1), (1,))


def test_another_column_is_named_and_text_serves_where_it_repeats(tmp_path: Path) -> None:
    write_table(tmp_path / "a", rows_of("x", "y", "x", "y", column="species"))
    with pytest.raises(DataError, match="no column label") as refused:
        found(tmp_path / "a")
    assert "species" in refused.value.why
    assert "data.label_column" in refused.value.fix
    assert found(tmp_path / "a", label_column="species").classes == ("x", "y")
    write_table(tmp_path / "b", rows_of("x", "y", "x", "y", column="text"))
    assert found(tmp_path / "b").classes == ("x", "y")


def test_captions_are_no_classes(tmp_path: Path) -> None:
    write_table(tmp_path, rows_of(*(f"a picture of {k} things" for k in range(30)), column="text"))
    with pytest.raises(DataError, match="30 different labels in 30 rows") as refused:
        found(tmp_path)
    assert "captions" in refused.value.why


def test_a_table_of_boxes_beside_class_folders_leaves_the_folders_their_say(tmp_path: Path) -> None:
    rows = [{"file_name": f"{name}/{k}.png", "boxes": []} for name in ("cat", "dog") for k in range(2)]
    write_table(tmp_path, rows)
    assert found(tmp_path, val_fraction=0.5).classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"file_name": "gone.png", "label": 1}', r"line 2 names gone\.png"),
        ('{"file_name": "../out.png", "label": 1}', r"line 2 names \.\./out\.png"),
        ('{"file_name": "1.png", "label": null}', "line 2: label is None"),
        ('{"file_name": "1.png", "label": [1]}', r"line 2: label is \[1\]"),
        ('{"label": 1}', "line 2 has no file_name"),
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    root = tmp_path / "set"
    write_table(root, rows_of("a"))
    smooth_picture(1).save(tmp_path / "out.png")
    with (root / "metadata.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=said):
        found(root)


def test_a_pack_is_stale_once_a_label_changes(tmp_path: Path) -> None:
    write_table(tmp_path, rows_of("a", "b", "a", "b"))
    before = fingerprint_folder(found(tmp_path, val_fraction=0), PackSettings())
    assert fingerprint_folder(found(tmp_path, val_fraction=0), PackSettings()) == before
    write_table(tmp_path, rows_of("b", "a", "a", "b"))
    assert fingerprint_folder(found(tmp_path, val_fraction=0), PackSettings()) != before
