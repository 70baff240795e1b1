from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.classification.scores import ClassificationMetrics, compute_ranks


def counted(logits: Tensor, labels: Tensor, sizes: list[int], num_classes: int) -> ClassificationMetrics:
    metrics = ClassificationMetrics(num_classes, confusion=True)
    for part, label in zip(logits.split(sizes), labels.split(sizes), strict=True):
        metrics.update(part, {"label": label})
    return metrics


def test_top1_and_top5_are_exact_whatever_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(37, 10, generator=generator), torch.randint(10, (37,), generator=generator)
    top = logits.topk(5, dim=1).indices == labels.unsqueeze(1)
    expected = {"top1": int(top[:, 0].sum()) / 37, "top5": int(top.any(dim=1).sum()) / 37}
    for sizes in ([37], [16, 16, 5], [1] * 37):
        assert counted(logits, labels, sizes, 10).compute() == expected


def test_equal_logits_are_not_all_hits() -> None:
    assert compute_ranks(torch.zeros(4, 6), torch.tensor([0, 1, 2, 5])).tolist() == [0, 1, 2, 5]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_never_a_hit_for_another_class(bad: float) -> None:
    logits = torch.zeros(2, 6)
    logits[:, 5] = bad
    assert compute_ranks(logits, torch.tensor([0, 1])).min() >= 1


def test_the_confusion_matrix_and_the_classes_add_up() -> None:
    logits = torch.eye(3)[torch.tensor([0, 1, 1, 2, 0])]
    metrics = counted(logits, torch.tensor([0, 1, 2, 2, 2]), [2, 3], 3)
    assert metrics.get_confusion().tolist() == [[1, 0, 0], [0, 1, 0], [1, 1, 1]]
    assert metrics.count_by_class() == [(1, 1), (1, 1), (3, 1)]


def test_nothing_counted_is_no_score() -> None:
    assert ClassificationMetrics(3).compute() == {}


def test_counts_go_on_from_a_stored_state() -> None:
    first, second = ClassificationMetrics(3), ClassificationMetrics(3)
    first.update(torch.eye(3), {"label": torch.tensor([0, 1, 0])})
    second.load_state_dict(first.state_dict())
    second.update(torch.eye(3), {"label": torch.tensor([0, 1, 2])})
    assert second.compute() == {"top1": 5 / 6}
    assert first.compute() == {"top1": 2 / 3}
