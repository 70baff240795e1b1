"""The demo as a new user meets it, cut short: one command without data, a banner that says what it is, and learning.
demos/images.py trains both demos whole, and asserts what they reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from colour_threshold import best_threshold_iou
from halfstep_train.report.metrics_file import read
from halfstep_train.report.page.read_run import read_run
from halfstep_train.run.train import train
from halfstep_train.workloads import load


def test_the_first_steps_of_a_demo_learn_from_data_that_no_colour_threshold_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["train.max_steps=8", "train.validate_every_steps=4"]
    shortened = load("unet", flags={"device": "cpu", "quiet": True}, overrides=few)
    folder = train(shortened, out=tmp_path / "demo")
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    first, last = (r["loss"] for r in read(folder / "metrics.jsonl") if r["kind"] == "val")
    assert last < first
    assert best_threshold_iou(folder / "data") < 0.6
    assert read_run(folder).settings["data.dir"] == (str(folder / "data"), "default generated demo data")
