from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from data.picture_folders import smooth_picture
from halfstep.errors import DataError
from halfstep_train.data.image_folder import FolderLayout, ImageFolder, find_images
from halfstep_train.data.packed import PackSettings, fingerprint_folder


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
