"""Data that changed in place between a run and its resume."""

from __future__ import annotations

import json
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


CHANGED = "changed in name, size or time since this run started"


def test_a_mask_that_was_painted_over_is_noticed(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = sorted((stopped.parent / "data" / "masks").iterdir())[2]
    with Image.open(mask) as picture:
        picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(mask)
    resumed(stopped)
    assert CHANGED in capsys.readouterr().err


def test_data_that_were_moved_are_the_same(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stopped.parent / "data").rename(stopped.parent / "moved")
    resumed(stopped, f"data.dir={stopped.parent / 'moved'}")
    assert CHANGED not in capsys.readouterr().err


def test_samples_that_are_no_files_leave_no_record(tmp_path: Path) -> None:
    assert not (run(tmp_path / "run", {"train.max_steps": 1}) / "data.json").exists()
