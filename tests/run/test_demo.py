"""The demo as a new user meets it, cut short: one command without data, a banner that says what it is, and learning.
demos/images.py trains both whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from colour_threshold import best_threshold_iou
from halfstep.report.metrics_file import read
from halfstep.run.train import train
from halfstep.workloads import load


@pytest.mark.parametrize(
    ("workload", "epochs", "metric", "reached"),
    [
        pytest.param("unet", 4, "iou", 0.7, id="more than a colour threshold, whose best is below 0.6"),
        pytest.param("resnet18", 3, "top1", 0.65, id="more than a linear model, whose best is below 0.6"),
    ],
)
def test_a_few_epochs_of_a_demo_learn_what_nothing_simpler_can(
    workload: str, epochs: int, metric: str, reached: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shortened = load(workload, flags={"device": "cpu", "quiet": True}, overrides=[f"train.epochs={epochs}"])
    folder = train(shortened, out=tmp_path / "demo")
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    assert max(r[metric] for r in read(folder / "metrics.jsonl") if r["kind"] == "val") > reached
    if workload == "unet":  # of the linear model: tests/data/test_demo_classification.py
        assert best_threshold_iou(folder / "data") < 0.6
