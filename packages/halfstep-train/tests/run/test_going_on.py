"""Resuming what need not, or cannot, be resumed; and what is not part of a run."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfstep.errors import CheckpointError
from halfstep_train.cli.main import main
from halfstep_train.run.checkpoint import Checkpoint, Checkpoints
from halfstep_train.run.folder import RunFolder
from halfstep_train.use.open_run import load_weights, open_run
from halfstep_train.workloads import load
from tiny_workload import Net
from whole_runs import newest, records, resume, run, stored_lines


def test_a_finished_run_says_so_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 2})
    capsys.readouterr()
    main_exits_with(0, "train", "--resume", str(folder))
    said = capsys.readouterr().out
    assert said == f"{folder} is finished after 2 of 2 epochs; to continue, add train.epochs=4 to the command\n"
    resume(folder, "train.epochs=4")
    assert newest(folder).state["step"]["attempted"] == 24


def main_exits_with(code: int, *words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert (stopped.value.code or 0) == code


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"train.max_steps": 3, "train.epochs": 100},
            "finished after 3 of 3 steps; to continue, add train.max_steps=6 to the command, or 0 for all 100 epochs",
        ),
        (
            {"train.early_stopping_patience": 1, "optimizer.lr": 1e-12},
            "finished by early stopping after 2 of 100 epochs; to continue, add train.early_stopping_patience=0",
        ),
    ],
)
def test_other_ends_are_named_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object], said: str
) -> None:
    folder = run(tmp_path / "run", settings)
    before = stored_lines(folder)
    capsys.readouterr()
    resume(folder)
    assert said in capsys.readouterr().out
    assert stored_lines(folder) == before


@pytest.mark.parametrize(("name", "said"), [("nowhere", "is not a run folder"), ("empty", "is not a run folder")])
def test_resuming_what_is_no_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    main_exits_with(2, "train", "--resume", str(tmp_path / name))
    error = capsys.readouterr().err
    assert said in error
    assert "give the folder that `halfstep train` printed" in error


def test_a_run_from_a_device_that_is_not_here_names_the_flag_to_go_on(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.max_steps": 2})
    stored = RunFolder(folder)
    stored.write_plan(replace(stored.read_plan(), device="cuda:5"))
    with pytest.raises(CheckpointError, match="trained on cuda:5") as refused:
        resume(folder, "train.max_steps=3")
    assert "--device cpu --allow-changes" in refused.value.fix or "--device cuda:0" in refused.value.fix


def test_quiet_is_for_one_call_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 1, "log.quiet": True})
    assert not load(str(folder / "config.yaml")).config.log.quiet
    capsys.readouterr()
    resume(folder, "train.epochs=2")
    assert "Epoch 2/2" in capsys.readouterr().out
    resume(folder, "train.epochs=3", "log.quiet=true")
    said = capsys.readouterr().out
    assert "Epoch 3/3" not in said
    assert not load(str(folder / "config.yaml")).config.log.quiet


def test_checkpoint_files_have_the_mode_of_any_other_file(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        whole = Checkpoint(model={"w": torch.ones(2)}, ema={}, state={})
        path = Checkpoints(tmp_path).save(1, whole)
    finally:
        os.umask(former)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_a_stored_run_is_used_with_the_buffers_that_state_dict_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny_workload

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += 1
            return super().forward(x)

    monkeypatch.setattr(tiny_workload, "Net", Counting)
    folder = run(tmp_path / "run", {"train.max_steps": 3})
    opened = open_run(folder, checkpoint="last")
    plan = RunFolder(folder).read_plan()
    assert load_weights(opened, Counting(), plan).get_buffer("seen") == 3


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_every_step_of_a_short_run_has_its_own_line_of_metrics(tmp_path: Path, steps: int) -> None:
    """Facts come two steps later, and for the last ones at the epoch's end: none is lost, none moved."""
    folder = run(tmp_path / "short", {"train.max_steps": steps, "schedule.name": "linear", "schedule.warmup_steps": 0})
    lines = [record for record in records(folder) if record["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    rates = [line["lr"] for line in lines]
    assert rates == sorted(set(rates), reverse=True)
    many = run(tmp_path / "asked", {"train.max_steps": steps, "train.report_every": 3})
    steps_of_many = [record["step"] for record in records(many) if record["kind"] == "train"]
    assert steps_of_many == [step for step in range(1, steps + 1) if step % 3 == 0 or step < 3]
