"""Folders of pictures without classes, with classes and with captions."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import DataError
from halfstep_train.data.image_folder import FolderLayout
from halfstep_train.workloads.diffusion.data import find_captioned_images, find_classes, find_pictures

LAYOUT = FolderLayout(val_fraction=0.25)


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(path)
    return path


def table(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_pictures_of_all_folders_are_divided_by_the_seed(tmp_path: Path) -> None:
    for name in ("1.png", "a/2.png", "a/b/10.png", "a/b/9.png"):
        picture(tmp_path / name)
    found = find_pictures(tmp_path, LAYOUT)
    assert len(found.train) == 3
    assert len(found.val) == 1
    again = find_pictures(tmp_path, LAYOUT)
    assert (found.train, found.val) == (again.train, again.val)


def test_a_validation_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("train/1.png", "train/2.png", "val/3.png"):
        picture(tmp_path / name)
    found = find_pictures(tmp_path, LAYOUT)
    assert [path.name for path in found.train.paths] == ["1.png", "2.png"]
    assert [path.name for path in found.val.paths] == ["3.png"]


@pytest.mark.parametrize("num", [0, 1])
def test_one_picture_is_too_few(tmp_path: Path, num: int) -> None:
    for k in range(num):
        picture(tmp_path / f"{k}.png")
    with pytest.raises(DataError, match=f"{num} image"):
        find_pictures(tmp_path, LAYOUT)


def test_captions_belong_to_their_pictures_and_bare_pictures_are_counted(tmp_path: Path) -> None:
    for k in range(5):
        picture(tmp_path / f"{k}.png")
    table(tmp_path, [{"file_name": f"{k}.png", "text": f"number {k}"} for k in range(4)])
    images, captions, notes = find_captioned_images(tmp_path, LAYOUT, "text")
    assert {path.name: text for path, text in captions.items()} == {f"{k}.png": f"number {k}" for k in range(4)}
    assert len(images.train) + len(images.val) == 4
    assert notes == ("left out: 1 image without a caption",)


def test_captions_without_files_or_without_text_are_named(tmp_path: Path) -> None:
    for k in range(2):
        picture(tmp_path / f"{k}.png")
    with pytest.raises(DataError, match=r"metadata\.jsonl"):
        find_captioned_images(tmp_path, LAYOUT, "text")
    table(tmp_path, [{"file_name": "0.png", "text": "zero"}, {"file_name": "7.png", "text": "seven"}])
    with pytest.raises(DataError, match=r"line 2 names 7\.png"):
        find_captioned_images(tmp_path, LAYOUT, "text")
    table(tmp_path, [{"file_name": "0.png", "text": "zero"}])
    with pytest.raises(DataError, match="1 image with a caption"):
        find_captioned_images(tmp_path, LAYOUT, "text")
    table(tmp_path, [{"file_name": "0.png", "caption": "zero"}])
    with pytest.raises(DataError, match=r"data\.text_column"):
        find_captioned_images(tmp_path, LAYOUT, "text")
    for caption in (None, ["zero", "nought"]):
        table(tmp_path, [{"file_name": "0.png", "text": caption}])
        with pytest.raises(DataError, match="line 1: the caption in 'text' is"):
            find_captioned_images(tmp_path, LAYOUT, "text")


def test_a_picture_that_two_rows_name_is_refused(tmp_path: Path) -> None:
    for k in range(3):
        picture(tmp_path / f"{k}.png")
    names = ("0.png", "1.png", "2.png", "./0.png")
    table(tmp_path, [{"file_name": name, "text": f"number {k}", "label": k % 2} for k, name in enumerate(names)])
    for find in (partial(find_captioned_images, column="text"), find_classes):
        with pytest.raises(DataError, match=r"line 4 names \./0\.png again") as refused:
            find(tmp_path, LAYOUT)
        assert "line 1" in refused.value.why


def test_captions_are_classes_only_where_they_are_named_so(tmp_path: Path) -> None:
    for k in range(4):
        picture(tmp_path / f"{k}.png")
    table(tmp_path, [{"file_name": f"{k}.png", "text": ("a disc", "a cross")[k % 2]} for k in range(4)])
    with pytest.raises(DataError, match="no column label") as refused:
        find_classes(tmp_path, LAYOUT)
    assert "data.label_column" in refused.value.fix
    named = replace(LAYOUT, label_column="text")
    assert find_classes(tmp_path, named).classes == ("a cross", "a disc")
