"""A torch that is newer than the newest tested one is reported in one line, once per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.step import torch_version
from halfstep.step.torch_version import NEWEST_TESTED, report_untested_torch


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The one line for the installed torch, if no version were tested."""
    monkeypatch.setattr(torch_version, "NEWEST_TESTED", (1, 99))
    report_untested_torch.cache_clear()
    yield f"halfstep: torch {torch.__version__} is newer than 1.99, the newest version that halfstep was tested with\n"
    report_untested_torch.cache_clear()


def test_steps_report_an_untested_torch_once_per_process(untested: str, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        model = nn.Linear(2, 1)
        hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp32")
    assert capsys.readouterr().err == untested


@pytest.mark.parametrize("suffix", [".0", ".1", ".0+cu132", ".0.dev20261101", ".0a0+git0123abc"])
def test_only_versions_after_the_newest_tested_one_are_reported(
    suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    major, minor = NEWEST_TESTED
    for tested in ("2.10.0", f"{major}.{minor}{suffix}"):
        report_untested_torch(tested)
    assert capsys.readouterr().err == ""
    for newer in (f"{major}.{minor + 1}{suffix}", f"{major + 1}.0{suffix}"):
        report_untested_torch(newer)
        assert f"torch {newer} is newer" in capsys.readouterr().err
