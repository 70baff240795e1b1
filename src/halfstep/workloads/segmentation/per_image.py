"""A closer look at segmentation results: each class, and each image, so that the worst ones can be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.workloads.segmentation.scores import SegmentationMetrics, image_counts, pixel_counts, predicted_classes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassPixels:
    """The pixels of one class over a whole data set; a share of nothing is None."""

    hit: int
    predicted: int
    true: int

    @property
    def iou(self) -> float | None:
        return _share(self.hit, self.predicted + self.true - self.hit)

    @property
    def dice(self) -> float | None:
        return _share(2 * self.hit, self.predicted + self.true)

    @property
    def precision(self) -> float | None:
        return _share(self.hit, self.predicted)

    @property
    def recall(self) -> float | None:
        return _share(self.hit, self.true)


class SegmentationDetails(SegmentationMetrics):
    def __init__(self, num_classes: int, background: int | None = 0) -> None:
        super().__init__(num_classes, background)
        self._scored: list[Tensor] = []

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        self._add(pixel_counts(predicted_classes(logits), batch["mask"], self.num_classes), batch["index"])

    def count(self, classes: Tensor, truth: Tensor, index: int) -> None:
        """Count one image of any size by its class maps (H, W)."""
        self._add(image_counts(classes, truth, self.num_classes).unsqueeze(1), torch.tensor([index]))

    def _add(self, counts: Tensor, indices: Tensor) -> None:
        self.add(counts.sum(1))
        self._scored.append(torch.stack([indices.double(), image_iou(counts, self.background)]))

    def per_class(self) -> list[ClassPixels]:
        """Every class in order; waits for the device."""
        if self._counts is None:
            return []
        rows = self._counts.T.tolist()
        return [ClassPixels(hit=hit, predicted=predicted, true=true) for hit, predicted, true in rows]

    def per_image(self) -> list[tuple[int, float]]:
        """Sample and IoU, the worst first; waits for the device."""
        scored = torch.cat(self._scored, dim=1).T.tolist() if self._scored else []
        return sorted(((int(index), score) for index, score in scored), key=lambda found: (found[1], found[0]))


def image_iou(counts: Tensor, background: int | None = 0) -> Tensor:
    """Mean IoU (N) of the classes but the background that an image shows; 1 where there was nothing to find."""
    hit, predicted, true = counts.double()
    union = predicted + true - hit
    occurs = union > 0
    if background is not None:
        occurs[:, background] = False
    sums = torch.where(occurs, hit / union.clamp(min=1), 0).sum(dim=1)
    return torch.where(occurs.any(dim=1), sums / occurs.sum(dim=1).clamp(min=1), 1.0)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
