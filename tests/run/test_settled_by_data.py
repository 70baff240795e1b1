from __future__ import annotations

from pathlib import Path

import pytest

from data import data_sets
from halfstep.errors import CheckpointError
from halfstep.run.train import train
from halfstep.use.evaluate import evaluate
from halfstep.workloads import load
from tiny_runs import Told

TINY = [
    "device=cpu", "precision=fp32", "train.fast=off", "model.base_channels=1", "model.depth=2", "train.batch_size=1",
    "train.epochs=1", "data.num_workers=0",
]  # fmt: skip


def trained(root: Path, out: Path, *more: str) -> Path:
    return train(load("unet", overrides=[f"data.dir={root}", *TINY, *more]), out=out)


def test_the_size_of_the_pictures_is_stored_and_a_resumed_run_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_sets.tgs(tmp_path / "set")
    run = trained(tmp_path / "set", tmp_path / "run")
    assert "24: the pictures have 24×16 pixels" in capsys.readouterr().out
    stored = load(str(run / "config.yaml"))
    assert stored.config.data.image_size == 24
    train(load(str(run / "config.yaml"), overrides=["train.epochs=2"]), resume=run)
    assert load(str(run / "config.yaml")).config.data.image_size == 24
    with pytest.raises(CheckpointError, match=r"data\.image_size: 24 -> 512"):
        train(load(str(run / "config.yaml"), overrides=["data.image_size=512"]), resume=run)


def test_a_run_on_one_layout_is_evaluated_on_its_own_validation_part_and_on_another_folder(tmp_path: Path) -> None:
    data_sets.drive(tmp_path / "drive")
    run = trained(tmp_path / "drive", tmp_path / "run")
    told = Told(tmp_path)
    assert evaluate(run, report=told.report).samples == 2
    for folder, samples in ((tmp_path / "drive" / "training", 2), (tmp_path / "salt", 3)):
        data_sets.tgs(tmp_path / "salt")
        assert evaluate(run, report=told.report, data=folder).samples == samples


def test_a_validation_folder_of_the_run_is_not_looked_for_in_other_data(tmp_path: Path) -> None:
    for part in ("early", "late"):
        for name in ("1", "2"):
            data_sets.picture(tmp_path / "own" / part / f"{name}.png")
            data_sets.mask(tmp_path / "own" / f"{part}_masks" / f"{name}.png", 0, 255)
            data_sets.picture(tmp_path / "other" / "early" / f"{name}.png")
            data_sets.mask(tmp_path / "other" / "early_masks" / f"{name}.png", 0, 255)
    named = ["data.images=early", "data.masks=early_masks", "data.val_images=late", "data.val_masks=late_masks"]
    run = trained(tmp_path / "own", tmp_path / "run", *named)
    assert evaluate(run, report=Told(tmp_path).report, data=tmp_path / "other").samples == 2
