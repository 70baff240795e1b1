"""Scores of radio maps."""

from __future__ import annotations

import math

import pytest
import torch

from golden import golden
from halfstep_train.workloads.radio.scores import RadioMetrics, score_maps, ssim

GOLDEN_NAMES = {"nmse": "nmse", "rmse": "rmse", "ssim": "ssim_range1", "psnr": "psnr_range1"}


def test_golden_scores() -> None:
    tensors, facts = golden("radiodiff_blocks")
    for case, expected in facts["metrics"].items():
        found = score_maps(tensors[f"{case}/pred"], tensors[f"{case}/true"])
        for ours, theirs in GOLDEN_NAMES.items():
            # SSIM lies in -1..1: near 0 its rounding is that of its range.
            within = {"abs": 1e-5} if ours == "ssim" else {"rel": 1e-5}
            assert float(found[ours]) == pytest.approx(expected[theirs], **within), f"{case} {ours}"


def mirrored(place: int, length: int) -> int:
    return -place if place < 0 else 2 * (length - 1) - place if place >= length else place


def test_ssim_is_that_of_a_loop_over_windows() -> None:
    torch.manual_seed(0)
    a, b = torch.rand(1, 1, 13, 14).double(), torch.rand(1, 1, 13, 14).double()
    line = torch.exp(-((torch.arange(11).double() - 5) ** 2) / (2 * 1.5**2))
    window = torch.outer(line, line) / line.sum() ** 2
    values = []
    for row in range(13):
        for column in range(14):
            places = [mirrored(row + offset, 13) for offset in range(-5, 6)]
            across = [mirrored(column + offset, 14) for offset in range(-5, 6)]
            one, other = (x[0, 0, places][:, across] for x in (a, b))
            mean = [(window * x).sum() for x in (one, other)]
            var = [(window * (x - m) ** 2).sum() for x, m in zip((one, other), mean, strict=True)]
            both = (window * (one - mean[0]) * (other - mean[1])).sum()
            top = (2 * mean[0] * mean[1] + 1e-4) * (2 * both + 9e-4)
            values.append(top / ((mean[0] ** 2 + mean[1] ** 2 + 1e-4) * (var[0] + var[1] + 9e-4)))
    torch.testing.assert_close(ssim(a, b), torch.stack(values).mean()[None])


def test_two_nmse_are_told_apart() -> None:
    true = torch.full((1, 1, 16, 16), 0.5)
    true[..., :8] = 0.3
    found = score_maps(true + 0.1, true)
    assert float(found["nmse"]) == pytest.approx(0.01 / (0.5 * 0.25 + 0.5 * 0.09), rel=1e-6)
    assert float(found["nmse_variance"]) == pytest.approx(0.01 / 0.01, rel=1e-5)


def test_scores_do_not_depend_on_batches() -> None:
    torch.manual_seed(0)
    predicted, true = torch.rand(6, 1, 16, 16), torch.rand(6, 1, 16, 16)
    whole, parts = RadioMetrics(), RadioMetrics()
    whole.update({"map": predicted}, {"truth": true})
    for start, end in ((0, 1), (1, 4), (4, 6)):
        parts.update({"map": predicted[start:end]}, {"truth": true[start:end]})
    assert parts.compute() == pytest.approx(whole.compute(), rel=1e-12)


def test_a_map_without_signal_has_no_nmse_and_a_broken_prediction_shows() -> None:
    true = torch.zeros(2, 1, 16, 16)
    true[1] = 0.5
    metrics = RadioMetrics()
    metrics.update({"map": true + 0.1}, {"truth": true})
    assert metrics.compute()["nmse"] == pytest.approx(0.01 / 0.25, rel=1e-5)
    metrics.update({"map": torch.full_like(true, math.nan)}, {"truth": true})
    assert math.isnan(metrics.compute()["nmse"])


def test_counting_goes_on_from_a_stored_state() -> None:
    outputs, batch = {"map": torch.rand(2, 1, 16, 16), "error_c": torch.rand(2)}, {"truth": torch.rand(2, 1, 16, 16)}
    one, other = RadioMetrics(), RadioMetrics()
    one.update(outputs, batch)
    other.load_state_dict(one.state_dict())
    one.update(outputs, batch)
    other.update(outputs, batch)
    assert one.compute() == other.compute()
    assert "c" in one.compute()


def test_a_perfect_map_has_a_finite_psnr() -> None:
    true = torch.rand(1, 1, 16, 16)
    assert float(score_maps(true, true)["psnr"]) == pytest.approx(120)
