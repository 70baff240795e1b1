"""Data of image generators: square images, with class numbers or captions for conditional models.

DIR/**/*.png                              split at random, by a seed
DIR/train/**/*  DIR/val/**/*              already split
DIR/metadata.jsonl, DIR/train/...         captions: {"file_name": ..., "text": ...}
DIR/<class>/*, DIR/train/<class>/*        classes (data/image_folder.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from halfstep.errors import DataError, format_count
from halfstep_train.config.section import fill_from_settings
from halfstep_train.data import noise
from halfstep_train.data.files import (
    IMAGE_ENDINGS,
    BadFiles,
    list_image_files,
    make_natural_key,
    require_folder,
    split_off,
)
from halfstep_train.data.image_folder import (
    FolderLayout,
    ImageFolder,
    Listing,
    check_images,
    find_images,
    find_split_folders,
)
from halfstep_train.data.image_samples import EvaluationFiles
from halfstep_train.data.metadata_file import CLASS_COLUMNS, read_captions
from halfstep_train.workloads.base.workload import Batch
from halfstep_train.workloads.diffusion.config import Conditioning, DiffusionDataConfig, ImageFolderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionData:
    """The image files of both splits, with their classes, captions and notes for the user."""

    root: Path
    train: Listing
    val: Listing
    classes: tuple[str, ...] = ()
    captions: tuple[tuple[str, ...], ...] = ((), ())
    """Captions of training images, and of validation images."""
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()


def open_diffusion_data(config: ImageFolderConfig, conditioning: Conditioning = "none") -> DiffusionData:
    """Find the images of the data folder and check every file."""
    bad_files = BadFiles(config.on_bad_file)
    root = require_folder(config.dir)
    layout = fill_from_settings(FolderLayout, config)
    texts: dict[Path, str] = {}
    notes: tuple[str, ...] = ()
    if conditioning == "text":
        assert isinstance(config, DiffusionDataConfig)
        found, texts, notes = find_captioned_images(root, layout, config.text_column)
    else:
        found = find_classes(root, layout) if conditioning == "class" else find_pictures(root, layout)
    images = check_images(found, bad_files=bad_files)
    return DiffusionData(
        root=images.root,
        train=images.train,
        val=images.val,
        classes=images.classes if conditioning == "class" else (),
        captions=tuple(tuple(texts.get(path, "") for path in part.paths) for part in (images.train, images.val)),
        notes=(*notes, *bad_files.notes),
        about=(("validation", images.val_source),),
    )


def make_square_samples(listing: Listing, size: int) -> EvaluationFiles:
    """Return samples cropped to the largest centred square and resized: `image` (size, size, 3) uint8, and `label`."""
    return EvaluationFiles(listing, size=size, share=1.0)


def scale_images(batch: Batch, *, key: tuple[int, ...], flip: float) -> Tensor:
    """Convert bytes (N, H, W, 3) to images (N, 3, H, W) in -1..1, and flip each with probability `flip`.

    Floating-point images are already scaled.
    """
    image = batch["image"]
    image = image.permute(0, 3, 1, 2).float() / 127.5 - 1 if image.dtype == torch.uint8 else image
    if not flip:
        return image
    is_mirrored = noise.uniform(key, len(image), (1, 1, 1), image.device, stream="flip") < flip
    return torch.where(is_mirrored, image.flip(-1), image)


def to_bytes(image: Tensor) -> Tensor:
    """Convert images in -1..1 to uint8 (N, H, W, 3) on the CPU."""
    pixels = ((image.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().cpu()


# --- finding images, classes and captions ---


FEWEST = 2
"""Smallest number of images: one to train on, one to validate with."""


def find_pictures(root: Path, layout: FolderLayout) -> ImageFolder:
    """Return all images below a data folder, split into training and validation."""
    train_folders, val_folders = find_split_folders(root, layout)
    train, val = (
        [path for folder in folders for path in list_image_files(folder)] for folders in (train_folders, val_folders)
    )
    return _divide(root, train, val, layout, divided=bool(val_folders))


def find_captioned_images(
    root: Path, layout: FolderLayout, column: str
) -> tuple[ImageFolder, dict[Path, str], tuple[str, ...]]:
    """Return the images that have a caption in a metadata table, their captions, and notes for the user."""
    train_folders, val_folders = find_split_folders(root, layout)
    train, val = (
        {path: text for folder in folders for path, text in read_captions(folder, root, column).items()}
        for folders in (train_folders, val_folders)
    )
    _refuse_few(root, len(train) + len(val), "with a caption", "add captions to the table, one line per image")
    in_order = [sorted(found, key=lambda path: make_natural_key(str(path))) for found in (train, val)]
    images = _divide(root, in_order[0], in_order[1], layout, divided=bool(val_folders))
    num_bare = sum(len(list_image_files(folder)) for folder in {*train_folders, *val_folders}) - len(train | val)
    notes = (f"left out: {format_count(num_bare, 'image')} without a caption",) if num_bare > 0 else ()
    return images, train | val, notes


def find_classes(root: Path, layout: FolderLayout) -> ImageFolder:
    """Return the images of class folders or of a label table.

    A column called `text` is not a class column unless the config names it.
    """
    images = find_images(root, replace(layout, label_columns=CLASS_COLUMNS))
    _refuse_few(root, len(images.train) + len(images.val))
    return images


def _divide(root: Path, train: list[Path], val: list[Path], layout: FolderLayout, *, divided: bool) -> ImageFolder:
    """Split the images at random unless the folder is already divided."""
    _refuse_few(root, len(train) + len(val))
    if divided and not (train and val):
        raise DataError(f"no images in the {'validation' if train else 'training'} folder of {root}")
    if not divided and layout.val_fraction > 0:
        train, val = split_off(train, layout.val_fraction, "0 pictures")
    listings = [Listing(paths=tuple(paths), labels=(0,) * len(paths)) for paths in (train, val)]
    source = "a separate folder" if divided else f"{layout.val_fraction:.0%} of the images"
    return ImageFolder(root=root, classes=("",), train=listings[0], val=listings[1], val_source=source)


def _refuse_few(root: Path, found: int, which: str = "", fix: str = "") -> None:
    if found < FEWEST:
        raise DataError(
            f"{root} contains {format_count(found, 'image')} {which}".rstrip(),
            why=f"at least {FEWEST} are needed: one to train on, one to validate with",
            fix=fix or "add images (" + " ".join(IMAGE_ENDINGS) + "), or check --data-dir (data.dir)",
        )
