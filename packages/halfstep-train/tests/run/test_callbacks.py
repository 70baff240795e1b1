"""`train.callbacks`: called with the records of metrics.jsonl; an exception stops the run, which can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfstep.errors import ConfigError, TrainingStopped
from halfstep_train.report.metrics_file import read
from whole_runs import assert_same_run, resume, run

NOTES = """
import json, pathlib
def fn(event):
    with open({file!r}, "a") as file:
        file.write(json.dumps([event["kind"], event["step"]]) + "\\n")
    if [event["kind"], event["step"]] == {fails!r}:
        raise RuntimeError("no disk for my notes")
"""


def run_with(out: Path, *callbacks: str) -> Path:
    return run(out, {"train.epochs": 2, "train.report_every": 1, "train.callbacks": callbacks})


def write_module(folder: Path, name: str, *, fails: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = folder / f"{name}.jsonl"
    (folder / f"{name}.py").write_text(NOTES.format(file=str(file), fails=fails))
    monkeypatch.syspath_prepend(folder)
    return file


@pytest.mark.parametrize("fails", [["train", 3], ["val", 12]])
def test_a_failing_callback_ends_the_run_with_its_line_and_a_checkpoint_from_which_it_continues_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: list[object]
) -> None:
    name = f"failing_notes_{fails[0]}_{fails[1]}"
    file = write_module(tmp_path, name, fails=fails, monkeypatch=monkeypatch)
    with pytest.raises(TrainingStopped) as caught:
        run_with(tmp_path / "run", f"{name}:fn")
    assert f"the callback {name}:fn raised RuntimeError: no disk for my notes (" in caught.value.what
    assert f"{name}.py:7)" in caught.value.what
    assert f"the run is saved in {tmp_path / 'run' / 'checkpoints' / 'step-'}" in caught.value.why
    assert not any(path.name.count("-") > 1 for path in (tmp_path / "run" / "checkpoints").iterdir()), "saved once"
    assert f"halfstep train --resume {tmp_path / 'run'}" in caught.value.fix
    assert json.loads(file.read_text().splitlines()[-1]) == fails, "not called again"
    resume(tmp_path / "run", "train.callbacks=[]", "log.quiet=true")
    assert_same_run(tmp_path / "run", run_with(tmp_path / "whole"))


def test_callbacks_get_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_module(tmp_path, "patient_notes", fails=None, monkeypatch=monkeypatch)
    folder = run_with(tmp_path / "run", "patient_notes:fn")
    records = [[record["kind"], record["step"]] for record in read(folder / "metrics.jsonl")]
    assert [json.loads(line) for line in file.read_text().splitlines()] == records


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("notes", "'notes' is not an import path such as my_pkg.my_mod:fn"),
        ("json.dumps", "fix: did you mean json:dumps?"),
        ("no_such_module:fn", "train.callbacks 'no_such_module:fn' cannot be imported"),
        ("json:nothing", "json has no function 'nothing'"),
        ("shutil:copyfile", "shutil:copyfile cannot be called as copyfile(event)"),
    ],
)
def test_a_callback_that_cannot_be_called_is_an_error_before_training(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_with(tmp_path / "run", path)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()
