"""Every cell of docs/modes.md that a CPU can show."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from halfstep.cli.main import main
from halfstep.errors import ConfigError
from halfstep.run.phased_engine import UNCOMPILED
from mode_features import FEATURES, assert_close, cells, run_with, table


def test_the_page_and_the_features_are_the_same() -> None:
    assert list(table()) == list(FEATURES)
    assert {row["ranks"] for row in table().values()} == {"refused"}


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated by the compiler as ever; its kernels, which tests of their own cover, are torch's."""
    compile_by = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda region, dynamic, options: compile_by(region, dynamic=dynamic))


@pytest.mark.parametrize(("name", "mode", "word"), list(cells("eager", "compile")))
def test_a_feature_in_a_mode_does_what_the_page_says(
    name: str, mode: str, word: str, tmp_path: Path, without_inductor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    feature = FEATURES[name]
    if word == "refused":
        with pytest.raises(ConfigError) as refusal:
            run_with(feature, mode, tmp_path / "run")
        assert refusal.value.why
        return
    out = run_with(feature, mode, tmp_path / "run")
    told = "".join(capsys.readouterr())
    assert feature.shows(out)
    assert (UNCOMPILED in told or "running eager" in told) == (word == "falls back")
    if mode != "eager":
        assert_close(out, run_with(feature, "eager", tmp_path / "eager"))


def test_ranks_are_refused_with_the_launcher_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as end:
        main(["train", "tiny_workload:build"])
    assert end.value.code == 2
    assert "WORLD_SIZE=2" in capsys.readouterr().err
