"""What evaluation counts in addition to the metrics, compared with plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep.errors import ConfigError
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.workload import Scheduled
from halfstep_train.workloads.classification.scores import ClassificationDetails
from halfstep_train.workloads.segmentation.data import IGNORED
from halfstep_train.workloads.segmentation.scores import SegmentationDetails, SegmentationMetrics, predict_classes

NUM = 3


def segmentation_batches() -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for start in (0, 4):
        mask = torch.randint(0, NUM, (4, 6, 6), generator=generator).to(torch.uint8)
        mask[0, :2] = IGNORED
        mask[1] = 0
        logits = torch.randn(4, NUM, 6, 6, generator=generator)
        logits[1, 0] = 9  # nothing to find, and nothing found
        batches.append((logits, {"mask": mask, "index": torch.arange(start, start + 4)}))
    return batches


def test_image_scores_are_the_mean_iou_of_the_classes_an_image_shows_the_worst_first() -> None:
    details = SegmentationDetails(NUM)
    expected = {}
    for logits, batch in segmentation_batches():
        details.update(logits, batch)
        for image, mask, index in zip(logits, batch["mask"], batch["index"].tolist(), strict=True):
            valid, found = mask != IGNORED, image.argmax(0)
            pairs = [((found == k) & valid, (mask == k) & valid) for k in range(1, NUM)]
            scores = [int((a & b).sum()) / int((a | b).sum()) for a, b in pairs if (a | b).any()]
            expected[index] = sum(scores) / len(scores) if scores else 1.0
    found_scores = details.rank_samples()
    assert dict(found_scores) == pytest.approx(expected)
    assert [score for _, score in found_scores] == sorted(expected.values())


def test_the_metrics_stay_those_of_validation() -> None:
    details, plain = SegmentationDetails(NUM), SegmentationMetrics(NUM)
    for logits, batch in segmentation_batches():
        details.update(logits, batch)
        plain.update(logits, batch)
    assert details.compute() == plain.compute()
    rows, scores = details.score_classes(), details.compute()
    assert [row["IoU"] for row in rows] == [scores[f"iou/{k}"] for k in range(NUM)]
    assert [row["Dice"] for row in rows] == [scores[f"dice/{k}"] for k in range(NUM)]


def test_mistakes_come_with_their_confidence_the_surest_first_and_nan_last() -> None:
    details = ClassificationDetails(NUM)
    logits = torch.tensor([[5.0, 0, 0], [0, 3.0, 0], [0, 0, 4.0], [torch.nan, 0, 0]])
    details.update(logits, {"label": torch.tensor([0, 0, 1, 2]), "index": torch.tensor([10, 11, 12, 13])})
    mistakes = details.list_mistakes()
    assert [mistake[:3] for mistake in mistakes] == [(12, 1, 2), (11, 0, 1), (13, 2, 0)]
    assert mistakes[0][3] == pytest.approx(float(logits[2].softmax(0)[2]))
    assert details.get_confusion().tolist() == [[1, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert details.compute() == {"top1": 0.25}


def test_an_image_counted_by_its_class_maps_has_the_counts_of_the_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, NUM, 5, 7)
    mask = torch.randint(0, NUM, (2, 5, 7), dtype=torch.uint8)
    mask[0, 0] = IGNORED
    for background in (0, 1, None):
        batched, single = SegmentationDetails(NUM, background), SegmentationDetails(NUM, background)
        batched.update(logits, {"mask": mask, "index": torch.tensor([0, 1])})
        for index in range(2):
            single.add_image(predict_classes(logits)[index].byte(), mask[index], index)
        assert single.compute() == batched.compute()
        assert single.rank_samples() == batched.rank_samples()


# --- values that follow a schedule are tensors ---


def test_a_scheduled_value_begins_with_that_of_step_0() -> None:
    tau = Scheduled(lambda step: 1.5 - step / 10)
    assert tau.value.shape == ()
    assert tau.value.dtype == torch.float32
    assert float(tau.value) == 1.5
    assert tau(5) == 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1j])
def test_what_is_no_finite_number_is_refused_with_its_step(wrong: complex) -> None:
    with pytest.raises(ConfigError, match="step 0"):
        Scheduled(lambda step: wrong)  # type: ignore[arg-type, return-value]


# --- samples on a sheet ---


def test_the_worst_the_middling_and_the_best_are_shown_and_all_of_a_few() -> None:
    ranked = [(index, index / 10) for index in range(9)]
    assert pick_worst_to_best(ranked[:3], 2) == [("worst", 0, 0.0), ("worst", 1, 0.1), ("best", 2, 0.2)]
    shown = [(kind, index) for kind, index, _ in pick_worst_to_best(ranked, 2)]
    assert shown == [("worst", 0), ("worst", 1), ("median", 3), ("median", 4), ("best", 7), ("best", 8)]
    assert pick_worst_to_best([], 2) == []
