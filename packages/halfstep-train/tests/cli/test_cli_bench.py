"""`halfstep bench` on a CPU, from the command line."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.bench import bench as bench_module
from halfstep_train.bench.measure_row import Row
from halfstep_train.cli.main import main

TINY = ("unet", "data.image_size=16", "model.base_channels=2", "model.depth=1", "--batch-size", "2", "--steps", "10")
FP32 = (*TINY, "--precisions", "fp32", "--modes", "eager", "--device", "cpu")


pytestmark = pytest.mark.usefixtures("known_rates")


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *words])
    return int(stopped.value.code or 0)


def test_one_table_with_missing_rows_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*TINY, "--precisions", "fp32,tf32", "--modes", "eager,graph", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "unet, 486 parameters, batch 2, 16 pixels" in said
    assert "not measured: halfstep graph fp32: needs CUDA" in said
    assert "not measured: halfstep eager tf32: " in said
    assert "peak GB" not in said


def test_a_workload_is_meant_though_a_folder_has_its_name_and_rows_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unet").mkdir()
    monkeypatch.chdir(tmp_path)
    assert exit_code(*FP32, "--json", f"data.dir={tmp_path}") == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["problem"]["workload"] == "unet"
    assert f"data.dir={tmp_path} is not read" in said.err
    first, again = [line for line in said.err.splitlines() if line.startswith("measuring")]
    assert first == "measuring halfstep eager fp32"
    assert again == "measuring halfstep eager fp32 again"


@pytest.mark.parametrize(("turn", "measured"), [(1, 1), (2, 2)], ids=["second row", "first row again"])
def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, turn: int, measured: int
) -> None:
    real, turns = bench_module.measure_runner, itertools.count()

    def interrupted(*arguments: Any) -> Row:
        if next(turns) == turn:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(bench_module, "measure_runner", interrupted)
    file = tmp_path / "b.json"
    words = (*TINY, "--precisions", "fp32", "--modes", "eager,auto", "--device", "cpu", "--save", str(file))
    assert exit_code(*words) == 130
    reasons = [row["reason"] for row in json.loads(file.read_text())["rows"]]
    assert reasons == [""] * measured + [bench_module.STOPPED] * (2 - measured)
    assert "stopped by Ctrl-C" in capsys.readouterr().out


def test_ctrl_c_before_the_first_row_is_measured_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> Row:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_module, "measure_runner", interrupted)
    saved = tmp_path / "b.json"
    assert exit_code(*FP32, "--save", str(saved)) == 130
    assert not saved.exists()
    assert f"{saved} was not written: nothing was measured" in capsys.readouterr().err


def test_auto_is_the_precision_that_a_run_takes_here_and_the_reason_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = decide("auto", probe("cpu"))
    words = (*TINY, "--precisions", f"auto,{taken.granted}", "--modes", "eager", "--device", "cpu", "--json")
    assert exit_code(*words) == 0
    said = capsys.readouterr()
    assert [row["precision"] for row in json.loads(said.out)["rows"]] == [taken.granted]
    assert f"auto means {taken.granted} here: {taken.reason}" in said.err


def test_json_alone_is_on_standard_output_and_files_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "bench.json"
    assert exit_code(*FP32, "--json", "--save", str(saved)) == 0
    found = json.loads(capsys.readouterr().out)
    [row] = found["rows"]
    assert row["ms_min"] <= row["ms"] <= row["ms_max"]
    assert row["floor_share"] > 0
    assert found["versions"]["torch"]
    assert found["command"].startswith("halfstep")
    assert json.loads(saved.read_text()) == found
    assert exit_code(*FP32, "--save", str(saved)) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_bench_is_saved_whatever_becomes_of_showing_it_where_its_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    monkeypatch.setattr("halfstep_train.report.bench_view.show_bench", None)
    with pytest.raises(TypeError):
        main(["bench", *FP32, "--save", str(link), "--force"])
    assert link.is_symlink()
    assert json.loads(target.read_text())["rows"]


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_a_peer_that_is_not_installed_is_named_with_its_command_before_anything_is_timed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (name, "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("halfstep_train.bench.bench.bench", None)  # calling it raises a TypeError
    assert exit_code(*FP32, "--against", f"plain,{name}") == 2
    assert f"pip install {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("unet", "--steps", "3"), "--steps 3: must be greater than or equal to 10"),
        (("unet", "--modes", "eagre"), "unknown --modes 'eagre'"),
        (("unet", "--modes", ""), "--modes '' is empty"),
        (("unet", "--against", "keras"), "fix: one of plain, lightning, accelerate"),
        (("unet", "--against", "plain:graph"), "did you mean 'plain:graphs'"),
        (("unet", "--precisions", "fp7"), "fp7"),
        (("unet", "--batch-size", "0"), "--batch-size 0: must be greater than or equal to 1"),
        (("unet", "train.fast=off"), "fix: --modes eager"),
        ((), "Missing argument"),
        (("unet", "ema.enabled=true", "--against", "plain"), "ema.enabled=true, but peers train with false"),
    ],
)
def test_mistakes_are_clear_errors(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*words, "--device", "cpu") == 2
    assert said in capsys.readouterr().err


def test_what_no_memory_could_hold_is_refused_before_it_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("unet", "model.base_channels=8192", "--device", "cpu") == 2
    said = capsys.readouterr().err
    assert "error: unet at batch" in said
    assert "fix: a smaller model, or --device cuda" in said
