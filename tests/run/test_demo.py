"""The demo as a new user meets it: one command without data, real learning, a banner that says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from colour_threshold import best_threshold_iou
from halfstep.config.load import load
from halfstep.report.metrics_file import read
from halfstep.run.train import train


@pytest.mark.slow
def test_the_demo_learns_what_no_threshold_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train(load("unet", flags={"device": "cpu", "quiet": True}), out=tmp_path / "unet-demo")
    assert "this is the DEMO" in capsys.readouterr().err.replace("\n", " ")
    assert best_threshold_iou(folder / "data") < 0.6
    assert max(r["iou"] for r in read(folder / "metrics.jsonl") if r["kind"] == "val") > 0.90
