"""Whole runs in bf16-true: stored states come back bit-exactly; a run with another rounding starts them at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep_train.run.train import train
from halfstep_train.workloads import load
from whole_runs import final_state, newest, resume, run

HALF: dict[str, Any] = {"precision.default": "bf16-true", "precision.simulate": True, "schedule.name": "constant",
                        "train.epochs": 3}  # fmt: skip


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


def lows(folder: Path) -> list[torch.Tensor]:
    states = newest(folder).state["step"]["optimizers"][0]["state"]
    return [own["low"] for own in states.values() if "low" in own]


@pytest.mark.parametrize("rounding", ["split", "stochastic", "nearest"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, rounding: str) -> None:
    settings = {**HALF, "precision.rounding": rounding, "train.accumulate": 2}
    whole = run(tmp_path / "whole", {**settings, "train.max_steps": 6})
    part = run(tmp_path / "part", {**settings, "train.max_steps": 4})
    resume(part, "train.max_steps=6")
    left, right = final_state(whole)[0], final_state(part)[0]
    assert all(torch.equal(left[name], right[name]) for name in left if not name.startswith("generators"))
    assert bool(lows(whole)) == (rounding == "split")
    weights = {name: t for name, t in left.items() if name.startswith("model.") and t.is_floating_point()}
    assert torch.bfloat16 in {t.dtype for t in weights.values()}


def test_rounding_to_nearest_is_warned_of_and_its_losses_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**HALF, "precision.rounding": "nearest", "log.quiet": False, "train.max_steps": 3}
    run(tmp_path / "run", settings)
    told = said(capsys)
    assert "precision.rounding=nearest" in told
    assert "weights: bf16, rounded to nearest" in told
    assert "lost updates" in told


def test_an_optimizer_that_cannot_keep_the_other_bits_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", {**HALF, "optimizer.name": "sgd", "log.quiet": False, "train.max_steps": 2})
    assert "SGD rounds" in said(capsys)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_run_stored_with_another_rounding_goes_on_split_from_low_halves_of_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: int
) -> None:
    settings = {**HALF, "precision.rounding": "stochastic", "train.max_steps": 2, "optimizer.moment_bits": bits}
    folder = run(tmp_path / "run", settings)
    more = ["precision.rounding=split", "train.max_steps=4", "log.quiet=false"]
    train(load(str(folder / "config.yaml"), overrides=more), resume=folder, allow_changes=True)
    assert "low halves of the bf16 weights start at zero" in said(capsys)
    found = lows(folder)
    assert found
    assert all(bool(low.any()) for low in found if low.numel() > 8)
    resume(folder, "train.max_steps=6")
    assert lows(folder)
