"""Labels from a table next to the images, `metadata.jsonl` or `metadata.csv`, as in Hugging Face's `imagefolder`.

Each row names an image (`file_name`, below the table's folder) and its label, a word or a number.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halfstep.disk import parse_json
from halfstep.errors import DataError
from halfstep_train.data.files import list_some, make_natural_key

TABLES = ("metadata.jsonl", "metadata.csv")
FILE_COLUMN = "file_name"
CLASS_COLUMNS = ("label", "labels", "class", "category")
LABEL_COLUMNS = (*CLASS_COLUMNS, "text")
FEW_ROWS = 20
"""Up to this many rows may all have different labels; with more, the column holds captions."""


def read_labels(folder: Path, root: Path, column: str, usual: Sequence[str]) -> dict[str, list[Path]] | None:
    """Return the images of each class inside `folder`, from a table there or at the data's root; None without a
    table.

    `usual` are the columns tried if `column` is empty.
    """
    table = find_table(folder, root)
    if table is None:
        return None
    found: dict[str, list[Path]] = {}
    num_rows = 0
    for number, row in _iterate_rows(table):
        if num_rows == 0 and not column and _has_class_folders_instead(row, folder):
            return None
        num_rows += 1
        label = _read_label(table, number, row, [column] if column else usual)
        if path := _find_image(table, number, row, folder, root):
            found.setdefault(label, []).append(path)
    if num_rows > FEW_ROWS and len(found) > num_rows // 2:
        raise DataError(
            f"{table} has {len(found)} different labels in {num_rows} rows: {list_some(found, 3)}",
            why="these are captions, not classes",
            fix="set the column with the classes: data.label_column=NAME",
        )
    in_order = sorted(found, key=make_natural_key)
    return {name: sorted(found[name], key=lambda path: make_natural_key(str(path))) for name in in_order}


def find_table(folder: Path, root: Path) -> Path | None:
    """Return the table of a folder of images: there, or at the data's root."""
    return next((path for place in (folder, root) for name in TABLES if (path := place / name).is_file()), None)


def read_captions(folder: Path, root: Path, column: str) -> dict[Path, str]:
    """Return the caption of each image inside `folder` that a table lists."""
    table = find_table(folder, root)
    if table is None:
        raise DataError(
            f"no captions in {folder}",
            why=f"there is no {' or '.join(TABLES)} in it",
            fix=f'add a metadata.jsonl with lines {{"{FILE_COLUMN}": "1.png", "{column}": "a red circle"}}',
        )
    found: dict[Path, str] = {}
    for number, row in _iterate_rows(table):
        path, caption = _find_image(table, number, row, folder, root), row.get(column)
        if not isinstance(caption, str):
            raise DataError(
                f"{table}, line {number}: the caption in {column!r} is {caption!r}, not a string",
                why=f"the line has {list_some(row, 10)}",
                fix="correct the line, or set the column with the captions: data.text_column=NAME",
            )
        if path is not None:
            found[path] = caption
    return found


def _has_class_folders_instead(row: dict[str, Any], folder: Path) -> bool:
    """True if the table holds boxes or captions, while folders give the classes."""
    has_folders = any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())
    return has_folders and not set(CLASS_COLUMNS) & set(row)


def _iterate_rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line numbers and rows; raise if two rows name one image, which could end up in both splits."""
    lines: dict[str, int] = {}
    for number, row in _read_rows(table):
        name = os.path.normpath(str(row.get(FILE_COLUMN)))  # ./1.png is 1.png
        if (first := lines.setdefault(name, number)) != number:
            raise DataError(
                f"{table}, line {number} names {row[FILE_COLUMN]} again",
                why=f"line {first} already names it, and an image has one row",
                fix="keep one of the lines",
            )
        yield number, row


def _read_rows(table: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = table.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {table}", why=str(error), fix="save it as UTF-8 text") from error
    if table.suffix == ".csv":
        # Line 1 is the header.
        yield from enumerate(csv.DictReader(io.StringIO(text, newline="")), start=2)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise DataError(f"{table}, line {number} is not JSON", why=str(error)) from error
            if not isinstance(row, dict):
                raise DataError(f"{table}, line {number} is not a JSON object", fix='write {"file_name": "1.png", ...}')
            yield number, row


def _read_label(table: Path, number: int, row: dict[str, Any], columns: Sequence[str]) -> str:
    name = next((one for one in columns if one in row), "")
    if not name:
        raise DataError(
            f"{table} has no column {' or '.join(columns)}",
            why=f"line {number} has {list_some(row, 10)}",
            fix="set the column with the classes: data.label_column=NAME",
        )
    label = row[name]
    if not isinstance(label, (str, int)) or isinstance(label, bool) or label == "":
        raise DataError(
            f"{table}, line {number}: {name} is {label!r}",
            why="a class must be a string or an integer",
            fix="correct the line",
        )
    return str(label)


def _find_image(table: Path, number: int, row: dict[str, Any], folder: Path, root: Path) -> Path | None:
    """Return the image of a row; None if it is not inside `folder`: a table at the root may list several splits."""
    name = row.get(FILE_COLUMN)
    if not isinstance(name, str) or not name:
        raise DataError(
            f"{table}, line {number} has no {FILE_COLUMN}",
            why=f"it has {list_some(row, 10)}",
            fix=f"name the image of each line in {FILE_COLUMN}"
            + ("; columns are separated by commas" if table.suffix == ".csv" else ""),
        )
    path = table.parent / name
    if not path.is_file():
        raise DataError(
            f"{table}, line {number} names {name}, which does not exist", fix="add the image, or remove the line"
        )
    # A table from elsewhere must not make training read other files: `..` and links are resolved first.
    if not path.resolve().is_relative_to(root.resolve()):
        raise DataError(f"{table}, line {number} names {name}, outside of {root}", fix="move the image below data.dir")
    return path if path.resolve().is_relative_to(folder.resolve()) else None
