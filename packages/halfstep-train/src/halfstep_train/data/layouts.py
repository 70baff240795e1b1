"""Where common data sets keep images and masks: a table of name patterns, and which row a folder fits.

A known data set is recognised by its files, a plain pair of folders by the folders' names. If two rows fit, the error
names both; nothing is guessed. A pattern such as `training/images/{id}_training` finds 21_training.tif with id 21:

    {id}   what the names of an image and its mask share; if it appears twice, it is the same both times
    **/    any folders in between; they become part of the id
    *      anything within one name
    .png   an extension; without one, every readable extension counts
    /      at the end: a folder of files that together are one mask
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from halfstep.errors import DataError
from halfstep_train.data.files import (
    READABLE_ENDINGS,
    TRAIN_NAMES,
    VALIDATION_NAMES,
    describe_content,
    list_folders,
    list_some,
)

ID, ANY_FOLDERS = "{id}", "**"


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern of file names below a folder; it yields the id of each match."""

    text: str

    @property
    def base(self) -> str:
        """Return the folder up to the first component that varies."""
        parts = self.text.split("/")[:-1]
        fixed = next((k for k, part in enumerate(parts) if ID in part or "*" in part), len(parts))
        return "/".join(parts[:fixed]) or "."

    def iterate(self, root: Path) -> Iterator[tuple[str, Path]]:
        """Yield ids and paths in the order of the file system, without hidden files and folders.

        Several files of one id differ in extension or in what `*` matches."""
        text, wants_folder = PurePosixPath(self.text).as_posix(), self.text.endswith("/")
        ending = PurePosixPath(text).suffix.lower()
        endings = (ending,) if ending in READABLE_ENDINGS else READABLE_ENDINGS
        stem = text.rpartition(".")[0] if ending in (*READABLE_ENDINGS, ".*") else text
        # A coarse search first; the expression then checks that the id is the same wherever it occurs.
        wide = glob.escape(stem).replace("[*]", "*").replace(ID, "*") + ("" if wants_folder else ".*")
        expression = _make_expression(stem)
        for found in glob.iglob(wide, root_dir=root, recursive=True):
            path = root / found
            if path.is_dir() if wants_folder else path.suffix.lower() in endings and path.is_file():
                match = expression.fullmatch(found if wants_folder else os.path.splitext(found)[0])
                if match is not None:
                    yield "".join(match.groups()), path


def _make_expression(stem: str) -> re.Pattern[str]:
    """Return a regular expression whose groups, joined, are the id."""
    parts = {f"{ANY_FOLDERS}/": "((?:[^/]+/)*)", ID: "(?P<id>[^/]+?)", "*": "[^/]*"}
    text = ""
    for part in re.split(r"(\*\*/|\{id\}|\*)", stem):
        text += "(?P=id)" if part == ID and "(?P<id>" in text else parts.get(part, re.escape(part))
    return re.compile(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairNames:
    """Patterns for the images and masks of one split; the first mask pattern that matches an image counts."""

    images: str
    masks: tuple[str, ...]

    def shorten(self) -> tuple[str, str]:
        """Return images and masks as a user would write them: plain folders if any file name is allowed."""
        if len(self.masks) == 1:
            return self.images, self.masks[0]
        return NamePattern(self.images).base, NamePattern(self.masks[0]).base

    def __str__(self) -> str:
        return " + ".join(self.shorten())


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to lay out a data set."""

    name: str
    train: PairNames
    val: PairNames | None = None
    lists: tuple[str, str] | None = None
    """Text files with the training and validation ids."""
    ignored: int | None = None
    """The mask value of unlabelled pixels."""
    some_without_masks: bool = False
    """Whether images without a mask belong to the data set."""
    has_background: bool = True
    """Whether the smallest mask value means "no class"."""


def _make_known(name: str, images: str, masks: str, splits: tuple[str, ...] = ("",), **more: Any) -> Layout:
    """Return a layout with these patterns, in which `{split}` is the folder of training, then of validation."""
    train, *val = (
        PairNames(images=images.replace("{split}", split), masks=(masks.replace("{split}", split),)) for split in splits
    )
    return Layout(name=name, train=train, val=val[0] if val else None, **more)


TRAIN_VAL = ("train", "val")
CITY_IMAGES, CITY_MASKS = "leftImg8bit/{split}/**/{id}_leftImg8bit", "gtFine/{split}/**/{id}_gtFine"

KNOWN: tuple[Layout, ...] = (
    # training/mask/ is the camera's field of view, no label.
    _make_known("DRIVE", "{split}/images/{id}_{split}", "{split}/1st_manual/{id}_manual1", ("training", "test")),
    _make_known("DRIVE, one part", "images/{id}_*", "1st_manual/{id}_manual1"),
    # SegNet's version: 11 classes and, as value 11, everything else.
    _make_known("CamVid", "{split}/{id}", "{split}annot/{id}", TRAIN_VAL, ignored=11, has_background=False),
    _make_known("CamVid", "{split}/{id}", "{split}_labels/{id}_L", TRAIN_VAL, has_background=False),
    _make_known("CamVid", "images/{id}", "labels/{id}_P", has_background=False),
    # Of rows with one name the first that fits counts: the 19 classes for training, where they were made.
    _make_known("Cityscapes", CITY_IMAGES, f"{CITY_MASKS}_labelTrainIds", TRAIN_VAL, ignored=255, has_background=False),
    _make_known("Cityscapes", CITY_IMAGES, f"{CITY_MASKS}_labelIds", TRAIN_VAL, has_background=False),
    _make_known(
        "Pascal VOC",
        "JPEGImages/{id}",
        "SegmentationClass/{id}",
        lists=("ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt"),
        ignored=255,
        some_without_masks=True,
    ),
    _make_known(
        "ADE20K",
        "images/{split}/{id}",
        "annotations/{split}/{id}",
        ("training", "validation"),
        ignored=0,
        has_background=False,
    ),
    _make_known("DSB2018", "stage1_train/{id}/images/{id}", "stage1_train/{id}/masks/"),
    _make_known("DSB2018", "{id}/images/{id}", "{id}/masks/"),
)

FOLDER_NAMES = (
    ("imgs", "masks"),
    ("images", "masks"),
    ("image", "mask"),
    ("image", "label"),
    ("images", "labels"),
    ("img", "mask"),
)
DEPTH, MANY_FOLDERS = 2, 64
"""How many levels below data.dir a data set may start (VOCdevkit/VOC2012), and the most folders searched per level."""


MASK_SUFFIX = "_mask"
"""Text after the id in a mask's name; masks named like their image are found too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLayout:
    """The user's settings about names; an empty string means the common ones.

    Folders may be patterns with `{id}` (see above), which then determine the file names completely.
    """

    images: str = ""
    masks: str = ""
    val_images: str = ""
    val_masks: str = ""

    def make_names(self, images: str, masks: str) -> PairNames:
        """Return the patterns for two folders, or the given patterns unchanged."""
        return PairNames(
            images=images if ID in images else f"{images}/{ID}",
            masks=(masks,) if ID in masks else (f"{masks}/{ID}{MASK_SUFFIX}", f"{masks}/{ID}"),
        )


def find_layout(root: Path, asked: PairLayout) -> tuple[Path, Layout]:
    """Return the layout of a folder and where it starts: in `root`, or in the only folder an archive created there."""
    # Level by level: the data may be in a folder that an archive created, but an upper level comes first.
    for folders in _list_levels(root):
        fitting = [(folder, layout) for folder in folders if (layout := _find_layout_at(folder, asked)) is not None]
        if len(folders) > 1 and fitting:
            places = [folder for folder, _ in fitting]
            raise DataError(
                f"{root} contains {len(folders)} folders, among them the data of {list_some(places)}",
                why="halfstep cannot tell which one to use",
                fix=f"name it: data.dir={shlex.quote(str(places[0]))}",
            )
        if fitting:
            return fitting[0]
    raise _make_not_found_error(root, asked)


def find_pair_folders(root: Path) -> str:
    """Describe the folders if `root` is, or only contains, a data set of images and masks with shared ids; else return
    ""."""
    for folders in _list_levels(root):
        if len(folders) == 1 and (found := _find_pair_folders_at(folders[0])):
            return found
    return ""


def _find_pair_folders_at(root: Path) -> str:
    try:
        layout = _find_layout_at(root, PairLayout())
    except DataError as error:  # fits two
        return error.what.partition(": ")[2]
    if layout is None:
        return ""
    # Two folders named like images and masks may still be classes: only shared ids make them pairs.
    images, *masks = (
        {name for name, _ in NamePattern(text).iterate(root)} for text in (layout.train.images, *layout.train.masks)
    )
    return _describe_layout(layout) if any(images & found for found in masks) else ""


def _find_layout_at(root: Path, asked: PairLayout) -> Layout | None:
    if not (asked.images or asked.masks or asked.val_images):
        # A data set may have several rows, for its versions: the first that fits counts. Two data sets are an error.
        known: dict[str, Layout] = {}
        for layout in KNOWN:
            if layout.name not in known and _has_files(root, layout.train):
                known[layout.name] = layout
        if found := _require_one(root, list(known.values())):
            return _keep_existing_validation(root, found)
    for group in _list_usual(root, asked):
        if found := _require_one(root, [layout for layout in group if has_folders(root, layout.train)]):
            return found
    return None


def _list_usual(root: Path, asked: PairLayout) -> Iterator[list[Layout]]:
    """Yield groups of folder pairs in order of preference: those with a validation split first."""
    # A folder that the user named replaces the common name in every pair; the pairs may then be equal.
    pairs = [(asked.images or images, asked.masks or masks) for images, masks in FOLDER_NAMES]
    pairs = list(dict.fromkeys(pairs))
    own = asked.make_names(asked.val_images, asked.val_masks) if asked.val_images else None
    divided = [
        Layout(name="", train=asked.make_names(*train), val=asked.make_names(*val))
        for images, masks in pairs
        for part in TRAIN_NAMES
        for train, val in _list_divided(root, images, masks, part)
        if own is None
    ]
    yield divided
    yield [Layout(name="", train=asked.make_names(images, masks), val=own) for images, masks in pairs]
    for part in TRAIN_NAMES:
        for order in _list_orders(*pairs[0]):
            names = [asked.make_names(order.format(part, images), order.format(part, masks)) for images, masks in pairs]
            yield [Layout(name="", train=train, val=own) for train in names]


def _list_divided(root: Path, images: str, masks: str, part: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Yield `train/images` with `val/images`, `images/train` with `images/val`; the first validation split counts."""
    for order in _list_orders(images, masks):
        for other in VALIDATION_NAMES:
            val = order.format(other, images), order.format(other, masks)
            if all((root / NamePattern(f"{name}/").base).is_dir() for name in val):
                yield (order.format(part, images), order.format(part, masks)), val
                break


def _list_orders(images: str, masks: str) -> tuple[str, ...]:
    """Return how split and folder are joined: `train/images`, and unless they are patterns `images/train`."""
    return ("{0}/{1}",) if ID in images + masks else ("{0}/{1}", "{1}/{0}")


def _keep_existing_validation(root: Path, layout: Layout) -> Layout:
    """Drop the validation split if it does not exist or has no masks."""
    has_val = layout.val is not None and _has_files(root, layout.val)
    has_lists = layout.lists is not None and all((root / name).is_file() for name in layout.lists)
    return replace(layout, val=layout.val if has_val else None, lists=layout.lists if has_lists else None)


def _require_one(root: Path, fitting: list[Layout]) -> Layout | None:
    if len(fitting) > 1:
        first, second = fitting[:2]
        images, masks = first.train.shorten()
        raise DataError(
            f"{root} fits two layouts: {_describe_layout(first)}, and {_describe_layout(second)}",
            why="halfstep cannot tell which masks to use",
            fix=f"name them: data.images={images} data.masks={masks}",
        )
    return fitting[0] if fitting else None


def _describe_layout(layout: Layout) -> str:
    return f"{layout.name} ({layout.train})" if layout.name else str(layout.train)


def _has_files(root: Path, names: PairNames) -> bool:
    return all(any(True for _ in NamePattern(text).iterate(root)) for text in (names.images, names.masks[0]))


def has_folders(root: Path, names: PairNames) -> bool:
    """True if both folders of a split exist, whatever they hold."""
    return all((root / NamePattern(text).base).is_dir() for text in (names.images, names.masks[0]))


def _list_levels(root: Path) -> Iterator[list[Path]]:
    folders = [root]
    for _ in range(DEPTH + 1):
        if len(folders) > MANY_FOLDERS:  # class folders, or a home folder: not an archive's
            return
        yield folders
        folders = [path for folder in folders for path in list_folders(folder)]


def _make_not_found_error(root: Path, asked: PairLayout) -> DataError:
    images, masks = (name if ID in name else f"{name}/" for name in (asked.images or "imgs", asked.masks or "masks"))
    return DataError(
        f"no {images} and {masks} in {root}",
        why=f"it contains {describe_content(root)}",
        fix="imgs/<id>.png with masks/<id>_mask.png, or name the folders: data.images and data.masks",
    )
