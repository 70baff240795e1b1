"""The demo as a new user meets it: one command without data, real learning, a banner that says what it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from colour_threshold import best_threshold_iou
from halfstep.report.metrics_file import read
from halfstep.run.train import train
from halfstep.workloads import load


@pytest.mark.slow
def test_eleven_of_the_sixteen_epochs_of_the_demo_learn_what_no_threshold_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shortened = load("unet", flags={"device": "cpu", "quiet": True}, overrides=["train.epochs=11"])
    folder = train(shortened, out=tmp_path / "unet-demo")
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    assert best_threshold_iou(folder / "data") < 0.6
    assert max(r["iou"] for r in read(folder / "metrics.jsonl") if r["kind"] == "val") > 0.90


@pytest.mark.slow
def test_six_of_the_ten_epochs_of_the_classification_demo_learn_what_no_linear_model_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole demo passes 90 %; that a linear model on its pixels stays under 60 % is test_demo_classification."""
    start = time.process_time()
    whole = load("resnet18").config.train.epochs
    shortened = load("resnet18", flags={"device": "cpu", "quiet": True}, overrides=["train.epochs=6"])
    folder = train(shortened, out=tmp_path / "resnet18-demo")
    seconds = time.process_time() - start
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    assert max(r["top1"] for r in read(folder / "metrics.jsonl") if r["kind"] == "val") > 0.85
    # Processor time, which other work on the machine does not change: a wall clock on two cores is no longer than it.
    assert seconds * whole / 6 < 180
