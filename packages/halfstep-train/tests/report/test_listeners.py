"""Records reach trackers and callbacks; what fails there is reported and never costs a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import ConfigError
from halfstep_train.report.listeners import Callbacks, Listener, open_trackers, refuse_missing, select_scalars
from halfstep_train.report.metrics_file import cut_back, find_last_step, read
from halfstep_train.report.run_report import RunReport


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def tracked(folder: Path) -> RunReport:
    after_step = find_last_step(folder / "metrics.jsonl")
    settings, plan = {"train": {"epochs": 3}}, {"granted": "bf16", "rows": ()}
    return RunReport(
        folder, quiet=True, listeners=open_trackers(["tensorboard"], folder, settings, plan, after_step=after_step)
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_a_resumed_run_replaces_what_tensorboard_had_beyond_the_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra track: this was NOT tested")
    first = tracked(tmp_path)
    assert first.trackers == [("tensorboard", f"tensorboard --logdir {tmp_path / 'tensorboard'}")]
    for step in (1, 2, 3, 4):
        first.log({"kind": "train", "step": step, "epoch": 1, "loss": float(step), "note": "text"})
    first.close()
    cut_back(tmp_path / "metrics.jsonl", 2)
    second = tracked(tmp_path)
    second.log({"kind": "train", "step": 3, "epoch": 1, "loss": 30.0})
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [record["loss"] for record in read(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 30.0]


def test_a_missing_package_is_one_error_that_names_the_setting_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        refuse_missing(["wandb", "mlflow"])
    assert str(caught.value).startswith("log.track=wandb needs the package wandb")
    assert "pip install 'wandb>=0.28' 'mlflow>=3.17'" in caught.value.fix


def test_trackers_get_the_numbers_of_a_record_by_its_kind() -> None:
    record = {"kind": "val", "step": 3, "epoch": 1, "total_steps": 9, "iou": 0.5, "best": True, "files": ["a"]}
    assert select_scalars(record) == {"val/iou": 0.5}


class Failing(Listener):
    """A tracker whose connection is lost after one record."""

    name, where = "elsewhere", ""

    def __init__(self) -> None:
        self.got: list[int] = []

    def add(self, record: Mapping[str, Any]) -> None:
        if self.got:
            raise ConnectionError("no route to host")
        self.got.append(record["step"])

    def close(self, *, is_complete: bool) -> None:
        raise AssertionError("it was dropped")


def test_a_tracker_that_fails_is_dropped_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = Failing()
    report = RunReport(tmp_path, listeners=[failing])
    for step in (1, 2, 3):
        report.log({"kind": "train", "step": step})
    report.close()
    assert failing.got == [1]
    assert capsys.readouterr().err.splitlines() == [
        "warning: elsewhere failed and gets no more records of this run (ConnectionError: no route to host)"
    ]
    assert len(read(tmp_path / "metrics.jsonl")) == 3


def test_a_callback_gets_copies_of_all_records_until_one_raises() -> None:
    seen: list[int] = []

    def fn(event: dict[str, Any]) -> None:
        seen.append(event.pop("step"))
        if seen[-1] == 2:
            raise KeyError("loss/critic")

    callbacks = Callbacks({"mine:fn": fn})
    records = [{"kind": "train", "step": step} for step in (1, 2, 3)]
    for record in records:
        callbacks.add(record)
    assert seen == [1, 2]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert callbacks.failure is not None
    assert callbacks.failure.what.startswith("the callback mine:fn raised KeyError: 'loss/critic' (")
    assert "test_listeners.py:" in callbacks.failure.what
