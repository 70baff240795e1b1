"""A run with a torch that is newer than the newest tested one says so in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halfstep as hs
from halfstep.step import torch_version
from halfstep.step.torch_version import report_untested_torch


def test_runs_report_an_untested_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_version, "NEWEST_TESTED", (1, 99))
    report_untested_torch.cache_clear()
    overrides = ("data.dir=anywhere", "data.num_workers=0", "device=cpu", "precision=fp32", "log.quiet=true")
    hs.train("tiny_workload:build", *overrides, "train.batch_size=4", "train.max_steps=1", out=tmp_path / "run")
    report_untested_torch.cache_clear()
    assert capsys.readouterr().err.count(f"torch {torch.__version__} is newer than 1.99") == 1
