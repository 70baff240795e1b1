"""The data of a model that makes pictures: square pictures, with class numbers or the tokens of captions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfstep.data import noise
from halfstep.data.files import BadFiles
from halfstep.data.image_folder import FolderLayout, Listing, check_images
from halfstep.data.image_samples import EvaluationFiles
from halfstep.errors import DataError
from halfstep.workloads.base.workload import Batch
from halfstep.workloads.diffusion.config import Conditioning, DiffusionDataConfig, PictureDataConfig
from halfstep.workloads.diffusion.picture_folder import CaptionedFolder, find_captioned, find_classes, find_pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureData:
    """Files of both splits, and what is known of them."""

    root: Path
    train: Listing
    val: Listing
    classes: tuple[str, ...] = ()
    captions: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Of training and of validation pictures."""
    notes: tuple[str, ...] = ()
    about: tuple[tuple[str, str], ...] = ()

    @property
    def val_names(self) -> tuple[str, ...]:
        return tuple(path.relative_to(self.root).as_posix() for path in self.val.paths)


def open_pictures(config: PictureDataConfig, conditioning: Conditioning = "none") -> PictureData:
    """What lies in the data folder; every file is looked at first."""
    if config.dir is None:
        raise DataError("no data folder", fix="--data-dir DIR")
    bad_files = BadFiles(config.on_bad_file)
    found = _found(config, conditioning)
    images = check_images(found.images, bad_files=bad_files)
    captions = tuple(tuple(found.captions.get(path, "") for path in part.paths) for part in (images.train, images.val))
    return PictureData(
        root=images.root,
        train=images.train,
        val=images.val,
        classes=images.classes if conditioning == "class" else (),
        captions=(captions[0], captions[1]),
        notes=(*found.notes, *bad_files.notes),
        about=(("validation", images.val_source),),
    )


def _found(config: PictureDataConfig, conditioning: Conditioning) -> CaptionedFolder:
    root = Path(config.dir or "")
    layout = FolderLayout(
        train=config.train_folder,
        val=config.val_folder,
        val_fraction=config.val_fraction,
        seed=config.split_seed,
        label_column=getattr(config, "label_column", ""),
    )
    if conditioning == "none":
        return find_pictures(root, layout)
    assert isinstance(config, DiffusionDataConfig)
    if conditioning == "class":
        return find_classes(root, layout, Path(config.class_file) if config.class_file else None)
    return find_captioned(root, layout, config.text_column)


def square_pictures(listing: Listing, size: int) -> EvaluationFiles:
    """The largest centred square of each picture: `image` (size, size, 3) bytes, and `label`."""
    return EvaluationFiles(listing, size=size, share=1.0)


def unit_images(batch: Batch, *, key: tuple[int, ...], flip: float) -> Tensor:
    """Images (N, 3, H, W) in -1..1 from bytes (N, H, W, 3), or floats that are so already; mirrored by the key."""
    image = batch["image"]
    image = image.permute(0, 3, 1, 2).float() / 127.5 - 1 if image.dtype == torch.uint8 else image
    if not flip:
        return image
    is_mirrored = noise.uniform(key, len(image), (1, 1, 1), image.device, stream="flip") < flip
    return torch.where(is_mirrored, image.flip(-1), image)


def to_bytes(image: Tensor) -> Tensor:
    """uint8 (N, H, W, 3) on the CPU, of images in -1..1."""
    pixels = ((image.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().cpu()
