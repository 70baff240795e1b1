"""Changed settings of a resumed run: each does what it says, stays, and is refused or named where it must be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.errors import CheckpointError, Interrupted
from halfstep.step.randomness import choose_algorithms, read_generators, restore_generators
from halfstep_train.run import train as training
from halfstep_train.run.engine import Engine
from halfstep_train.run.folder import Changes, RunFolder
from halfstep_train.run.loop import Loop
from halfstep_train.run.stored_state import capture_state, restore_state
from halfstep_train.workloads import load
from whole_runs import TINY, assemble_run, config_of, learning_rates, newest, resume, run, small_disk


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """Every loop that ran."""
    seen: list[Loop] = []
    original = Loop.run
    monkeypatch.setattr(Loop, "run", lambda self: (seen.append(self), original(self))[1])
    return seen


def one_epoch(tmp_path: Path, **more: Any) -> Path:
    return run(tmp_path / "run", {"train.epochs": 1, **more})


def test_another_precision_is_decided_and_stored(tmp_path: Path, loops: list[Loop]) -> None:
    folder = one_epoch(tmp_path)
    resume(folder, "precision.default=fp16", "precision.simulate=true", "train.epochs=2", allow_changes=True)
    assert json.loads((folder / "plan.json").read_text())["granted"] == "fp16"
    assert loops[-1].parts.plan.granted == "fp16"
    assert newest(folder).state["step"]["scaler"]["scale"] > 1
    resume(folder, "train.epochs=3")
    assert loops[-1].parts.plan.granted == "fp16"


@pytest.mark.parametrize(("change", "is_stale"), [("data.val_fraction=0.5", True), ("data.num_workers=1", False)])
def test_what_was_measured_is_decided_again_where_settings_of_the_data_change_the_step(
    tmp_path: Path, loops: list[Loop], change: str, is_stale: bool
) -> None:
    """Which of them are sizes is known to a family alone, so all do that may change a step."""
    folder = one_epoch(tmp_path)
    stored = RunFolder(folder)
    stored.write_plan(replace(stored.read_plan(), mode_reason="measured for other sizes"))
    resume(folder, change, "train.epochs=2", allow_changes=True)
    assert ("measured for other sizes" not in loops[-1].parts.plan.mode_reason) == is_stale


def test_options_of_the_optimizer_change_and_its_state_stays(tmp_path: Path, loops: list[Loop]) -> None:
    folder = one_epoch(tmp_path)
    changes = ("optimizer.weight_decay=0.5", "optimizer.betas=[0.5,0.6]", "train.epochs=2")
    resume(folder, *changes, allow_changes=True)
    optimizer = loops[-1].parts.step.optimizers[0]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert all(float(own["step"]) == 12 for own in optimizer.state.values())
    resume(folder, "train.epochs=3")
    assert loops[-1].parts.step.optimizers[0].param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("change", ["optimizer.name=sgd", "optimizer.decay_norms_and_biases=true"])
def test_another_optimizer_starts_anew_and_says_so(
    tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = one_epoch(tmp_path)
    resume(folder, change, "train.epochs=2", "log.quiet=false", allow_changes=True)
    assert "the optimizer starts without state" in capsys.readouterr().out
    assert newest(folder).state["position"]["epoch"] == 2


def test_a_run_may_change_to_plateau_and_back(tmp_path: Path) -> None:
    folder = one_epoch(tmp_path)
    resume(folder, "schedule.name=plateau", "train.epochs=2", allow_changes=True)
    assert newest(folder).state["plateau"]["factor"] == 1
    resume(folder, "schedule.name=constant", "train.epochs=3", allow_changes=True)
    assert newest(folder).state["position"]["epoch"] == 3


def test_rollback_may_be_asked_for_later(tmp_path: Path) -> None:
    folder = one_epoch(tmp_path)
    resume(folder, "guard.on_fault=rollback", "train.epochs=2", allow_changes=True)
    assert newest(folder).state["snapshots"]["start"] == 6


def test_weights_that_do_not_fit_are_an_error_and_leave_the_settings_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import nn

    import tiny_workload

    class Wider(tiny_workload.Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4 * 6 * 6, 5)

    folder = one_epoch(tmp_path)
    before = (folder / "config.yaml").read_text()
    monkeypatch.setattr(tiny_workload, "Net", Wider)
    with pytest.raises(CheckpointError, match="does not contain the weights of this model"):
        resume(folder, "train.epochs=2")
    assert (folder / "config.yaml").read_text() == before


def test_accepted_changes_hold_for_the_next_resume(tmp_path: Path) -> None:
    flag = tmp_path / "signal"
    folder = one_epoch(tmp_path, **{"model.options.signal_file": str(flag), "model.options.signal_step": 9})
    flag.touch()
    with pytest.raises(Interrupted):
        resume(folder, "train.epochs=3")
    resume(folder)
    assert newest(folder).state["position"]["epoch"] == 3
    assert load(str(folder / "config.yaml")).config.train.epochs == 3


@pytest.mark.parametrize(("schedule", "is_said"), [("cosine", True), ("constant", False)])
def test_a_schedule_that_follows_the_length_of_the_run_is_named_when_that_changes(
    tmp_path: Path, schedule: str, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = one_epoch(tmp_path, **{"schedule.name": schedule, "train.report_every": 1})
    resume(folder, "train.epochs=2", "log.quiet=false")
    said = " ".join(capsys.readouterr().out.split())
    assert (f"the {schedule} schedule depends on the length" in said) is is_said
    assert len(learning_rates(folder)) > 6


def test_settings_that_cannot_be_written_are_a_clear_error_and_leave_no_run_behind(tmp_path: Path) -> None:
    with small_disk(100), pytest.raises(CheckpointError, match=r"cannot write .*settled.json"):
        one_epoch(tmp_path)
    assert not (tmp_path / "run").exists()


def test_generators_of_gpus_that_are_gone_are_named() -> None:
    states = read_generators()
    assert restore_generators(states) == []
    more = states | {"cuda": [*states["cuda"], torch.zeros(16, dtype=torch.uint8)]}
    assert "random generators of the other devices start over" in restore_generators(more)[0]


def test_deterministic_mode_with_warnings_only_is_put_back_as_it_was() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with choose_algorithms(deterministic=True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_mode_to_run_steps_is_taken_and_stored(tmp_path: Path, loops: list[Loop]) -> None:
    folder = one_epoch(tmp_path)
    plan = RunFolder(folder).read_plan()
    assert plan.mode == "eager"
    RunFolder(folder).write_plan(replace(plan, mode="compile", channels_last=False))
    resume(folder, "train.fast=off", "train.epochs=2", allow_changes=True)
    assert loops[-1].engine.mode == "eager"
    assert json.loads((folder / "plan.json").read_text())["mode"] == "eager"
    resume(folder, "train.epochs=3")
    assert loops[-1].engine.mode == "eager"


def test_leaving_memory_low_leaves_its_small_moments_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"activation_budget": 1.0, "recompute": "none", "optimizer_bits": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "tune_plan", lambda plan, *others, **more: replace(plan, memory=small))
        folder = one_epoch(tmp_path, **{"train.memory": "low"})
    resume(folder, "train.memory=normal", "train.epochs=2", "log.quiet=false", allow_changes=True)
    assert "the optimizer starts without state" in capsys.readouterr().out
    assert json.loads((folder / "plan.json").read_text())["memory"] == {}


def test_an_optimizer_in_a_gpus_form_goes_on_in_the_form_of_the_cpu() -> None:
    parts = assemble_run(config_of({**TINY, "optimizer.name": "nadam"}))
    engine = Engine(parts, "eager", lambda text, level: pytest.fail(text))
    window = [next(parts.train_loader.iterate_epoch(0))]
    engine(window)
    checkpoint = capture_state(parts, {})
    for group in checkpoint.state["step"]["optimizers"][0]["param_groups"]:
        group["capturable"] = True
    restore_state(parts, checkpoint, Changes(keys=("device",)))
    assert not engine(window).read().is_bad
