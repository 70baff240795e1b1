from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data import data_sets
from halfstep.errors import CheckpointError
from halfstep_train.report.run_report import Bar
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.workloads import build, load
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.segmentation.evaluate import WholeImages
from tiny_runs import Told
from whole_runs import newest

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
    assert "24: the images have 24×16 pixels" in capsys.readouterr().out
    # Continued by its own config, or by what it was started with.
    started = ["unet", f"data.dir={tmp_path / 'set'}", *(word for word in TINY if word != "train.epochs=1")]
    for epochs, (target, *words) in enumerate(([str(run / "config.yaml")], started), start=2):
        train(load(target, overrides=[*words, f"train.epochs={epochs}"]), resume=run)
        assert load(str(run / "config.yaml")).config.data.image_size == 24
        assert newest(run).state["position"]["epoch"] == epochs
        with pytest.raises(CheckpointError, match=r"data\.image_size: 24 -> 512"):
            train(load(target, overrides=[*words, f"train.epochs={epochs}", "data.image_size=512"]), resume=run)


def test_another_size_that_is_allowed_is_trained_stored_and_evaluated_at(tmp_path: Path) -> None:
    """What a run found in its data is stored with it; the size asked for now comes before."""
    data_sets.tgs(tmp_path / "set")
    run = trained(tmp_path / "set", tmp_path / "run")
    before = newest(run).state["store"]
    again = load(str(run / "config.yaml"), overrides=["data.image_size=48", "train.epochs=2"])
    train(again, resume=run, allow_changes=True)
    after = newest(run).state["store"]
    assert (before["image_size"], after["image_size"]) == (24, 48)
    assert after["resize"] == [2 * share for share in before["resize"]]
    assert build(again.config, before).train_samples.sample(0, key=(0, 0, 0))["image"].shape[-2:] == (48, 48)
    assert load(str(run / "config.yaml")).config.data.image_size == 48
    evaluate(run, report=Told(tmp_path).report)


def test_what_only_the_start_of_a_run_reads_cannot_be_changed(tmp_path: Path) -> None:
    data_sets.tgs(tmp_path / "set")
    run = trained(tmp_path / "set", tmp_path / "run")
    before = (run / "config.yaml").read_text()
    for change in ("model.classes=3", "model.ignore_index=0", "data.channels=1", "model.weights=a.pth"):
        again = load(str(run / "config.yaml"), overrides=[change, "train.epochs=2"])
        with pytest.raises(CheckpointError, match="this setting cannot change during a run: " + change.split("=")[0]):
            train(again, resume=run, allow_changes=True)
    assert (run / "config.yaml").read_text() == before


def test_a_run_on_data_without_a_background_stores_that_and_resume_and_evaluate_agree(tmp_path: Path) -> None:
    data_sets.camvid(tmp_path / "set")
    run = trained(tmp_path / "set", tmp_path / "run")
    assert load(str(run / "config.yaml")).config.model.background is None  # type: ignore[attr-defined]
    train(load(str(run / "config.yaml"), overrides=["train.epochs=2"]), resume=run)
    found = evaluate(run, report=Told(tmp_path).report)
    assert found.metrics["iou"] == found.metrics["iou_all"]
    assert "all classes" in found.scoring


@pytest.mark.parametrize(("own", "other"), [((0, 1), (0, 255)), ((0, 255), (3, 7))])
def test_two_mask_values_are_those_of_the_run_in_their_order_whatever_they_are(
    tmp_path: Path, own: tuple[int, int], other: tuple[int, int]
) -> None:
    for folder, values in (("own", own), ("same", own), ("other", other)):
        for name in ("1", "2"):
            data_sets.picture(tmp_path / folder / "imgs" / f"{name}.png")
            data_sets.mask(tmp_path / folder / "masks" / f"{name}.png", *values)
    run = trained(tmp_path / "own", tmp_path / "run")
    told = Told(tmp_path)
    same = evaluate(run, report=told.report, data=tmp_path / "same").metrics
    assert "in this order" not in told.text
    assert evaluate(run, report=told.report, data=tmp_path / "other").metrics == same
    assert f"have {other[0]}, {other[1]}, but the run has {own[0]}, {own[1]}" in told.text


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


def write_floats(root: Path, high: float) -> Path:
    """Demo images as float arrays in 0..high."""
    write_demo(root, num_images=6, side=16)
    for path in sorted((root / "imgs").iterdir()):
        with Image.open(path) as image:
            np.save(path.with_suffix(".npy"), np.asarray(image, dtype=np.float32) / np.float32(255 / high))
        path.unlink()
    return root


def test_an_outlier_leaves_floats_as_they_are_and_header_and_warning_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_floats(tmp_path / "set", 1)
    image = np.load(root / "imgs" / "003.npy")
    image[0, 0] = 1.02
    np.save(root / "imgs" / "003.npy", image)
    run = trained(root, tmp_path / "run")
    shown = capsys.readouterr()
    assert "float images: divided by 1 (data.scale): 99.9% of a typical file's values are at most 1" in shown.out
    assert "warning: outlying values (beyond 1, magnitudes up to 1.02) in 1 float image: 003.npy;" in shown.err
    assert load(str(run / "config.yaml")).config.data.scale == 1  # type: ignore[attr-defined]


def test_the_scale_of_a_run_is_that_of_all_its_later_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(write_floats(tmp_path / "set", 255), tmp_path / "run")
    assert "divided by 255 (data.scale)" in capsys.readouterr().out
    train(load(str(run / "config.yaml"), overrides=["train.epochs=2"]), resume=run)
    store = newest(run).state["store"]
    assert store["raw_scale"] == load(str(run / "config.yaml")).config.data.scale == 255  # type: ignore[attr-defined]
    other, seen = write_floats(tmp_path / "other", 1), []

    def forward(pixels: Tensor) -> Tensor:
        seen.append(float(pixels.max()))
        return torch.zeros(1, 2, *pixels.shape[2:])

    forward.device = torch.device("cpu")  # type: ignore[attr-defined]
    WholeImages(forward, store=store, depth=2).segment(other / "imgs" / "000.npy", Bar("", 1))
    assert seen == [pytest.approx(1 / 255)]
    told = Told(tmp_path)
    evaluate(run, data=other, report=told.report)
    assert "float images are divided by 255 (data.scale), but seem to be in 0..1" in told.text
    with pytest.raises(CheckpointError, match=r"this setting cannot change during a run: data\.scale: 255\.0 -> 1\.0"):
        train(load(str(run / "config.yaml"), overrides=["data.scale=1", "train.epochs=3"]), resume=run)
