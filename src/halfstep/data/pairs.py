"""Image and mask pairs on disk: `imgs/<id>.<ext>` + `masks/<id>_mask.<ext>`, and the other common folder names.

DIR may hold such a pair of folders, or `train/` and `val/` that each hold one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfstep.data.files import BadFiles, natural_key, readable_files, some_of
from halfstep.errors import DataError, nearest

FOLDER_NAMES = (
    ("imgs", "masks"),
    ("images", "masks"),
    ("image", "mask"),
    ("image", "label"),
    ("images", "labels"),
    ("img", "mask"),
)
VALIDATION_NAMES = ("val", "valid", "validation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One image and its mask."""

    id: str
    image: Path
    mask: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLayout:
    """How the folders and masks are called; an empty folder name means any of the common ones."""

    images: str = ""
    masks: str = ""
    mask_suffix: str = "_mask"
    """Stands between id and ending in a mask's name; masks named as their image are found as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How pairs are divided where the folder does not say it: by two lists of ids, else by a fraction."""

    val_fraction: float = 0.1
    seed: int = 0
    train_list: Path | None = None
    val_list: Path | None = None


def find_split(
    root: Path, *, layout: PairLayout, split: Split, bad_files: BadFiles
) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """The training and validation pairs of a data folder."""
    _check_folder(root)
    validation = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    if (root / "train").is_dir() and validation is not None:
        train, val = (find_pairs(part, layout=layout, bad_files=bad_files) for part in (root / "train", validation))
        return train, val
    if (root / "train").is_dir() and _folders(root, layout) is None:
        root = root / "train"
    return split_pairs(find_pairs(root, layout=layout, bad_files=bad_files), split)


def find_pairs(root: Path, *, layout: PairLayout, bad_files: BadFiles) -> tuple[Pair, ...]:
    """Every pair under `root` in natural order; a file without its partner is a bad file."""
    _check_folder(root)
    folders = _folders(root, layout)
    if folders is None:
        wanted = f"{layout.images or 'imgs'}/ and {layout.masks or 'masks'}/"
        raise DataError(
            f"no {wanted} in {root}",
            why=f"it holds {some_of(sorted(p.name for p in root.iterdir())) or 'nothing'}",
            fix="imgs/<id>.png with masks/<id>_mask.png, or name the folders: data.images and data.masks",
        )
    images, masks = (_by_id(folder) for folder in folders)
    pairs, used = [], set()
    for name, image in images.items():
        stem = next((s for s in (name + layout.mask_suffix, name) if s in masks), None)
        if stem is None:
            bad_files.report(_lonely(image, f"{folders[1]}/{name}{layout.mask_suffix}.* or {name}.*"))
            continue
        used.add(stem)
        pairs.append(Pair(id=name, image=image, mask=masks[stem]))
    for stem in masks.keys() - used:
        bad_files.report(_lonely(masks[stem], f"{folders[0]}/{stem.removesuffix(layout.mask_suffix)}.*"))
    if not pairs:
        raise DataError(f"no image in {root} has a mask", fix="check the names and data.mask_suffix")
    return tuple(pairs)


def split_pairs(pairs: Sequence[Pair], split: Split) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    """Divide by the lists where given, else by the fraction: the same pairs and seed give the same split."""
    if split.train_list or split.val_list:
        return _split_by_lists(pairs, split)
    if split.val_fraction <= 0:
        return tuple(pairs), ()
    if len(pairs) < 2:
        raise DataError(
            f"only one image ({pairs[0].image}): nothing is left for validation",
            why="an image that was trained on proves nothing",
            fix="add images, or train without validation: data.val_fraction=0",
        )
    num_val = min(len(pairs) - 1, max(1, round(len(pairs) * split.val_fraction)))
    chosen = set(random.Random(split.seed).sample(range(len(pairs)), num_val))
    train = tuple(pair for i, pair in enumerate(pairs) if i not in chosen)
    return train, tuple(pair for i, pair in enumerate(pairs) if i in chosen)


def _split_by_lists(pairs: Sequence[Pair], split: Split) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
    val = _listed(pairs, split.val_list)
    train = _listed(pairs, split.train_list)
    if split.val_list is None:
        val = tuple(pair for pair in pairs if pair not in train)
    if split.train_list is None:
        train = tuple(pair for pair in pairs if pair not in val)
    both = sorted({pair.id for pair in train} & {pair.id for pair in val}, key=natural_key)
    if both:
        raise DataError(f"in both lists: {some_of(both)}", why="an image that was trained on proves nothing")
    if not train:
        raise DataError("the lists leave no image to train on", fix="check data.train_list and data.val_list")
    return train, val


def _listed(pairs: Sequence[Pair], path: Path | None) -> tuple[Pair, ...]:
    if path is None:
        return ()
    if not path.is_file():
        raise DataError(f"no list of ids at {path}", fix="a text file with one id a line")
    by_name = {pair.id: pair for pair in pairs} | {pair.image.name: pair for pair in pairs}
    lines = [line.strip() for line in path.read_text().splitlines()]
    wanted = dict.fromkeys(line for line in lines if line and not line.startswith("#"))
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise DataError(f"{path} lists {some_of(unknown)}, which no pair is called", fix=nearest(unknown[0], by_name))
    return tuple(dict.fromkeys(by_name[name] for name in wanted))


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        kind = "is a file" if root.exists() else "does not exist"
        raise DataError(f"data folder {root} {kind}", fix="check data.dir; without it the demo data are used")


def _folders(root: Path, layout: PairLayout) -> tuple[Path, Path] | None:
    for images, masks in FOLDER_NAMES:
        folders = root / (layout.images or images), root / (layout.masks or masks)
        if all(folder.is_dir() for folder in folders):
            return folders
    return None


def _by_id(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in readable_files(folder):
        if path.stem in found:
            raise DataError(f"{found[path.stem]} and {path.name} have the same id", fix="keep one file an id")
        found[path.stem] = path
    return found


def _lonely(path: Path, wanted: str) -> DataError:
    return DataError(
        f"{path} has no partner",
        why=f"there is no {wanted}",
        fix="add it, correct data.mask_suffix, or leave such files out: data.on_bad_file=skip",
    )
