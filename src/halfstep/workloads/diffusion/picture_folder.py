"""Folders of pictures for models that make pictures: any files below a folder, with captions or classes where asked.

DIR/**/*.png                               divided by a seed
DIR/train/**/*  DIR/val/**/*               divided already
DIR/metadata.jsonl, DIR/train/...          captions: {"file_name": ..., "text": ...}
DIR/<class>/*, DIR/train/<class>/*         classes (image_folder)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from halfstep.data.files import PICTURES, list_pictures, list_some, natural_key, require_folder, split_off
from halfstep.data.image_folder import FolderLayout, ImageFolder, Listing, find_images, find_split_folders
from halfstep.data.metadata_file import CLASS_COLUMNS, read_captions
from halfstep.errors import DataError, format_count

FEWEST = 2
"""Pictures: one to learn from, one to see whether anything was learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionedFolder:
    """Pictures and what is said of them."""

    images: ImageFolder
    captions: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def find_pictures(root: Path, layout: FolderLayout) -> CaptionedFolder:
    """Every picture of a data folder, whatever folders they lie in."""
    require_folder(root)
    train_folders, val_folders = find_split_folders(root, layout)
    train, val = (
        [path for folder in folders for path in list_pictures(folder)] for folders in (train_folders, val_folders)
    )
    return CaptionedFolder(images=_divided(root, train, val, layout, divided=bool(val_folders)))


def find_captioned(root: Path, layout: FolderLayout, column: str) -> CaptionedFolder:
    """The pictures that a table has captions for."""
    require_folder(root)
    train_folders, val_folders = find_split_folders(root, layout)
    train, val = (
        {path: text for folder in folders for path, text in read_captions(folder, root, column).items()}
        for folders in (train_folders, val_folders)
    )
    _refuse_few(root, len(train) + len(val), "with a caption", "add captions to the table, a line for each picture")
    in_order = [sorted(found, key=lambda path: natural_key(str(path))) for found in (train, val)]
    images = _divided(root, in_order[0], in_order[1], layout, divided=bool(val_folders))
    bare = sum(len(list_pictures(folder)) for folder in {*train_folders, *val_folders}) - len(train | val)
    notes = (f"left out: {format_count(bare, 'picture')} without a caption",) if bare > 0 else ()
    return CaptionedFolder(images=images, captions=train | val, notes=notes)


def find_classes(root: Path, layout: FolderLayout, class_file: Path | None) -> CaptionedFolder:
    """The pictures of class folders, or of a table of labels; a file may say which class has which number.

    `text` holds captions here: it holds classes only where it is named."""
    images = find_images(root, replace(layout, label_columns=CLASS_COLUMNS))
    if class_file is not None:
        images = _renumbered(images, class_names(class_file), class_file)
    _refuse_few(root, len(images.train) + len(images.val))
    return CaptionedFolder(images=images)


def class_names(path: Path) -> tuple[str, ...]:
    """One class per line, the first of them number 0."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the class file {path}", why=str(error), fix="text, one class per line") from error
    names = tuple(line for line in lines if line)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{path} names {list_some(twice)} twice", why="a class has one number", fix="one line per class"
        )
    return names


def _renumbered(images: ImageFolder, names: Sequence[str], source: Path) -> ImageFolder:
    if set(names) != set(images.classes):
        missing = [name for name in images.classes if name not in names]
        extra = [name for name in names if name not in images.classes]
        parts = [f"it lacks {list_some(missing)}"] if missing else []
        parts += [f"no pictures are of {list_some(extra)}"] if extra else []
        raise DataError(
            f"{source} does not match the classes of {images.root}",
            why="; ".join(parts),
            fix="one line per class folder",
        )
    number = {name: k for k, name in enumerate(names)}
    train, val = (
        replace(listing, labels=tuple(number[images.classes[label]] for label in listing.labels))
        for listing in (images.train, images.val)
    )
    return replace(images, classes=tuple(names), train=train, val=val)


def _divided(root: Path, train: list[Path], val: list[Path], layout: FolderLayout, *, divided: bool) -> ImageFolder:
    _refuse_few(root, len(train) + len(val))
    if divided and not (train and val):
        raise DataError(f"no pictures in the {'validation' if train else 'training'} folder of {root}")
    if not divided and layout.val_fraction > 0:
        train, val = split_off(train, layout.val_fraction, f"{layout.seed} pictures")
    listings = [Listing(paths=tuple(paths), labels=(0,) * len(paths)) for paths in (train, val)]
    source = "its own folder" if divided else f"{layout.val_fraction:.0%} of the pictures"
    return ImageFolder(root=root, classes=("",), train=listings[0], val=listings[1], val_source=source)


def _refuse_few(root: Path, found: int, which: str = "", fix: str = "") -> None:
    if found < FEWEST:
        raise DataError(
            f"{root} holds {format_count(found, 'picture')} {which}".rstrip(),
            why=f"at least {FEWEST} are needed: one to train on, one to validate with",
            fix=fix or "add pictures (" + " ".join(PICTURES) + "), or check --data-dir (data.dir)",
        )
