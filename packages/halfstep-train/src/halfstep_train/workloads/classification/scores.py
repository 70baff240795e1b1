"""Loss, mixing and metrics of image classification, on logits (N, C) and labels (N).

A mixed batch contains two labels and the weight of the first one as tensors, so that the loss has the same form for
every batch, as compiled code and captured graphs require. Random numbers are drawn on the host from a key such as
(seed, attempted step): nothing waits for the device, and a resumed run mixes the same images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep.prefetching import send_to_device
from halfstep_train.data.loader import Key
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.classification.config import ImageAugmentConfig

TOP = 5
MIX_STREAM = 0x6D6978
"""Distinguishes the random numbers of mixing from those of augmentation with the same key ("mix" in ASCII)."""


def mix(batch: Mapping[str, Tensor], spec: ImageAugmentConfig, *, key: tuple[int, ...]) -> dict[str, Tensor]:
    """Mix each image with its neighbour in the batch by Mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019), with
    the alpha of a Beta(alpha, alpha). `label_b` is the neighbour's label, `lam` the weight of `label`."""
    image, label = batch["image"], batch["label"]
    # What is drawn once per micro-batch is the same for every rank that has a part of it.
    random = np.random.default_rng((*(key.batch if isinstance(key, Key) else key), MIX_STREAM))
    # Always draw all numbers, so that one setting does not alter the random numbers of the others.
    _, kind, *centre = random.random(4)
    cuts = spec.cutmix > 0 and (kind < 0.5 or spec.mixup == 0)
    alpha = spec.cutmix if cuts else spec.mixup
    lam = float(random.beta(alpha, alpha)) if alpha > 0 else 1.0
    # Batches are shuffled, so the neighbour is a random partner. `cat` keeps the memory layout, which `roll` does not.
    partner = torch.cat([image[-1:], image[:-1]])
    if lam < 1 and cuts:
        image, lam = paste(image, partner, draw_cut_box(lam, centre, image.shape[-2], image.shape[-1]))
    elif lam < 1:
        image = torch.lerp(partner, image, lam)
    weights = torch.full(label.shape, lam, dtype=torch.float32, device=label.device)
    return {**batch, "image": image, "label_b": label.roll(1), "lam": weights}


def draw_cut_box(lam: float, centre: Sequence[float], height: int, width: int) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of a box with 1 - lam of the area around a random centre, clipped to the
    image."""
    side = math.sqrt(1 - lam)
    edges: list[int] = []
    for position, length in zip(centre, (height, width), strict=True):
        middle, half = int(position * length), int(side * length) // 2
        edges += [max(middle - half, 0), min(middle + half, length)]
    top, bottom, left, right = edges
    return top, bottom, left, right


def paste(image: Tensor, partner: Tensor, box: tuple[int, int, int, int]) -> tuple[Tensor, float]:
    """Copy the partner's pixels into the box; return the images and the share of pixels that remain."""
    top, bottom, left, right = box
    mixed = image.clone()
    mixed[..., top:bottom, left:right] = partner[..., top:bottom, left:right]
    return mixed, 1 - (bottom - top) * (right - left) / (image.shape[-2] * image.shape[-1])


def classification_loss(logits: Tensor, batch: Mapping[str, Tensor], *, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy in fp32; in a mixed batch both labels count by their weights."""
    with fp32_island():
        logits = to_fp32(logits)
        if "lam" not in batch:
            return F.cross_entropy(logits, batch["label"], label_smoothing=smoothing)
        classes = torch.arange(logits.shape[1], device=logits.device)
        own, other = (torch.eq(batch[name].unsqueeze(1), classes) for name in ("label", "label_b"))
        lam = batch["lam"].unsqueeze(1)
        return F.cross_entropy(logits, own * lam + other * (1 - lam), label_smoothing=smoothing)


def compute_ranks(logits: Tensor, label: Tensor) -> Tensor:
    """Return how many classes rank before the true one; 0 is a hit. Of equal logits the first wins; NaN never wins."""
    own = logits.gather(1, label.unsqueeze(1))
    classes = torch.arange(logits.shape[1], device=logits.device)
    # `~(a <= b)` is also true for NaN, which must not count as a correct answer.
    beats = ~(logits <= own) | ((logits == own) & (classes < label.unsqueeze(1)))
    return beats.sum(dim=1)


class ClassificationMetrics(Sums):
    """Top-1 and top-5 accuracy over a data set, counted as integers on the device.

    With `confusion`, every pair of true and predicted class is counted too: C² numbers.
    """

    def __init__(self, num_classes: int, *, confusion: bool = False) -> None:
        self.num_classes = num_classes
        shapes = {"counts": (3, num_classes)} | ({"pairs": (num_classes**2,)} if confusion else {})
        self.sums = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        label, rank = batch["label"], compute_ranks(outputs, batch["label"])
        if self.sums["counts"].device != label.device:
            self.sums = {name: send_to_device(count, label.device) for name, count in self.sums.items()}
        # (3, N): one for the sample, one if it is a top-1 hit, one if it is a top-5 hit.
        facts = torch.stack([torch.ones_like(rank), rank < 1, rank < TOP])
        self.sums["counts"].scatter_add_(1, label.expand(3, -1), facts)
        if "pairs" in self.sums:
            pair = label * self.num_classes + torch.where(rank < 1, label, outputs.argmax(dim=1))
            self.sums["pairs"].scatter_add_(0, pair, torch.ones_like(pair))

    def compute(self) -> dict[str, float]:
        """Return `top1`, and `top5` for more than five classes; waits for the device."""
        seen, first, among = (int(count) for count in self.sums["counts"].sum(dim=1).tolist())
        if seen == 0:
            return {}
        return {"top1": first / seen} | ({f"top{TOP}": among / seen} if self.num_classes > TOP else {})

    def count_by_class(self) -> list[tuple[int, int]]:
        """Return (samples, hits) of each class; waits for the device."""
        seen, first, _ = self.sums["counts"].tolist()
        return list(zip(seen, first, strict=True))

    def get_confusion(self) -> Tensor:
        """Return samples by true class (row) and predicted class (column), on the CPU."""
        return self.sums["pairs"].cpu().view(self.num_classes, self.num_classes)


# --- details of evaluation ---


class ClassificationDetails(ClassificationMetrics):
    """Validation metrics with the confusion matrix and every prediction with its confidence."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, confusion=True)
        self._answers: list[Tensor] = []

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        super().update(outputs, batch)
        predicted = outputs.argmax(dim=1)
        confidence = compute_probabilities(outputs).gather(1, predicted.unsqueeze(1)).squeeze(1)
        # Indices of samples and classes are exact in fp64.
        columns = (batch["index"], batch["label"], predicted, confidence)
        self._answers.append(torch.stack([column.double() for column in columns]))

    def list_mistakes(self) -> list[tuple[int, int, int, float]]:
        """Return all mistakes as (index, label, predicted class, its probability), the most confident first; waits for
        the device."""
        rows = torch.cat(self._answers, dim=1).T.tolist() if self._answers else []
        wrong = [(int(row[0]), int(row[1]), int(row[2]), row[3]) for row in rows if row[1] != row[2]]
        return sorted(wrong, key=lambda row: (-row[3] if math.isfinite(row[3]) else 0.0, row[0]))


def compute_probabilities(logits: Tensor) -> Tensor:
    """Return the probabilities (N, C) of logits in fp32."""
    with fp32_island():
        return to_fp32(logits).softmax(dim=1)
