"""Looks at the model by steps: validation in mid-epoch, and samples that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from halfstep.errors import ConfigError, Interrupted
from whole_runs import assert_same_run, final_state, learning_rates, records, resume, run

BY_STEPS = {"train.validate_every_steps": 4, "train.epochs": 3, "train.report_every": 1, "ema.enabled": True}
"""Six steps an epoch: validations at 4, 8, 12 and 16, and at 18, where the run ends."""


def validated_at(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder) if record["kind"] == "val"]


def test_validation_comes_by_steps_and_once_more_at_the_end(tmp_path: Path) -> None:
    out = run(tmp_path / "run", BY_STEPS)
    assert validated_at(out) == [4, 8, 12, 16, 18]
    marked = json.loads((out / "checkpoints" / "best.json").read_text())
    best = max((r for r in records(out) if r["kind"] == "val" and r["best"]), key=lambda r: r["step"])
    assert marked["checkpoint"].startswith(f"step-{best['step']:08d}")
    assert marked["value"] == best["accuracy"]


def test_a_run_that_ends_with_a_validation_does_not_validate_twice(tmp_path: Path) -> None:
    assert validated_at(run(tmp_path / "run", {**BY_STEPS, "train.max_steps": 8})) == [4, 8]
    assert validated_at(run(tmp_path / "whole", {**BY_STEPS, "train.validate_every_steps": 9})) == [9, 18]


@pytest.mark.parametrize("at_step", [8, 9])
def test_stopped_at_a_validation_or_between_two_and_resumed_it_is_the_same_run(tmp_path: Path, at_step: int) -> None:
    """The signal comes in the window of that step: before the validation at 8, and after it."""
    word = tmp_path / "signal"
    options = {"signal_file": str(word), "signal_step": at_step - 1}
    settings = {**BY_STEPS, "model.options": options, "schedule.name": "plateau", "schedule.patience": 1}
    whole = run(tmp_path / "whole", settings)
    word.touch()
    with pytest.raises(Interrupted):
        run(tmp_path / "halves", settings)
    resume(tmp_path / "halves")
    assert_same_run(whole, tmp_path / "halves")


def test_patience_and_plateau_count_validations_by_steps(tmp_path: Path) -> None:
    settings = {**BY_STEPS, "train.validate_every_steps": 2, "optimizer.lr": 1e-12, "train.epochs": 9}
    early = run(tmp_path / "early", {**settings, "train.early_stopping_patience": 2, "ema.enabled": False})
    assert validated_at(early) == [2, 4, 6]
    cut = run(tmp_path / "cut", {**settings, "schedule.name": "plateau", "schedule.patience": 1, "train.max_steps": 8})
    assert len(set(learning_rates(cut))) > 1


def sampled(out: Path, workload: str, **settings: Any) -> Path:
    values = {name.replace("__", "."): value for name, value in settings.items()}
    return run(out, {**BY_STEPS, **values}, f"drawing_workload:{workload}")


def test_a_run_with_samples_is_bit_equal_to_one_without(tmp_path: Path) -> None:
    without, with_samples = (
        sampled(tmp_path / str(every), "build_sampling", train__sample_every=every) for every in (0, 3)
    )
    (tensors, plain), (other, other_plain) = final_state(without), final_state(with_samples)
    assert all(np.array_equal(tensors[name].numpy(), other[name].numpy(), equal_nan=True) for name in tensors)
    differing = {k for k, v in json.loads(plain).items() if json.loads(other_plain)[k] != v}
    assert differing == {"sampled_at"}
    assert records(without) == records(with_samples)
    assert not (without / "report" / "samples").exists()


def test_samples_are_pictures_and_texts_of_the_averaged_weights_by_step(tmp_path: Path) -> None:
    out = sampled(tmp_path / "run", "build_sampling", train__sample_every=6)
    folders = sorted((out / "report" / "samples").iterdir())
    assert [folder.name for folder in folders] == ["00000006", "00000012", "00000018"]
    assert sorted(path.name for path in folders[0].iterdir()) == ["colour.png", "grey.png", "words.txt"]
    with Image.open(folders[0] / "colour.png") as picture:
        assert picture.mode == "RGB"
    assert len({(folder / "words.txt").read_text() for folder in folders}) == 3  # one key, other weights


def test_a_sample_of_another_form_is_refused_with_the_form(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a' as a ndarray of float64") as error:
        sampled(tmp_path / "run", "build_bad_sampling", train__sample_every=1)
    assert "uint8" in error.value.fix


def test_samples_nobody_makes_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", {"train.sample_every": 2, "train.max_steps": 2})
    assert "train.sample_every has no effect" in capsys.readouterr().err
