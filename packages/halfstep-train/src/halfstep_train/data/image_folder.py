"""Folders of classes on disk: which files there are, the class of each, and which of them are bad.

    DIR/train/<class>/*  DIR/val/<class>/*     ImageFolder
    DIR/<class>/*                              one folder, divided by a seed, class by class
    DIR/train.X1/<class>/* ... DIR/val.X/...   Kaggle's ImageNet-100 as its archive unpacks, with Labels.json
    DIR/metadata.jsonl, DIR/train/...          a table of files and labels (metadata_file)

A class is a folder's name, or a label; its number is the name's place in sorted order.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.disk import parse_json
from halfstep.errors import DataError, format_count, make_printable
from halfstep_train.data.files import (
    IMAGE_ENDINGS,
    TRAIN_NAMES,
    VALIDATION_NAMES,
    BadFiles,
    describe_content,
    list_folders,
    list_image_files,
    list_some,
    require_folder,
    split_off,
)
from halfstep_train.data.images import check_image_file, open_image_file
from halfstep_train.data.layouts import find_pair_folders
from halfstep_train.data.metadata_file import LABEL_COLUMNS, read_labels

KAGGLE_TRAIN, KAGGLE_VALIDATION, KAGGLE_TITLES = "train.X[0-9]*", "val.X*", "Labels.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderLayout:
    """Folder names and split settings; without names, the common ones count."""

    folders: tuple[str, ...] = ()
    """The training folder, then the validation folder."""
    val_fraction: float = 0.1
    """Share of each class held out if there is no validation folder; 0 holds out nothing."""
    label_column: str = ""
    """Column of a metadata table; empty: the first of `label_columns` that exists."""
    label_columns: tuple[str, ...] = LABEL_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Image files and their class numbers."""

    paths: tuple[Path, ...] = ()
    labels: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.paths)

    def drop(self, bad: set[Path]) -> Listing:
        """Return the listing without some files."""
        kept = [(p, label) for p, label in zip(self.paths, self.labels, strict=True) if p not in bad]
        return Listing(paths=tuple(p for p, _ in kept), labels=tuple(label for _, label in kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFolder:
    """The images of a data folder, by split."""

    root: Path
    classes: tuple[str, ...]
    train: Listing
    val: Listing
    titles: Mapping[str, str] = field(default_factory=dict)
    """Readable class names, if the folder provides them."""
    val_source: str = ""
    """The folder that validation comes from, or the share of training."""
    has_table: bool = False
    """Whether a table, not the folders, assigns the classes."""


def find_images(root: Path, layout: FolderLayout, *, known: Sequence[str] = ()) -> ImageFolder:
    """Find every image of a data folder with its class and split; nothing is decoded.

    `known` are the classes of a model that is only evaluated: the folder may hold a subset of them.
    """
    require_folder(root)
    train_folders, val_folders = find_split_folders(root, layout)
    labelled = read_labels(train_folders[0], root, layout.label_column, layout.label_columns)
    # A folder that the user named explicitly is not questioned.
    if labelled is None and not layout.folders:
        _refuse_masks(root)
    train = labelled or _list_classes(train_folders)
    # The order of a table's labels is that of numbers, since they may be numbers.
    in_order = tuple(train) if labelled else tuple(sorted(train))
    # A model that is only evaluated keeps its class numbers, even if the folder lacks some classes.
    classes = tuple(known) if set(train) <= set(known) else in_order
    if len(classes) < 2 and not known:
        raise DataError(
            f"{list_some(train_folders)} contains one class, {classes[0]}",
            why="a classifier needs at least two classes",
            fix="make one folder per class: train/<class>/*.jpg",
        )
    if val_folders:
        val = read_labels(val_folders[0], root, layout.label_column, layout.label_columns)
        val = val or _list_classes(val_folders)
        if extra := sorted(set(val) - set(classes)):
            raise DataError(
                f"classes that exist only in {list_some(val_folders)}: {list_some(extra, 10)}",
                why="the model never sees these classes in training",
                fix="add them to the training folder, or remove them",
            )
    else:
        train, val = _split_classes(train, layout)
    return ImageFolder(
        root=root,
        classes=classes,
        train=_make_listing(train, classes),
        val=_make_listing(val, classes),
        titles=_read_titles(root),
        val_source=list_some(val_folders) if val_folders else f"{layout.val_fraction:.0%} of each class",
        has_table=labelled is not None,
    )


def check_same_classes(trained: Sequence[str], found: Sequence[str]) -> None:
    """Raise if the data's classes differ from those a model was trained on, naming the difference."""
    if tuple(trained) == tuple(found):
        return
    missing, extra = [c for c in trained if c not in found], [c for c in found if c not in trained]
    differences = [f"missing: {list_some(missing, 10)}"] if missing else []
    differences += [f"unknown: {list_some(extra, 10)}"] if extra else []
    raise DataError(
        f"the data has {format_count(len(found), 'class', 'classes')}, but the model was trained on {len(trained)}",
        why="; ".join(differences) or "the names are the same, in a different order",
        fix="evaluate on data with the same class folders",
    )


def _refuse_masks(root: Path) -> None:
    """Raise for a folder of images and a folder of masks, which look like two classes."""
    if names := find_pair_folders(root):
        raise DataError(
            f"{root} contains images and masks ({names}), not classes",
            why="a classifier would learn to distinguish images from masks",
            fix=f"halfstep train unet --data-dir {shlex.quote(str(root))}; if they are classes: data.folders=[.]",
        )


def find_split_folders(root: Path, layout: FolderLayout) -> tuple[list[Path], list[Path]]:
    """Return the training and validation folders; the whole folder and none if it is not split."""
    if not layout.folders and (parts := sorted(root.glob(KAGGLE_TRAIN))):
        return parts, sorted(root.glob(KAGGLE_VALIDATION))
    train_name, val_name, *_ = (*layout.folders, "", "")
    train, val = _find_named(root, train_name, TRAIN_NAMES), _find_named(root, val_name, VALIDATION_NAMES)
    if train is None and val is not None:
        raise DataError(f"{root} has {val.name}/ but no train/", fix="set the training folder: data.folders=[NAME]")
    return [train or root], [val] if val else []


def _find_named(root: Path, named: str, usual: Sequence[str]) -> Path | None:
    if named:
        if not (root / named).is_dir():
            raise DataError(f"no folder {named} in {root}", why=f"it contains {describe_content(root)}")
        return root / named
    return next((root / name for name in usual if (root / name).is_dir()), None)


def _list_classes(folders: Sequence[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for parent in folders:
        for folder in list_folders(parent):
            found.setdefault(make_printable(folder.name), []).extend(list_image_files(folder))
    if not found:
        raise DataError(
            f"no class folders in {list_some(folders)}",
            why=f"it contains {describe_content(folders[0])}",
            fix="make one folder per class: train/<class>/*.jpg and val/<class>/*.jpg",
        )
    empty = sorted(name for name, paths in found.items() if not paths)
    if empty:
        raise DataError(
            f"no images in class {list_some(empty)} of {list_some(folders)}",
            why="a class without images cannot be learned, and would shift the indices of the others",
            fix="add images (" + " ".join(IMAGE_ENDINGS) + ") or remove the folder",
        )
    return found


def _split_classes(
    found: Mapping[str, list[Path]], layout: FolderLayout
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Hold out the same share of every class, at least one image and never the last."""
    train, val = {}, {}
    for name, paths in found.items():
        # The class name is part of the seed: adding a class does not change the split of the others.
        train[name], val[name] = split_off(paths, layout.val_fraction, f"0 {name}")
    if layout.val_fraction > 0 and not any(val.values()):
        raise DataError(
            "every class has only one image: none is left for validation",
            why="validating on training images would measure nothing",
            fix="add images, or train without validation: data.val_fraction=0",
        )
    return train, val


def _make_listing(found: Mapping[str, list[Path]], classes: Sequence[str]) -> Listing:
    numbers = {name: number for number, name in enumerate(classes)}
    rows = [(path, numbers[name]) for name in sorted(found) for path in found[name]]
    return Listing(paths=tuple(path for path, _ in rows), labels=tuple(label for _, label in rows))


def _read_titles(root: Path) -> dict[str, str]:
    path = root / KAGGLE_TITLES
    if not path.is_file():
        return {}
    try:
        titles = parse_json(path.read_text())
        return {str(name): str(title) for name, title in titles.items()}
    except (ValueError, AttributeError) as error:
        raise DataError(f"cannot read {path}", why=str(error), fix='write {"class": "name"} into it') from error


END_BYTES = 4096
"""Cameras and editors append up to this many bytes after the image's end marker."""


def check_images(folder: ImageFolder, *, bad_files: BadFiles) -> ImageFolder:
    """Return the folder without its bad files, each of which is reported.

    To stop at the first bad file, headers and file ends are enough: they reveal non-images and truncated files. To
    leave bad files out, every file is decoded, since only that finds them all.
    """
    paths = folder.train.paths + folder.val.paths
    good = bad_files.try_each(check_image_file if bad_files.mode == "skip" else check_header_and_end, paths)
    if len(good) == len(paths):
        return folder
    bad = {*paths} - {path for path, _ in good}
    kept = dataclasses.replace(folder, train=folder.train.drop(bad), val=folder.val.drop(bad))
    refuse_lost_classes(folder.classes, kept.train.labels, why=bad_files.skipped[0].what)
    bad_files.refuse_empty_split("validation", len(folder.val), len(kept.val))
    return kept


def refuse_lost_classes(classes: Sequence[str], labels: Sequence[int], *, why: str) -> None:
    """Raise if bad files were all the training images of a class."""
    left = set(labels)
    lost = [name for number, name in enumerate(classes) if number not in left]
    if lost:
        raise DataError(f"no readable training image in class {', '.join(lost)}", why=why)


def check_header_and_end(path: Path) -> None:
    """Raise for a file that is not an image or is truncated; decode only suspicious ones."""
    with open_image_file(path), path.open("rb") as file:
        start = file.read(12)
        length = file.seek(0, os.SEEK_END)
        file.seek(max(0, length - END_BYTES))
        end = file.read()
    if not _is_whole(start, end, length):
        check_image_file(path)  # cut short, or only followed by something long


def _is_whole(start: bytes, end: bytes, length: int) -> bool:
    # End markers: JPEG has EOI (ff d9), PNG an IEND chunk; a RIFF header (WebP) gives its length.
    if start.startswith(b"\xff\xd8"):
        return b"\xff\xd9" in end
    if start.startswith(b"\x89PNG"):
        return b"IEND" in end
    if start.startswith(b"RIFF"):
        return length >= int.from_bytes(start[4:8], "little") + 8
    return True
