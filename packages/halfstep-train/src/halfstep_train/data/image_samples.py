"""Training and evaluation samples of images with labels, from files or from one array, and their crops.

A crop box is a pure function of (seed, epoch, index), computed for a whole batch at once: its random numbers are a
hash of the key (splitmix64, Steele et al. 2014), not a generator's stream. So a folder and its packed cache get the
same crops.

*Stored images* (a packed cache, CIFAR) are one array, and a batch is one gather instead of one call per sample.
Training images are stored whole, stretched to a square, with their true sizes: crops are drawn in the true shape and
mapped to the square, so they match the files' crops; the price is a coarser long side. Validation images are stored
as their centre square, unstretched: cropping that equals resize and centre crop.

*Files* are decoded and cropped in the loader's workers, as bytes. A training crop at most 1.5 times as large as the
model's images is passed on as it is, in the corner of a fixed canvas, and the device resizes it: Pillow's resize costs
as much as decoding. A longer side is shrunk here, with antialiasing, after a reduced decode where the file allows one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import DataError, make_printable
from halfstep_train.data.cache_file import CacheFile, CacheWriter, fingerprint_files, open_or_write
from halfstep_train.data.files import Array, BadFiles, OnBadFile, return_errors
from halfstep_train.data.image_folder import ImageFolder, Listing, refuse_lost_classes
from halfstep_train.data.images import ImageFile, open_image_file
from halfstep_train.data.loader import make_shared_bytes, read_ahead

ATTEMPTS = 10
"""Boxes tried before falling back to the largest box of an allowed ratio (for panoramas), as torchvision does."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


CROP_AREA, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Ranges of a random crop's share of the image and of its width over its height, which is drawn uniformly in its
logarithm: the values of Szegedy et al. 2015, used for ImageNet since."""


def draw_boxes(sizes: Array, area: tuple[float, float], *, seed: int, epoch: int, indices: Array) -> Array:
    """Draw boxes (N, 4) as left, top, right, bottom in whole pixels, inside images of sizes (N, 2) as width, height."""
    # Columns: ATTEMPTS areas, ATTEMPTS ratios, then x and y of the box. All attempts are computed at once; each image
    # takes its first box that fits.
    draws = draw_uniform(seed, epoch, indices, count=2 * ATTEMPTS + 2)
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    side = np.sqrt(_scale_to(draws[:, :ATTEMPTS], *area) * (width * height)[:, None])
    # With s = sqrt(ratio), a box of width side * s and height side / s has the drawn area and ratio.
    low, high = (math.log(bound) / 2 for bound in CROP_RATIO)
    stretch = np.exp(_scale_to(draws[:, ATTEMPTS:-2], low, high))
    wide, tall = np.maximum(np.rint(side * stretch), 1), np.maximum(np.rint(side / stretch), 1)
    fits = (wide <= width[:, None]) & (tall <= height[:, None])
    rows, first = np.arange(len(sizes)), fits.argmax(axis=1)
    wide, tall, has_fit = wide[rows, first], tall[rows, first], fits[rows, first]
    if not has_fit.all():
        # No attempt fits, as in a panorama: the largest box whose ratio is the nearest allowed one.
        wide = np.where(has_fit, wide, np.minimum(width, np.rint(height * CROP_RATIO[1])))
        tall = np.where(has_fit, tall, np.minimum(height, np.rint(width / CROP_RATIO[0])))
    boxes = np.empty((len(sizes), 4), dtype=np.float32)
    # floor(u * (n + 1)) draws the integers 0 to n with equal probability.
    boxes[:, 0] = np.floor(draws[:, -2] * (width - wide + 1))
    boxes[:, 1] = np.floor(draws[:, -1] * (height - tall + 1))
    boxes[:, 2], boxes[:, 3] = boxes[:, 0] + wide, boxes[:, 1] + tall
    return boxes


def make_centre_boxes(sizes: Array, share: float) -> Array:
    """Return centred squares (N, 4) with `share` of the shorter side: resize and centre crop in one box."""
    half = share * sizes.min(axis=1, keepdims=True) / 2
    middle = sizes / 2
    return np.concatenate([middle - half, middle + half], axis=1).astype(np.float32)


def draw_uniform(seed: int, epoch: int, indices: Array, *, count: int) -> Array:
    """Draw numbers (N, count) in [0, 1), each row a function of (seed, epoch, index) alone."""
    # An array of one: numpy's scalars warn on overflow, which is intended here; arrays wrap around silently.
    key = _mix(_mix(np.array([seed], dtype=np.uint64) + GOLDEN) ^ np.uint64(epoch))
    rows = _mix(key ^ np.asarray(indices).astype(np.uint64))
    steps = np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    bits: Array = _mix(rows[:, None] + steps) >> np.uint64(11)  # 53 bits, a float64's whole mantissa
    return bits * 2.0**-53


def _mix(bits: Array) -> Array:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _scale_to(draws: Array, low: float, high: float) -> Array:
    return low + draws * (high - low)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImages:
    """Decoded images of one size."""

    pixels: Tensor
    """(N, S, S, 3) bytes; may be a mapped file."""
    sizes: Array
    """(N, 2): width and height of the original images."""
    labels: Tensor
    names: tuple[str, ...] = ()
    """The files they were made from, if any."""

    def __len__(self) -> int:
        return len(self.pixels)


class _StoredSamples:
    """Samples of stored images by index; subclasses make whole batches."""

    images: StoredImages

    def __len__(self) -> int:
        return len(self.images)

    def name_of(self, index: int) -> str:
        return make_printable(self.images.names[index]) if self.images.names else ""

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return take_first(self.make_batch(torch.tensor([index]), seed=key[0], epoch=key[1]))

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        raise NotImplementedError


class TrainingImages(_StoredSamples):
    """Whole stored images with the `box` drawn from (seed, epoch, index): `image` (S, S, 3) bytes, `box`, `label`."""

    def __init__(self, images: StoredImages, *, crop_area: tuple[float, float] = CROP_AREA) -> None:
        self.images, self.crop_area, self.labels = images, crop_area, images.labels

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        sizes, side = self.images.sizes[indices.numpy()], self.images.pixels.shape[1]
        boxes = torch.from_numpy(draw_boxes(sizes, self.crop_area, seed=seed, epoch=epoch, indices=indices.numpy()))
        # Boxes are drawn in the original pixels; the stored image was stretched to a square of `side` pixels.
        stretch = side / torch.from_numpy(sizes).float()
        image, labels = gather_images(self.images.pixels, indices), self.images.labels[indices]
        return {"image": image, "box": boxes * stretch.tile(1, 2), "label": labels}


class EvaluationImages(_StoredSamples):
    """The centre of stored squares, `share` of a side; with a `box` unless it has exactly `size` pixels."""

    def __init__(self, images: StoredImages, *, size: int, share: float = 0.875) -> None:
        self.images, side = images, images.pixels.shape[1]
        margin = side * (1 - share) / 2
        self._margin = int(margin)
        is_exact = margin == self._margin and side - 2 * self._margin == size
        self._box = None if is_exact else torch.tensor([[margin, margin, side - margin, side - margin]])

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        pixels, labels = self.images.pixels, self.images.labels[indices]
        if self._box is not None:
            return {"image": gather_images(pixels, indices), "box": self._box.repeat(len(indices), 1), "label": labels}
        inner = slice(self._margin, pixels.shape[1] - self._margin)
        return {"image": gather_images(pixels[:, inner, inner], indices), "label": labels}


def gather_images(pixels: Tensor, indices: Tensor) -> Tensor:
    """Gather images by index, straight into pinned memory if CUDA is in use: pinning later would copy them again."""
    room = torch.empty(len(indices), *pixels.shape[1:], dtype=pixels.dtype, pin_memory=torch.cuda.is_initialized())
    return torch.index_select(pixels, 0, indices, out=room)


def take_first(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the only sample of a batch of one."""
    return {name: tensor[0] for name, tensor in batch.items()}


PIXELS_PER_READING = 1.5
"""Largest number of stored pixels per bilinear reading; from 2 on, pixels would be skipped."""
REDUCING_GAP = 2.0
"""Pillow shrinks by whole factors first while this many times the wanted pixels are left (its documented safe value).
"""

OPEN_AT_ONCE = 16
"""Files opened together to draw their crops at once; far below any limit on open files."""


class _FileSamples:
    listing: Listing

    def __len__(self) -> int:
        return len(self.listing)

    def name_of(self, index: int) -> str:
        path = self.listing.paths[index]
        return make_printable(f"{path.parent.name}/{path.name}")

    def files(self) -> tuple[Path, ...]:
        return self.listing.paths


class TrainingFiles(_FileSamples):
    """Random crops: `image` (canvas, canvas, 3) bytes, `box` with the valid area, `label`."""

    def __init__(self, listing: Listing, *, size: int, crop_area: tuple[float, float] = CROP_AREA) -> None:
        self.listing, self.size, self.crop_area = listing, size, crop_area
        self.labels = torch.tensor(listing.labels, dtype=torch.int64)
        self.canvas = int(size * PIXELS_PER_READING)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """Return the crop of image `index` drawn from (seed, epoch, index)."""
        return take_first(self.fill_batch([index], seed=key[0], epoch=key[1]))

    def fill_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, Tensor]:
        """Return many samples at once, each equal to `sample`."""
        image = make_shared_bytes(len(indices), self.canvas, self.canvas, 3)
        boxes = np.empty((len(indices), 4), dtype=np.float32)
        for start in range(0, len(indices), OPEN_AT_ONCE):
            some = slice(start, start + OPEN_AT_ONCE)
            self._fill(image.numpy()[some], boxes[some], indices[some], seed=seed, epoch=epoch)
        return {"image": image, "box": torch.from_numpy(boxes), "label": self.labels[list(indices)]}

    def _fill(self, canvases: Array, boxes: Array, indices: Sequence[int], *, seed: int, epoch: int) -> None:
        with ExitStack() as opened:
            files = [opened.enter_context(open_image_file(self.listing.paths[index])) for index in indices]
            sizes = np.array([file.size for file in files])
            drawn = draw_boxes(sizes, self.crop_area, seed=seed, epoch=epoch, indices=np.array(indices))
            for row, file in enumerate(files):
                boxes[row] = self._crop(file, drawn[row], canvases[row])
                file.close()  # its pixels may be many

    def _crop(self, file: ImageFile, box: Array, canvas: Array) -> tuple[float, float, float, float]:
        """Copy a crop into the corner of a canvas and return its exact box there, in fractions of pixels."""
        image, (left, top, right, bottom) = decode_for_crop(file, box, self.size)
        # Whole pixels around the box; the returned box keeps the fractions for the resize on the device.
        x, y = math.floor(left), math.floor(top)
        part = image.crop((x, y, min(math.ceil(right), image.width), min(math.ceil(bottom), image.height)))
        wide, tall = (self.size if side > self.canvas else side for side in part.size)
        scale_x, scale_y = wide / part.width, tall / part.height
        if part.size != (wide, tall):
            # Only the sides that are too long: Pillow skips the pass over the other one.
            part = part.resize((wide, tall), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)
        canvas[:tall, :wide] = np.asarray(part)
        return (left - x) * scale_x, (top - y) * scale_y, (right - x) * scale_x, (bottom - y) * scale_y


class EvaluationFiles(_FileSamples):
    """Centre crops: `image` (size, size, 3) bytes, `label`; share 0.875 is resize to 256, then centre crop of 224."""

    def __init__(self, listing: Listing, *, size: int, share: float = 0.875) -> None:
        self.listing, self.size, self.share = listing, size, share

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """Return the centre of image `index`; nothing is random."""
        with open_image_file(self.listing.paths[index]) as file:
            pixels = crop_centre(file, self.size, self.share)
        return {"image": torch.from_numpy(pixels), "label": torch.tensor(self.listing.labels[index])}


def crop_centre(file: ImageFile, size: int, share: float) -> Array:
    """Return the centre square of an image at (size, size), antialiased; its side is `share` of the shorter side."""
    (box,) = make_centre_boxes(np.array([file.size]), share)
    image, box = decode_for_crop(file, box, size)
    left, top, right, bottom = (float(edge) for edge in box)
    inside = (max(left, 0), max(top, 0), min(right, image.width), min(bottom, image.height))
    return np.array(image.resize((size, size), Image.Resampling.BILINEAR, box=inside, reducing_gap=REDUCING_GAP))


def decode_for_crop(file: ImageFile, box: Array, size: int) -> tuple[Image.Image, Array]:
    """Decode at the smallest scale at which the box still has `size` pixels per side; return image and scaled box."""
    sides = box[2:] - box[:2]
    image = file.to_rgb(reduction=float(sides.min()) / size)
    if image.size == file.size:
        return image, box
    scale = np.array(image.size * 2, dtype=np.float32) / np.array(file.size * 2, dtype=np.float32)
    return image, box * scale


# --- the packed cache ---
#
# Packing uses threads, not processes: Pillow decodes and resizes without the interpreter's lock, so nothing is sent
# between processes.


PACKED = "packed cache"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """An opened cache."""

    classes: tuple[str, ...]
    titles: dict[str, str]
    train: StoredImages
    val: StoredImages
    left_out: tuple[str, ...]
    """Why each bad file is missing."""


def _map_images(file: CacheFile) -> Pack:
    index = file.index
    names, size, num_train = tuple(index["names"]), index["size"], index["num_train"]
    pixels = torch.from_numpy(file.map(np.uint8, (len(names), size, size, 3)))
    sizes, labels = np.array(index["sizes"]), torch.tensor(index["labels"])
    train, val = (
        StoredImages(pixels=pixels[part], sizes=sizes[part], labels=labels[part], names=names[part])
        for part in (slice(num_train), slice(num_train, None))
    )
    return Pack(
        classes=tuple(index["classes"]),
        titles=index["titles"],
        train=train,
        val=val,
        left_out=tuple(index["left_out"]),
    )


DEFAULT_SIZE = 256
"""Pixels per side: the 256 to which ImageNet's evaluation resizes; enough for most training at 224."""
OnProgress = Callable[[int, int], None]
"""Called with the number of images done and their total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSettings:
    """What is stored, and within which limits."""

    size: int = DEFAULT_SIZE
    on_bad_file: OnBadFile = "error"
    workers: int = 0
    """Decoding threads; 0: one per core."""


def choose_pack_path(root: Path, size: int) -> Path:
    """Return the default path: inside the folder, one file per size."""
    return root / f".halfstep-{size}.pack"


def open_or_pack(
    folder: ImageFolder,
    path: Path,
    settings: PackSettings,
    *,
    progress: OnProgress | None = None,
) -> Pack:
    """Open the cache at `path` if it is intact and fits the folder; otherwise pack the folder."""
    file, _ = open_or_write(
        path,
        PACKED,
        fingerprint_folder(folder, settings),
        lambda writer: _pack(folder, settings, writer, progress),
    )
    return _map_images(file)


def _pack(folder: ImageFolder, settings: PackSettings, file: CacheWriter, progress: OnProgress | None) -> None:
    """Decode the whole folder: row i is the i-th image that can be read, training images first."""
    paths, labels = folder.train.paths + folder.val.paths, folder.train.labels + folder.val.labels
    bad_files = BadFiles(settings.on_bad_file)
    rows: list[tuple[int, tuple[int, int]]] = []

    def decode(number: int) -> tuple[Array, tuple[int, int]]:
        return _decode(paths[number], settings.size, is_whole=number < len(folder.train))

    workers = settings.workers or os.cpu_count() or 1
    for number, outcome in enumerate(read_ahead(return_errors(decode), range(len(paths)), num_threads=workers)):
        if isinstance(outcome, DataError):
            bad_files.report(outcome)
        else:
            file.write(outcome[0].tobytes())
            rows.append((number, outcome[1]))
        if progress is not None:
            progress(number + 1, len(paths))
    num_train = sum(number < len(folder.train) for number, _ in rows)
    file.index = {
        "size": settings.size,
        "num_train": num_train,
        "classes": folder.classes,
        "titles": dict(folder.titles),
        "names": [paths[number].relative_to(folder.root).as_posix() for number, _ in rows],
        "labels": [labels[number] for number, _ in rows],
        "sizes": [size for _, size in rows],
        "left_out": [f"{error.what}: {error.why}" for error in bad_files.skipped],
    }
    refuse_lost_classes(folder.classes, file.index["labels"][:num_train], why="all of them were left out")
    bad_files.refuse_empty_split("validation", len(folder.val), len(rows) - num_train)


def fingerprint_folder(folder: ImageFolder, settings: PackSettings) -> str:
    """Hash the folder's files and the settings that change what is stored."""
    stored: dict[str, object] = {"size": settings.size, "on_bad_file": settings.on_bad_file, "classes": folder.classes}
    if folder.has_table:  # else the folders' names are the labels
        stored["labels"] = (folder.train.labels, folder.val.labels)
    return fingerprint_files(folder.root, (folder.train.paths, folder.val.paths), stored)


def _decode(path: Path, size: int, *, is_whole: bool) -> tuple[Array, tuple[int, int]]:
    """Return an image as (size, size, 3), stretched if it is whole, else its centre square; and its original size."""
    with open_image_file(path) as file:
        if not is_whole:
            return crop_centre(file, size, 1.0), file.size
        image = file.to_rgb(reduction=min(file.size) / size)
        return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=REDUCING_GAP)), file.size
