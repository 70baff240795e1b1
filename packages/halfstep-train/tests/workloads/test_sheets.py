"""Whom a sheet shows."""

from __future__ import annotations

from halfstep_train.workloads.base.sheets import pick_worst_to_best


def test_the_worst_the_middling_and_the_best_are_shown_and_all_of_a_few() -> None:
    ranked = [(index, index / 10) for index in range(9)]
    assert pick_worst_to_best(ranked[:3], 2) == [("worst", 0, 0.0), ("worst", 1, 0.1), ("best", 2, 0.2)]
    shown = [(kind, index) for kind, index, _ in pick_worst_to_best(ranked, 2)]
    assert shown == [("worst", 0), ("worst", 1), ("median", 3), ("median", 4), ("best", 7), ("best", 8)]
    assert pick_worst_to_best([], 2) == []
