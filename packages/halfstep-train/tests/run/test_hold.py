"""guard.hold: after a fault nothing commits until it is kept, and the run ends with the bits it would have had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfstep.errors import ConfigError, TrainingStopped
from halfstep.evidence import capsule
from halfstep_train.run.evidence import replay_run
from whole_runs import assert_same_run, resume, run


def pair(tmp_path: Path, settings: dict[str, Any]) -> list[Path]:
    """The same run without and with hold."""
    folders = []
    for holds in (False, True):
        out = tmp_path / f"hold_{holds}"
        try:
            run(out, {**settings, "guard.hold": holds})
        except TrainingStopped:
            assert "guard.on_fault" not in settings
        folders.append(out)
    return folders


FAULTS = {
    "in_a_row": {"model.options.poisoned": [2, 3, 5, 6, 7], "train.epochs": 3, "train.accumulate": 2},
    "the_first_and_the_last": {"model.options.poisoned": [0, 4, 5, 11], "train.epochs": 2},
    "until_it_stops": {"model.options.poisoned": [3, 4, 5, 6, 7], "guard.max_consecutive": 3, "train.epochs": 3},
    "at_checkpoints_and_looks": {"model.options.poisoned": [1, 4, 5, 8], "train.epochs": 2, "train.checkpoint_every": 2,
                                 "ema.enabled": True, "train.validate_every_steps": 3},
    "rolled_back": {"model.options.poisoned": [4, 5, 6, 7], "guard.max_consecutive": 2, "guard.on_fault": "rollback",
                    "guard.snapshot_every": 1, "guard.margin": 1, "train.epochs": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_bit_equal_with_and_without_hold(name: str, tmp_path: Path) -> None:
    plain, held = pair(tmp_path, FAULTS[name])
    assert_same_run(plain, held)


def test_capsules_under_hold_are_exact(tmp_path: Path) -> None:
    plain, held = pair(tmp_path, {"model.options.poisoned": [2, 9], "train.epochs": 2})
    found = {
        folder: [capsule.read_capsule(path) for path in capsule.list_capsules(folder / "capsules")]
        for folder in (plain, held)
    }
    assert [(one.step, one.about["commits_after"]) for one in found[plain]] == [(2, 2), (9, 2)]
    assert [(one.step, one.about["commits_after"]) for one in found[held]] == [(2, 0), (9, 0)]
    assert found[held][0].inexact == ""
    assert replay_run(held / "capsules" / "00000002").remedy is not None


def test_a_capsule_that_a_checkpoint_hastens_is_exact_too_and_the_run_resumes(tmp_path: Path) -> None:
    settings = {"model.options.poisoned": [1, 2], "train.checkpoint_every": 1, "train.max_steps": 3, "train.epochs": 2}
    plain, held = pair(tmp_path, settings)
    (kept,) = capsule.list_capsules(held / "capsules")
    assert capsule.read_capsule(kept).about["commits_after"] == 0
    for folder in (plain, held):
        resume(folder, "train.max_steps=9", allow_changes=True)
    assert_same_run(plain, held)


def test_routine_overflow_of_fp16_does_not_hold(tmp_path: Path) -> None:
    fp16 = {"precision.default": "fp16", "precision.simulate": True, "model.options.poisoned": [1, 2, 3, 4, 5, 6],
            "scaler.init_scale": 8.0, "train.epochs": 2}  # fmt: skip
    plain, held = pair(tmp_path, fp16)
    assert_same_run(plain, held)
    (kept,) = capsule.list_capsules(held / "capsules")  # scales 8, 4 and 2 were the search for one
    assert (kept.name, capsule.read_capsule(kept).about["commits_after"]) == ("00000004", 0)


def test_phases_refuse_it_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"guard\.hold=true does not work with phases"):
        run(tmp_path / "run", {"guard.hold": True}, "phased_workload:build")
