"""`halfstep bench --explain` as a user calls it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.bench import explain as explain_module
from halfstep_train.bench.explain import Explanation
from halfstep_train.bench.step_profile import OpKind
from halfstep_train.cli.main import main
from warm_processes import process

TINY = ["bench", "unet", "model.base_channels=4", "model.depth=1", "--batch-size", "2", "--image-size", "16"]
EXPLAIN = [*TINY, "--device", "cpu", "--modes", "eager", "--steps", "3", "--explain"]


pytestmark = pytest.mark.usefixtures("known_rates")


def test_a_row_is_taken_apart_into_json_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "kinds.json"
    with pytest.raises(SystemExit) as ended:
        main([*EXPLAIN, "--precisions", "fp32", "--json", "--save", str(saved)])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(saved.read_text())
    assert printed["command"].startswith("halfstep ")
    assert printed["problem"]["batch_size"] >= 1
    assert printed["versions"]["torch"] == torch.__version__
    [row] = printed["explained"]
    assert row["title"] == "halfstep eager fp32"
    assert OpKind.CONV_BACKWARD in {kind["kind"] for kind in row["kinds"]}


def test_an_explanation_is_shown_whatever_becomes_of_saving_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfstep_train.bench.record.save_record", None)
    with pytest.raises(TypeError):
        main([*EXPLAIN, "--precisions", "fp32", "--save", str(tmp_path / "kinds.json")])
    assert "halfstep eager fp32" in capsys.readouterr().out


def test_no_precision_at_all_is_the_one_that_a_run_takes_here(capsys: pytest.CaptureFixture[str]) -> None:
    taken = decide("auto", probe("cpu"))
    with pytest.raises(SystemExit) as ended:
        main([*EXPLAIN, "--json"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert [row["title"] for row in json.loads(said.out)["explained"]] == [f"halfstep eager {taken.granted}"]
    assert f"auto means {taken.granted} here" in said.err


def test_the_profilers_own_log_is_not_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process of its own: the profiler reads its level once, and other tests have started it here.
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with process(main, [*EXPLAIN, "--precisions", "fp32"], output=tmp_path / "said") as explaining:
        explaining.join(timeout=120)
        said = (tmp_path / "said").read_text()
        assert explaining.exitcode == 0, said
    assert "ms per step" in said
    assert "profiler_start" not in said
    assert "registerClient" not in said


@pytest.mark.parametrize("turn", [0, 1])
def test_ctrl_c_keeps_what_was_explained_and_writes_nothing_where_nothing_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    real, turns = explain_module.explain, itertools.count()

    def interrupted(*arguments: Any, **named: Any) -> Explanation:
        if next(turns) == turn:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(explain_module, "explain", interrupted)
    file = tmp_path / "kinds.json"
    words = [*TINY, "--device", "cpu", "--precisions", "fp32", "--modes", "eager,compile", "--against", "plain:tuned"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--explain", "--save", str(file)])
    assert ended.value.code == 130
    said = capsys.readouterr()
    assert [line.split(" (")[0] for line in said.err.splitlines() if line.startswith("measuring halfstep")] == [
        "measuring halfstep eager fp32",
        "measuring halfstep compile fp32",
    ][: turn + 1]
    assert "not explained: halfstep compile fp32: stopped by Ctrl-C" in said.err
    assert "not explained: plain tuned fp32: stopped by Ctrl-C" in said.err
    assert ("halfstep eager fp32 on" in said.out) == file.exists() == (turn == 1)
    assert (f"{file} was not written: nothing was measured" in said.err) == (turn == 0)
    if file.exists():
        assert [row["title"] for row in json.loads(file.read_text())["explained"]] == ["halfstep eager fp32"]


def test_what_cannot_be_explained_exits_1_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TINY, "--device", "cpu", "--modes", "graph", "--precisions", "fp32", "--explain"])
    assert ended.value.code == 1
    assert "needs CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--modes", "auto"], ["--picture", "kinds.png"]])
def test_what_cannot_be_explained_at_all_is_refused_before_anything_is_measured(
    wrong: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("halfstep.hardware.cache.measure_once", measured)
    with pytest.raises(SystemExit) as ended:
        main([*TINY, "--device", "cpu", "--precisions", "fp32", "--explain", *wrong])
    assert ended.value.code == 2
    assert "explain" in capsys.readouterr().err


def test_a_data_folder_is_not_read_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*EXPLAIN, "--precisions", "fp32", f"data.dir={tmp_path}"])
    assert ended.value.code == 0
    assert f"data.dir={tmp_path} is not read" in capsys.readouterr().err
