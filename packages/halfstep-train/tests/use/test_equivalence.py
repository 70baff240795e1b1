"""Verdicts of a comparison: error rates of the very code that decides, Student's t, Holm, margins."""

from __future__ import annotations

import numpy as np
import pytest

from halfstep_train.use.equivalence import (
    LEVEL,
    SEEDS,
    choose_margin,
    compute_student_cdf,
    compute_student_quantile,
    is_wide,
    judge_rows,
)

FROM_A_TABLE = {(0.95, 4): 2.1318, (0.95, 7): 1.8946, (0.95, 19): 1.7291, (0.975, 1): 12.7062, (0.99, 30): 2.4573}


@pytest.mark.parametrize(("share", "freedom"), FROM_A_TABLE)
def test_quantiles_are_those_of_students_table(share: float, freedom: int) -> None:
    assert compute_student_quantile(share, freedom) == pytest.approx(FROM_A_TABLE[share, freedom], abs=1e-4)
    assert compute_student_cdf(compute_student_quantile(share, freedom), freedom) == pytest.approx(share)


def decided(differences: np.ndarray, margin: float) -> str:
    return judge_rows([0.0] * SEEDS, {"row": list(differences)}, margin)["row"].word


def noise(kind: str, num: int) -> np.ndarray:
    draws = np.random.default_rng(3)
    return draws.standard_normal((num, SEEDS)) if kind == "normal" else draws.standard_t(3, (num, SEEDS))


@pytest.mark.parametrize(("kind", "deviation"), [("normal", 0.1), ("heavy-tailed", 0.5)])
def test_a_difference_as_large_as_the_margin_is_called_the_same_in_5_of_100_at_most(
    kind: str, deviation: float
) -> None:
    num = 2000
    words = [decided(1.0 + deviation * row, margin=1.0) for row in noise(kind, num)]
    # Three standard errors of a rate of 5 % over 2000 comparisons.
    assert words.count("same") / num <= LEVEL + 3 * (LEVEL * 0.95 / num) ** 0.5


def test_verdicts_name_the_direction_and_the_seeds_that_would_decide() -> None:
    spread = np.array([-0.1, 0.05, 0.1, -0.05, 0.0])
    one = judge_rows([1.0] * 5, {"row": list(1.0 + spread)}, 0.5)["row"]
    assert str(one) == "same"
    lower = judge_rows([1.0] * 5, {"row": list(0.8 + spread)}, 0.5)["row"]
    assert str(lower) == "same (lower by 0.2)"
    assert judge_rows([1.0] * 5, {"row": list(0.2 + spread)}, 0.5)["row"].word == "lower"
    assert judge_rows([1.0] * 5, {"row": list(1.9 + spread)}, 0.5)["row"].word == "higher"
    open_one = judge_rows([1.0] * 5, {"row": list(1.0 + 12 * spread)}, 0.5)["row"]
    assert open_one.word == "not shown"
    assert open_one.seeds_needed is not None
    assert open_one.seeds_needed > 5


def test_holm_judges_two_rows_more_strictly_than_one() -> None:
    spread = np.array([-0.1, 0.05, 0.1, -0.05, 0.0])
    alone = judge_rows([0.0] * 5, {"a": list(spread)}, 0.079)["a"]
    both = judge_rows([0.0] * 5, {"a": list(spread), "b": list(spread)}, 0.079)
    assert alone.word == "same"
    assert {v.word for v in both.values()} == {"not shown"}


def test_few_seeds_and_broken_metrics_show_nothing() -> None:
    assert "4 paired seeds" in judge_rows([0.0] * 4, {"row": [0.0] * 4}, 1.0)["row"].why
    assert "not finite" in judge_rows([0.0] * 5, {"row": [0.0] * 4 + [float("nan")]}, 1.0)["row"].why
    stuck = judge_rows([0.5] * 5, {"row": [0.5] * 5, "other": [0.5, 0.51, 0.5, 0.49, 0.5]}, 0.1)
    assert (stuck["row"].word, stuck["other"].word) == ("not shown", "same")
    assert "0.5 in every run" in stuck["row"].why


def test_margins_are_half_a_point_or_one_percent_of_a_loss() -> None:
    assert choose_margin([0.9] * 5, in_points=True) == choose_margin([], in_points=False) == 0.005
    assert choose_margin([2.0] * 5, in_points=False) == pytest.approx(0.02)
    assert is_wide(0.03, [0.9], in_points=True)
    assert not is_wide(0.01, [0.9], in_points=True)
    assert is_wide(0.2, [2.0], in_points=False)
    assert not is_wide(0.05, [2.0], in_points=False)
