"""Data that changed in place between a run and its resume."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from halfstep_train.run.train import train
from halfstep_train.workloads import load
from halfstep_train.workloads.segmentation.demo import write_demo
from whole_runs import run

SMALL = {"data.image_size": 16, "model.base_channels": 2, "model.depth": 1, "train.batch_size": 2, "device": "cpu",
         "train.max_steps": 1, "data.num_workers": 0, "train.fast": "off"}  # fmt: skip


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A run of one step on the data next to it."""
    write_demo(tmp_path / "data", num_images=6, side=16)
    settings = {**SMALL, "data.dir": str(tmp_path / "data")}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return train(load("unet", overrides=overrides), out=tmp_path / "run")


def resumed(folder: Path, *overrides: str) -> None:
    train(load(str(folder / "config.yaml"), overrides=["train.max_steps=2", *overrides]), resume=folder)


def test_a_mask_that_was_painted_over_is_noticed_and_named(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = sorted((stopped.parent / "data" / "masks").iterdir())[2]
    with Image.open(mask) as picture:
        picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mask)
    later_s = (stopped / "data.json").stat().st_mtime + 5
    os.utime(mask, (later_s, later_s))
    resumed(stopped)
    said = capsys.readouterr().err
    assert f"changed in size or time since this run started (written since: {mask})" in said


def test_data_that_stayed_as_they_were_are_not_spoken_of(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped.parent / "data").rename(stopped.parent / "moved")
    resumed(stopped, f"data.dir={stopped.parent / 'moved'}")
    assert "sizes or times" not in capsys.readouterr().err


def test_files_that_are_gone_are_counted_and_not_taken_for_copies(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("imgs", "masks"):
        sorted((stopped.parent / "data" / folder).iterdir())[2].unlink()
    config = load(str(stopped / "config.yaml"), overrides=["train.max_steps=2"])
    train(config, resume=stopped, allow_changes=True)
    said = capsys.readouterr().err
    assert "started with 12 data files, there are 10 now" in said
    assert "copies" not in said


def test_a_copy_is_said_to_be_perhaps_one(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = shutil.copytree(stopped.parent / "data", stopped.parent / "copy", copy_function=shutil.copyfile)
    for path in Path(copied).rglob("*.png"):
        os.utime(path, (1e9, 1e9))
    resumed(stopped, f"data.dir={copied}")
    assert "none was written since, so they may be copies" in capsys.readouterr().err


def test_samples_that_are_no_files_leave_no_record(tmp_path: Path) -> None:
    assert not (run(tmp_path / "run", {"train.max_steps": 1}) / "data.json").exists()
