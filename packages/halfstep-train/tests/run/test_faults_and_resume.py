"""What is hardest to resume: a guard's stop, a rollback, patience, buffers that are not stored, a lost mark."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_workload
from halfstep.errors import Interrupted, TrainingStopped
from halfstep_train.run.checkpoint import Checkpoints
from whole_runs import assert_same_run, events, learning_rates, newest, resume, run


def assert_interruption_changes_nothing(tmp_path: Path, settings: dict[str, Any], *, at_step: int) -> Path:
    """The whole run, after it was compared with one that was interrupted and resumed."""
    flag = tmp_path / "signal"
    settings = {**settings, "model.options.signal_file": str(flag), "model.options.signal_step": at_step}
    whole = run(tmp_path / "whole", settings)
    flag.touch()
    with pytest.raises(Interrupted):
        run(tmp_path / "parts", settings)
    resume(tmp_path / "parts")
    assert_same_run(whole, tmp_path / "parts")
    return whole


def test_a_run_the_guard_stopped_goes_on_with_the_next_window(tmp_path: Path) -> None:
    settings = {"model.options.poisoned": [2, 3, 4, 5, 6, 7], "train.epochs": 3}
    with pytest.raises(TrainingStopped, match="5 bad steps"):
        run(tmp_path / "run", settings)
    stopped = newest(tmp_path / "run").state
    # Six steps an epoch, one batch each: the ninth step was the third of the second epoch.
    assert stopped["step"]["attempted"] == 9
    assert stopped["position"] == {"epoch": 1, "batch": 3}
    resume(tmp_path / "run")
    assert newest(tmp_path / "run").state["step"]["attempted"] == 18


ROLLBACK = {
    "guard.on_fault": "rollback", "guard.margin": 2, "guard.snapshot_every": 4, "guard.max_consecutive": 2,
    "train.report_every": 1,
}  # fmt: skip


def test_a_rollback_before_the_interruption_and_one_after_it_change_nothing(tmp_path: Path) -> None:
    settings = {**ROLLBACK, "train.epochs": 4, "train.checkpoint_every": 3, "model.options.poisoned": [9, 10, 17, 18]}
    whole = assert_interruption_changes_nothing(tmp_path, settings, at_step=14)
    assert len(events(whole, "rollback")) == 2


def test_plateau_and_early_stopping_remember_their_patience(tmp_path: Path) -> None:
    settings = {
        "schedule.name": "plateau", "schedule.patience": 1, "schedule.factor": 0.5, "optimizer.lr": 1e-9,
        "train.epochs": 20, "train.early_stopping_patience": 5, "train.report_every": 1,
    }  # fmt: skip
    whole = assert_interruption_changes_nothing(tmp_path, settings, at_step=20)
    assert newest(whole).state["position"]["epoch"] == 6
    assert learning_rates(whole)[-1] < 1e-9


class Drifting(tiny_workload.Net):
    """Its output depends on a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(1)
        return super().forward(x) * (1 + 0.1 * self.seen)


def test_buffers_that_state_dict_leaves_out_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_workload, "Net", Drifting)
    whole = assert_interruption_changes_nothing(tmp_path, {"train.epochs": 2}, at_step=8)
    assert "seen" not in newest(whole).model


class Killed(BaseException):
    """As SIGKILL: nothing may catch it."""


def test_a_kill_between_a_checkpoint_and_its_mark_loses_no_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "mark_best", killed)
        with pytest.raises(Killed):
            run(tmp_path / "run", {"train.epochs": 1})
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.find_best() is None
    resume(tmp_path / "run")
    assert checkpoints.find_best() == checkpoints.list_all()[-1]
    mark = json.loads((checkpoints.folder / "best.json").read_text())
    assert mark["value"] == newest(tmp_path / "run").state["stopping"]["best"]


def test_a_validation_forced_by_max_steps_does_not_try_patience(tmp_path: Path) -> None:
    settings = {"optimizer.lr": 1e-12, "train.epochs": 9, "train.early_stopping_patience": 3,
                "schedule.name": "constant"}  # fmt: skip
    whole = run(tmp_path / "whole", settings)
    parts = run(tmp_path / "parts", {**settings, "train.max_steps": 9})
    resume(parts, "train.max_steps=0")
    ends = [newest(folder).state["step"]["attempted"] for folder in (whole, parts)]
    assert ends == [24, 24]


def test_only_as_many_checkpoints_stay_as_asked_for(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", {"train.epochs": 4, "train.checkpoint_every": 2, "train.checkpoints_total_limit": 2})
    checkpoints = Checkpoints(folder / "checkpoints")
    ordinary = [path for path in checkpoints.list_all() if path != checkpoints.find_best()]
    assert checkpoints.find_best() is not None
    assert 1 <= len(ordinary) <= 2
    assert checkpoints.list_all()[-1].name.startswith("step-00000024")


def test_a_warmup_in_epochs_rises_over_its_steps(tmp_path: Path) -> None:
    settings = {"schedule.name": "constant", "schedule.warmup_epochs": 0.5, "train.epochs": 6, "optimizer.lr": 3e-3,
                "train.report_every": 1}  # fmt: skip
    rates = learning_rates(run(tmp_path / "run", settings))
    # The facts of a step are read two steps later; a record of a step shows the newest read ones.
    distinct = [rate for rate, _ in itertools.groupby(rates)]
    assert distinct == pytest.approx([1e-3, 2e-3, 3e-3])


def test_spikes_are_skipped_on_request(tmp_path: Path) -> None:
    settings = {"train.epochs": 4, "guard.spike_window": 8, "guard.spike_threshold": 1e-6, "optimizer.lr": 1e-9,
                "guard.max_consecutive": 99}  # fmt: skip
    watched = run(tmp_path / "watched", settings)
    skipping = run(tmp_path / "skipping", {**settings, "guard.skip_spikes": True})
    assert events(watched, "spike")
    assert not events(watched, "skipped")
    assert newest(watched).state["step"]["committed"] == 24
    num_skipped = len(events(skipping, "skipped"))
    assert num_skipped > 0
    assert newest(skipping).state["step"]["committed"] == 24 - num_skipped
