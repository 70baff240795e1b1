"""Samples straight from picture files: decoded and cropped in the loader's workers, as bytes.

A training crop that is at most 1.5 times as large as the model's images travels as it is, in the corner of a fixed
canvas, and the device resizes it: Pillow's resize costs as much as decoding. A longer side is shrunk here, with
antialiasing, after a reduced decode where the file allows one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep.data.classification_augment import PIXELS_A_READING
from halfstep.data.crops import Array, CropRange, centre_boxes, random_boxes
from halfstep.data.decode import Picture, open_picture
from halfstep.data.image_folder import Listing
from halfstep.data.loader import shared_bytes
from halfstep.data.stored_images import first_of

REDUCING_GAP = 2.0
"""Pillow shrinks by whole factors first while this many times the wanted pixels are left; its documented safe value."""

OPEN_AT_ONCE = 16
"""Pictures whose sizes are read before their crops are drawn together; far below any limit on open files."""


class _Listed:
    listing: Listing

    def __len__(self) -> int:
        return len(self.listing)

    def name_of(self, index: int) -> str:
        return self.listing.name_of(index)

    def files(self) -> tuple[Path, ...]:
        return self.listing.paths


class TrainingFiles(_Listed):
    """Random crops: `image` (canvas, canvas, 3) bytes, `box` the part that counts, `label`."""

    def __init__(self, listing: Listing, *, size: int, crops: CropRange | None = None) -> None:
        self.listing, self.size, self.crops = listing, size, crops or CropRange()
        self._labels = torch.tensor(listing.labels, dtype=torch.int64)
        self.canvas = int(size * PIXELS_A_READING)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """The crop of image `index` that (seed, epoch, index) draws."""
        return first_of(self.filled([index], seed=key[0], epoch=key[1]))

    def filled(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, Tensor]:
        """Many samples at once, each the same as alone."""
        image = shared_bytes(len(indices), self.canvas, self.canvas, 3)
        boxes = np.empty((len(indices), 4), dtype=np.float32)
        for start in range(0, len(indices), OPEN_AT_ONCE):
            some = slice(start, start + OPEN_AT_ONCE)
            self._fill(image.numpy()[some], boxes[some], indices[some], seed=seed, epoch=epoch)
        return {"image": image, "box": torch.from_numpy(boxes), "label": self._labels[list(indices)]}

    def _fill(self, canvases: Array, boxes: Array, indices: Sequence[int], *, seed: int, epoch: int) -> None:
        with ExitStack() as opened:
            pictures = [opened.enter_context(open_picture(self.listing.paths[index])) for index in indices]
            sizes = np.array([picture.size for picture in pictures])
            drawn = random_boxes(sizes, self.crops, seed=seed, epoch=epoch, indices=np.array(indices))
            for row, picture in enumerate(pictures):
                boxes[row] = self._crop(picture, drawn[row], canvases[row])
                picture.close()  # its pixels may be many

    def _crop(self, picture: Picture, box: Array, canvas: Array) -> tuple[float, float, float, float]:
        """Put the part of a picture into the corner of a canvas, and say which pixels of that it is exactly."""
        image, (left, top, right, bottom) = decoded_for(picture, box, self.size)
        x, y = math.floor(left), math.floor(top)
        part = image.crop((x, y, min(math.ceil(right), image.width), min(math.ceil(bottom), image.height)))
        wide, tall = (self.size if side > self.canvas else side for side in part.size)
        scale_x, scale_y = wide / part.width, tall / part.height
        if part.size != (wide, tall):
            # Only the sides that are too long: Pillow skips the pass over the other one.
            part = part.resize((wide, tall), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)
        canvas[:tall, :wide] = np.asarray(part)
        return (left - x) * scale_x, (top - y) * scale_y, (right - x) * scale_x, (bottom - y) * scale_y


class EvaluationFiles(_Listed):
    """Centre crops: `image` (size, size, 3) bytes, `label`; share 0.875 is resize to 256, then centre crop of 224."""

    def __init__(self, listing: Listing, *, size: int, share: float = 0.875) -> None:
        self.listing, self.size, self.share = listing, size, share

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """The centre of image `index`; nothing is random."""
        with open_picture(self.listing.paths[index]) as picture:
            pixels = centre_square(picture, self.size, self.share)
        return {"image": torch.from_numpy(pixels), "label": torch.tensor(self.listing.labels[index])}


def centre_square(picture: Picture, size: int, share: float) -> Array:
    """The middle of a picture at (size, size): a square of `share` of the shorter side."""
    (box,) = centre_boxes(np.array([picture.size]), share)
    image, box = decoded_for(picture, box, size)
    return np.array(shrunk(image, box, size))


def decoded_for(picture: Picture, box: Array, size: int) -> tuple[Image.Image, Array]:
    """The picture at the smallest scale at which the box still has `size` pixels per side, and the box there."""
    sides = box[2:] - box[:2]
    image = picture.rgb(reduction=float(sides.min()) / size)
    if image.size == picture.size:
        return image, box
    scale = np.array(image.size * 2, dtype=np.float32) / np.array(picture.size * 2, dtype=np.float32)
    return image, box * scale


def shrunk(image: Image.Image, box: Array, size: int) -> Image.Image:
    """The box of an image at (size, size), antialiased."""
    left, top, right, bottom = (float(edge) for edge in box)
    inside = (max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height))
    return image.resize((size, size), Image.Resampling.BILINEAR, box=inside, reducing_gap=REDUCING_GAP)
