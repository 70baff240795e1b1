"""Samples from decoded images in one array (a packed cache, CIFAR): a batch is one gather, not one call a sample.

Training images are stored whole, stretched to a square, with their true sizes: crops are drawn in the true shape and
mapped to the square, so they are those of the files; the price is a coarser long side. Validation images are stored
as their centre square, unstretched: cropping that is exactly resize and centre crop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.data.crops import Array, CropRange, random_boxes
from halfstep.errors import make_printable


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImages:
    """Decoded images of one size."""

    pixels: Tensor
    """(N, S, S, 3) bytes; may be a mapped file."""
    sizes: Array
    """(N, 2): width and height of the original images."""
    labels: Tensor
    names: tuple[str, ...] = ()
    """The files they were made of, where they were files."""

    def __len__(self) -> int:
        return len(self.pixels)

    def name_of(self, index: int) -> str:
        """The file that image `index` was made of; empty where there is none."""
        return make_printable(self.names[index]) if self.names else ""


class _Batched:
    """Samples of stored images by index, each as its batch has it."""

    images: StoredImages

    def __len__(self) -> int:
        return len(self.images)

    def name_of(self, index: int) -> str:
        return self.images.name_of(index)

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return first_of(self.batch(torch.tensor([index]), seed=key[0], epoch=key[1]))

    def batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        raise NotImplementedError


class TrainingImages(_Batched):
    """Whole stored images with the `box` that (seed, epoch, index) draws: `image` (S, S, 3) bytes, `box`, `label`."""

    def __init__(self, images: StoredImages, *, crops: CropRange | None = None) -> None:
        self.images, self.crops = images, crops or CropRange()

    def batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        sizes, side = self.images.sizes[indices.numpy()], self.images.pixels.shape[1]
        boxes = torch.from_numpy(random_boxes(sizes, self.crops, seed=seed, epoch=epoch, indices=indices.numpy()))
        stretch = side / torch.from_numpy(sizes).float()
        image, labels = gathered(self.images.pixels, indices), self.images.labels[indices]
        return {"image": image, "box": boxes * stretch.tile(1, 2), "label": labels}


class EvaluationImages(_Batched):
    """The middle of stored centre squares, `share` of a side; with a `box` where it is not `size` pixels already."""

    def __init__(self, images: StoredImages, *, size: int, share: float = 0.875) -> None:
        self.images, side = images, images.pixels.shape[1]
        margin = side * (1 - share) / 2
        self._margin = int(margin)
        is_exact = margin == self._margin and side - 2 * self._margin == size
        self._box = None if is_exact else torch.tensor([[margin, margin, side - margin, side - margin]])

    def batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]:
        pixels, labels = self.images.pixels, self.images.labels[indices]
        if self._box is not None:
            return {"image": gathered(pixels, indices), "box": self._box.repeat(len(indices), 1), "label": labels}
        inner = slice(self._margin, pixels.shape[1] - self._margin)
        return {"image": gathered(pixels[:, inner, inner], indices), "label": labels}


def gathered(pixels: Tensor, indices: Tensor) -> Tensor:
    """Those images, straight into pinned memory where CUDA is in use: to pin them later would copy them again."""
    room = torch.empty(len(indices), *pixels.shape[1:], dtype=pixels.dtype, pin_memory=torch.cuda.is_initialized())
    return torch.index_select(pixels, 0, indices, out=room)


def first_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The only sample of a batch of one."""
    return {name: tensor[0] for name, tensor in batch.items()}
