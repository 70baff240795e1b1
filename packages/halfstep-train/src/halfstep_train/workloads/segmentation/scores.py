"""Loss and metrics of semantic segmentation, on logits (N, C, H, W) and class maps (N, H, W).

A single logit means binary: class 1 where it is positive. Pixels of class IGNORED do not count. Everything is computed
by comparisons and sums: without indexing kernels, which are slow or nondeterministic, without host waits, and without
branches that depend on data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.islands import fp32_island, to_fp32
from halfstep_train.workloads.base.sums import Sums
from halfstep_train.workloads.segmentation.data import IGNORED

DICE_EPS = 1e-6
"""As in the reference project: a class that is absent from truth and prediction scores exactly 1."""


NEARLY_ALL, NEARLY_NONE = 0.999, 0.01
"""If one class is predicted for more than the first share of pixels, and the IoU of all others is below the second, the
model predicts one class everywhere. A good model of tiny objects meets only the first condition."""


def segmentation_loss(
    logits: Tensor,
    mask: Tensor,
    *,
    class_weights: Sequence[float] = (),
    dice_weight: float = 1.0,
) -> Tensor:
    """Return (binary) cross-entropy + (1 - mean Dice of the classes) in fp32; 0 if every pixel is ignored."""
    with fp32_island():
        logits = to_fp32(logits)
        truth = encode_one_hot(mask, max(2, logits.shape[1]))
        weights = truth.to(logits.dtype)
        if class_weights:
            # Multiply by Python numbers: a tensor would have to be copied to the device.
            weights = torch.cat([weights[:, k : k + 1] * w for k, w in enumerate(class_weights)], dim=1)
        if logits.shape[1] == 1:
            log_probability = torch.cat([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=1)
            probability, foreground = logits.sigmoid(), truth[:, 1:]
        else:
            log_probability = F.log_softmax(logits, dim=1)
            probability, foreground = log_probability.exp(), truth
        # The clamp acts only if the weights of all pixels are 0; then the numerator is 0 too.
        tiny = torch.finfo(logits.dtype).tiny
        cross_entropy = -torch.where(truth, log_probability * weights, 0).sum() / weights.sum().clamp(min=tiny)
        valid = truth.any(dim=1, keepdim=True)
        dice = compute_dice(torch.where(valid, probability, 0), foreground)
        return cross_entropy + dice_weight * (1 - dice.mean())


def compute_dice(probability: Tensor, truth: Tensor) -> Tensor:
    """Return the soft Dice of each class over batch and pixels, in fp32: sums of 8·512² terms would overflow fp16."""
    pixels = (0, 2, 3)
    overlap = 2 * torch.where(truth, probability, 0).sum(pixels)
    sizes = probability.sum(pixels) + truth.sum(pixels)
    sizes = torch.where(sizes == 0, overlap, sizes)
    return (overlap + DICE_EPS) / (sizes + DICE_EPS)


def encode_one_hot(classes: Tensor, num_classes: int) -> Tensor:
    """Return booleans (N, C, H, W); ignored pixels belong to no class."""
    return classes.unsqueeze(1) == torch.arange(num_classes, device=classes.device).view(1, -1, 1, 1)


def predict_classes(logits: Tensor) -> Tensor:
    """Return the class map (N, H, W) of the logits."""
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(dim=1)


def count_pixels(classes: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return integers (3, N, C): the numbers of hit, predicted and true pixels of each class in each image."""
    truth = encode_one_hot(mask, num_classes)
    predicted = encode_one_hot(classes, num_classes) & (mask != IGNORED).unsqueeze(1)
    pixels = (2, 3)
    return torch.stack([(truth & predicted).sum(pixels), predicted.sum(pixels), truth.sum(pixels)])


def count_image_pixels(classes: Tensor, mask: Tensor, num_classes: int) -> Tensor:
    """Return the same numbers (3, C) for one image (H, W) on the CPU, with less memory: without a map per class."""
    is_counted = mask != IGNORED
    kinds = (classes[is_counted & (classes == mask)], classes[is_counted], mask[is_counted])
    return torch.stack([torch.bincount(found, minlength=num_classes) for found in kinds])


class SegmentationMetrics(Sums):
    """IoU and Dice over a data set, from pixels counted as integers on the device.

    `iou` and `dice` are means over all classes but the background, if there is one; `iou_all` and `dice_all` are means
    over all classes. A class that is absent from truth and prediction is left out of the means; if all are, the mean is
    1.
    """

    def __init__(self, num_classes: int, background: int | None = 0) -> None:
        super().__init__()
        self.num_classes, self.background = max(2, num_classes), background

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        self.add(counts=count_pixels(predict_classes(logits), batch["mask"], self.num_classes).sum(1))

    def compute(self) -> dict[str, float]:
        """Return `iou`, `dice`, `accuracy`, `iou_all`, `dice_all` and, for each class K that occurs, `iou/K`, `dice/K`
        and `predicted/K` (its share of predicted pixels). Waits for the device."""
        if not self.sums:
            return {}
        hit, predicted, true = self.sums["counts"].double().cpu()
        union = predicted + true - hit
        occurs = [k for k in range(self.num_classes) if union[k] > 0]
        scores = {f"iou/{k}": float(hit[k] / union[k]) for k in occurs}
        scores |= {f"dice/{k}": float(2 * hit[k] / (predicted[k] + true[k])) for k in occurs}
        scores |= {f"predicted/{k}": float(predicted[k] / predicted.sum()) for k in occurs}
        accuracy = float(hit.sum() / true.sum()) if true.sum() > 0 else 1.0
        kinds = ("iou", "dice")
        means = {kind: _average([scores[f"{kind}/{k}"] for k in occurs if k != self.background]) for kind in kinds}
        over_all = {f"{kind}_all": _average([scores[f"{kind}/{k}"] for k in occurs]) for kind in kinds}
        return means | {"accuracy": accuracy} | over_all | scores


def hint_at_single_class(scores: Mapping[str, float]) -> str:
    """Return advice if one class is predicted nearly everywhere and no other is found, else an empty string."""
    ious = {name.removeprefix("iou/"): value for name, value in scores.items() if name.startswith("iou/")}
    for number in ious:
        others = [value for name, value in ious.items() if name != number]
        if others and scores[f"predicted/{number}"] > NEARLY_ALL and max(others) < NEARLY_NONE:
            return (
                f"practically every pixel of every image was predicted as class {number}: common in the first epochs; "
                "if it persists, try a lower optimizer.lr, model.class_weights for rare classes, or check the masks"
            )
    return ""


def _average(values: list[float]) -> float:
    return sum(values) / len(values) if values else 1.0


# --- details of evaluation ---


class SegmentationDetails(SegmentationMetrics):
    """Validation metrics that also keep the scores of each class and each image."""

    def update(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        self._add(count_pixels(predict_classes(logits), batch["mask"], self.num_classes), batch["index"])

    def add_image(self, classes: Tensor, truth: Tensor, index: int) -> None:
        """Add one image of any size, given as class maps (H, W)."""
        self._add(count_image_pixels(classes, truth, self.num_classes).unsqueeze(1), torch.tensor([index]))

    def _add(self, counts: Tensor, indices: Tensor) -> None:
        self.add(counts=counts.sum(1))
        self.add_ranked(indices, compute_image_iou(counts, self.background))

    def score_classes(self) -> list[dict[str, float | None]]:
        """Return the scores of each class, None for ratios with a denominator of 0; waits for the device."""
        rows = self.sums["counts"].T.tolist() if self.sums else []
        total = sum(true for _, _, true in rows)
        return [
            {
                "IoU": _divide(hit, predicted + true - hit),
                "Dice": _divide(2 * hit, predicted + true),
                "precision": _divide(hit, predicted),
                "recall": _divide(hit, true),
                "share of pixels": _divide(true, total),
            }
            for hit, predicted, true in rows
        ]


def compute_image_iou(counts: Tensor, background: int | None = 0) -> Tensor:
    """Return the mean IoU (N,) of the classes of each image, without background; 1 if no class occurs."""
    hit, predicted, true = counts.double()
    union = predicted + true - hit
    occurs = union > 0
    if background is not None:
        occurs[:, background] = False
    sums = torch.where(occurs, hit / union.clamp(min=1), 0).sum(dim=1)
    return torch.where(occurs.any(dim=1), sums / occurs.sum(dim=1).clamp(min=1), 1.0)


def _divide(part: int, whole: int) -> float | None:
    return part / whole if whole else None
