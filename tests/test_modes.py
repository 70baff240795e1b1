"""Every cell of docs/modes.md that a CPU can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import ConfigError, HalfstepError
from halfstep_train.run.engine import UNCOMPILED
from halfstep_train.run.launch import Launch
from mode_features import FEATURES, assert_close, cells, run_with, table
from ranks_together import free_port, together


def test_the_page_and_the_features_are_the_same() -> None:
    assert list(table()) == list(FEATURES)


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced and differentiated by the compiler as ever; its kernels, which tests of their own cover, are torch's."""
    compile_by = torch.compile

    def traced(region: Any, dynamic: bool, options: Any = None, backend: Any = "aot_eager") -> Any:
        return compile_by(region, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(torch, "compile", traced)


@pytest.fixture(scope="module")
def eager_runs() -> dict[str, Path]:
    """By feature, those that were made: compiled ones are held against them."""
    return {}


@pytest.mark.parametrize(("name", "mode", "word"), list(cells("eager", "compile")))
def test_a_feature_in_a_mode_does_what_the_page_says(
    name: str,
    mode: str,
    word: str,
    tmp_path: Path,
    without_inductor: None,
    capsys: pytest.CaptureFixture[str],
    eager_runs: dict[str, Path],
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
    if mode == "eager":
        eager_runs[name] = out
    else:
        assert_close(out, eager_runs.get(name) or run_with(feature, "eager", tmp_path / "eager"))


def every_feature(rank: int, size: int, port: int, folder: Path, ports: dict[str, int]) -> dict[str, str]:
    """One process of a run with each feature: what went wrong, or nothing."""
    ends = {}
    for name, own_port in ports.items():
        launch = Launch(rank=rank, size=size, local_rank=rank, address="127.0.0.1", port=own_port, by_torchrun=False)
        try:
            run_with(FEATURES[name], "eager", folder / name, launch=launch, **{"log.quiet": True})
            ends[name] = ""
        except HalfstepError as error:
            ends[name] = str(error)
    return ends


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    folder = tmp_path_factory.mktemp("modes")
    return folder, together(2, every_feature, folder / "ends", folder, {name: free_port() for name in FEATURES})


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "mode", "word"), list(cells("ranks")))
def test_a_feature_with_two_processes_does_what_the_page_says(
    name: str, mode: str, word: str, ranked: tuple[Path, list[dict[str, str]]]
) -> None:
    folder, ends = ranked
    assert word == "works"
    assert [end[name] for end in ends] == ["", ""]
    assert FEATURES[name].shows(folder / name)
