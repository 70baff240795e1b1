"""Where images and masks lie in common data sets: a table of name patterns, and which row a folder fits.

A known data set is recognised by its files, a plain pair of folders by the folders' names. Where two rows fit, both
are named and nothing is guessed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep.data.files import TRAIN_NAMES, VALIDATION_NAMES, some_of
from halfstep.data.name_patterns import ID, NamePattern
from halfstep.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Patterns of one part's images and masks; of several for the masks, the first that fits an image counts."""

    images: str
    masks: tuple[str, ...]

    def in_short(self) -> tuple[str, str]:
        """Images and masks as a user would write them: plain folders where the names of the files are free."""
        if len(self.masks) == 1:
            return self.images, self.masks[0]
        return NamePattern(self.images).base, NamePattern(self.masks[0]).base

    def __str__(self) -> str:
        return " + ".join(self.in_short())


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to lay out a data set."""

    name: str
    train: Names
    val: Names | None = None
    lists: tuple[str, str] | None = None
    """Text files with the ids to train on and to validate."""
    ignored: int | None = None
    """The mask value of pixels without a label."""
    some_without_masks: bool = False
    """Whether pictures that have no mask are part of the data set."""
    has_background: bool = True
    """Whether the smallest mask value stands for everything that is not a class."""


def _known(name: str, train: tuple[str, str], val: tuple[str, str] | None = None, **more: object) -> Layout:
    names = [Names(images=part[0], masks=(part[1],)) for part in (train, val) if part]
    return Layout(name=name, train=names[0], val=names[1] if val else None, **more)  # type: ignore[arg-type]


CITY_IMAGES = "leftImg8bit/{}/**/{{id}}_leftImg8bit"
CITY_MASKS = "gtFine/{}/**/{{id}}_gtFine_{}"

KNOWN: tuple[Layout, ...] = (
    # training/mask/ is the camera's field of view, no label.
    _known(
        "DRIVE",
        ("training/images/{id}_training", "training/1st_manual/{id}_manual1"),
        ("test/images/{id}_test", "test/1st_manual/{id}_manual1"),
    ),
    _known("DRIVE, one part", ("images/{id}_*", "1st_manual/{id}_manual1")),
    # SegNet's version: 11 classes and, as value 11, everything else.
    _known(
        "CamVid", ("train/{id}", "trainannot/{id}"), ("val/{id}", "valannot/{id}"), ignored=11, has_background=False
    ),
    _known("CamVid", ("train/{id}", "train_labels/{id}_L"), ("val/{id}", "val_labels/{id}_L"), has_background=False),
    _known("CamVid", ("images/{id}", "labels/{id}_P"), has_background=False),
    # Of rows with one name the first that fits counts: the 19 classes for training, where they were made.
    *(
        _known(
            "Cityscapes",
            (CITY_IMAGES.format("train"), CITY_MASKS.format("train", kind)),
            (CITY_IMAGES.format("val"), CITY_MASKS.format("val", kind)),
            ignored=ignored,
            has_background=False,
        )
        for kind, ignored in (("labelTrainIds", 255), ("labelIds", None))
    ),
    _known(
        "Pascal VOC",
        ("JPEGImages/{id}", "SegmentationClass/{id}"),
        lists=("ImageSets/Segmentation/train.txt", "ImageSets/Segmentation/val.txt"),
        ignored=255,
        some_without_masks=True,
    ),
    _known(
        "ADE20K",
        ("images/training/{id}", "annotations/training/{id}"),
        ("images/validation/{id}", "annotations/validation/{id}"),
        ignored=0,
        has_background=False,
    ),
    _known("DSB2018", ("stage1_train/{id}/images/{id}", "stage1_train/{id}/masks/")),
    _known("DSB2018", ("{id}/images/{id}", "{id}/masks/")),
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
"""How far below data.dir a data set may start (VOCdevkit/VOC2012), and among how many folders it is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLayout:
    """What the user says about names; an empty string means what is common.

    Folders may be patterns with `{id}` (see name_patterns), which then say all about the names of their files.
    """

    images: str = ""
    masks: str = ""
    image_suffix: str = ""
    mask_suffix: str = "_mask"
    """Stands between id and ending in a mask's name; masks named as their image are found as well."""
    val_images: str = ""
    val_masks: str = ""
    image_ext: str = ""
    """Which ending counts where one id has several files; empty: any, and several are an error."""
    mask_ext: str = ""

    @property
    def is_common(self) -> bool:
        """Whether known data sets are looked for: nothing was said about images, masks or their names."""
        return not (self.images or self.masks or self.val_images or self.image_suffix)

    def names(self, images: str, masks: str) -> Names:
        """Folders, or patterns as they are, with the names of their files."""
        inner = (ID + self.mask_suffix, ID) if self.mask_suffix else (ID,)
        return Names(
            images=images if ID in images else f"{images}/{ID}{self.image_suffix}",
            masks=(masks,) if ID in masks else tuple(f"{masks}/{name}" for name in inner),
        )


def find_layout(root: Path, asked: PairLayout) -> tuple[Path, Layout]:
    """The layout of a folder and where it starts: there, or in the only folder that an archive made in it."""
    for folders in _levels(root):
        fitting = [(folder, layout) for folder in folders if (layout := _layout_at(folder, asked)) is not None]
        if len(folders) > 1 and fitting:
            places = [folder for folder, _ in fitting]
            raise DataError(
                f"{root} holds {len(folders)} folders, among them the data of {some_of(places)}",
                why="which of them is meant is not for halfstep to guess",
                fix=f"name it: data.dir={shlex.quote(str(places[0]))}",
            )
        if fitting:
            return fitting[0]
    raise _nothing_found(root, asked)


def pair_folders(root: Path) -> str:
    """The folders of a data set of images and masks, where `root` is one or holds nothing else: their files share ids.
    Empty where not."""
    for folders in _levels(root):
        if len(folders) == 1 and (found := _pair_folders_at(folders[0])):
            return found
    return ""


def _pair_folders_at(root: Path) -> str:
    try:
        layout = _layout_at(root, PairLayout())
    except DataError as error:  # fits two
        return error.what.partition(": ")[2]
    if layout is None:
        return ""
    images, *masks = (
        {name for name, _ in NamePattern(text).each(root)} for text in (layout.train.images, *layout.train.masks)
    )
    return _text(layout) if any(images & found for found in masks) else ""


def _layout_at(root: Path, asked: PairLayout) -> Layout | None:
    if asked.is_common:
        known: dict[str, Layout] = {}
        for layout in KNOWN:
            if layout.name not in known and _holds_files(root, layout.train):
                known[layout.name] = layout
        if found := _only(root, list(known.values())):
            return _with_its_validation(root, found)
    for group in _usual(root, asked):
        if found := _only(root, [layout for layout in group if holds_folders(root, layout.train)]):
            return found
    return None


def _usual(root: Path, asked: PairLayout) -> Iterator[list[Layout]]:
    """Pairs of folders, in the order in which a group of them counts: with a validation part first."""
    pairs = [(asked.images or images, asked.masks or masks) for images, masks in FOLDER_NAMES]
    pairs = list(dict.fromkeys(pairs))
    own = asked.names(asked.val_images, asked.val_masks) if asked.val_images else None
    divided = [
        Layout(name="", train=asked.names(*train), val=asked.names(*val))
        for images, masks in pairs
        for part in TRAIN_NAMES
        for train, val in _divided(root, images, masks, part)
        if own is None
    ]
    yield divided
    yield [Layout(name="", train=asked.names(images, masks), val=own) for images, masks in pairs]
    for part in TRAIN_NAMES:
        for inside in _places(*pairs[0]):
            both = [_in_part(images, masks, part, inside=inside) for images, masks in pairs]
            yield [Layout(name="", train=asked.names(*names), val=own) for names in both]


def _divided(root: Path, images: str, masks: str, part: str) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """`train/images` beside `val/images`, and `images/train` beside `images/val`: the first validation part counts."""
    for inside in _places(images, masks):
        for other in VALIDATION_NAMES:
            val = _in_part(images, masks, other, inside=inside)
            if all((root / NamePattern(f"{name}/").base).is_dir() for name in val):
                yield _in_part(images, masks, part, inside=inside), val
                break


def _in_part(images: str, masks: str, part: str, *, inside: bool) -> tuple[str, str]:
    if inside:
        return f"{part}/{images}", f"{part}/{masks}"
    return f"{images}/{part}", f"{masks}/{part}"


def _places(images: str, masks: str) -> tuple[bool, ...]:
    """Whether folders may lie inside a part (`train/images`), and a part in them (`images/train`): no pattern's can."""
    return (True,) if ID in images + masks else (True, False)


def _with_its_validation(root: Path, layout: Layout) -> Layout:
    """Without its validation part where that is not there, or comes without masks."""
    has_val = layout.val is not None and _holds_files(root, layout.val)
    has_lists = layout.lists is not None and all((root / name).is_file() for name in layout.lists)
    return replace(layout, val=layout.val if has_val else None, lists=layout.lists if has_lists else None)


def _only(root: Path, fitting: list[Layout]) -> Layout | None:
    if len(fitting) > 1:
        first, second = fitting[:2]
        images, masks = first.train.in_short()
        raise DataError(
            f"{root} fits two layouts: {_text(first)}, and {_text(second)}",
            why="which masks are meant is not for halfstep to guess",
            fix=f"name them: data.images={images} data.masks={masks}",
        )
    return fitting[0] if fitting else None


def _text(layout: Layout) -> str:
    return f"{layout.name} ({layout.train})" if layout.name else str(layout.train)


def _holds_files(root: Path, names: Names) -> bool:
    return all(any(True for _ in NamePattern(text).each(root)) for text in (names.images, names.masks[0]))


def holds_folders(root: Path, names: Names) -> bool:
    """Whether the folders of one part are there, whatever they hold."""
    return all((root / NamePattern(text).base).is_dir() for text in (names.images, names.masks[0]))


def _levels(root: Path) -> Iterator[list[Path]]:
    folders = [root]
    for _ in range(DEPTH + 1):
        if len(folders) > MANY_FOLDERS:  # class folders, or somebody's home: no archive's
            return
        yield folders
        folders = [path for folder in folders for path in sorted(folder.iterdir()) if _is_visible_folder(path)]


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith((".", "__"))


def _nothing_found(root: Path, asked: PairLayout) -> DataError:
    images, masks = (name if ID in name else f"{name}/" for name in (asked.images or "imgs", asked.masks or "masks"))
    return DataError(
        f"no {images} and {masks} in {root}",
        why=f"it holds {some_of(sorted(p.name for p in root.iterdir())) or 'nothing'}",
        fix="imgs/<id>.png with masks/<id>_mask.png, or name the folders: data.images and data.masks",
    )
