"""Evaluation of stored runs: training's own numbers, of the checkpoint asked for, without touching anything."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data import data_sets
from halfstep.errors import CheckpointError, ConfigError, DataError
from halfstep_train.data.loader import name_sample
from halfstep_train.report.metrics_file import read
from halfstep_train.report.run_report import EvaluationResult
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.checkpoint import Checkpoints
from halfstep_train.run.folder import RunFolder
from halfstep_train.use.evaluate import evaluate, open_run
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from tiny_runs import Told, copied, unet_run


@pytest.fixture(scope="module")
def unet(trained_unet: Path) -> Path:
    return trained_unet


@pytest.fixture(scope="module")
def resnet(trained_resnet: Path) -> Path:
    return trained_resnet


def evaluated(run: Path, **request: Any) -> EvaluationResult:
    return evaluate(run, report=Told(run).report, **request)


@functools.cache
def usual(run: Path) -> EvaluationResult:
    """As evaluated without any wish, once for all tests."""
    return evaluated(run)


def logged(run: Path) -> dict[str, Any]:
    """Of the best checkpoint."""
    return [record for record in read(run / "metrics.jsonl") if record.get("best")][-1]


@pytest.mark.parametrize("kind", ["unet", "resnet"])
def test_evaluation_gives_exactly_the_numbers_that_training_logged(kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    found, expected = usual(run), logged(run)
    assert found.metrics == {name: expected[name] for name in found.metrics}
    assert {"loss", "iou" if kind == "unet" else "top1"} <= set(found.metrics)
    assert found.weights == ("averaged (EMA)" if kind == "unet" else "as trained")


def test_another_batch_size_counts_the_same_samples(unet: Path) -> None:
    found = evaluated(unet, batch_size=3)
    assert found.samples == 20
    assert found.metrics["iou"] == pytest.approx(logged(unet)["iou"], abs=1e-3)  # a pixel on the edge may flip


def test_every_class_is_listed_and_the_worst_median_and_best_images_are_drawn(unet: Path, tmp_path: Path) -> None:
    found = evaluated(unet, out=tmp_path / "out")
    assert [(row["class"], row["mask value"]) for row in found.classes] == [("0 (background)", "0"), ("1", "255")]
    assert found.classes[1]["IoU"] == found.metrics["iou/1"]
    assert found.classes[1]["Dice"] == pytest.approx(found.metrics["dice/1"])
    assert sum(float(row["share of pixels"] or 0) for row in found.classes) == pytest.approx(1)
    with Image.open(tmp_path / "out" / "contact_sheet.png") as sheet:
        assert sheet.height > 9 * 256  # three of each
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["metrics"] == found.metrics


def test_full_size_scores_the_very_masks_that_predict_writes(unet: Path, tmp_path: Path) -> None:
    """The demo's images have 64 pixels a side, the model sees 32."""
    found = evaluated(unet, options={"full_size": True}, out=tmp_path / "out")
    held_out = build_workload(load(str(unet / "config.yaml")).config).val_samples
    names = {Path(name_sample(held_out, index)).stem for index in range(len(held_out))}
    images = [path for path in sorted((unet / "data" / "imgs").iterdir()) if path.stem in names]
    request = PredictRequest(out=tmp_path / "masks")
    predict(unet, images, report=Told(unet).report, request=request)
    hit = union = 0
    for image in images:
        truth = np.asarray(Image.open(next((unet / "data" / "masks").glob(f"{image.stem}*")))) > 0
        mask = np.asarray(Image.open(tmp_path / "masks" / "masks" / f"{image.stem}_mask.png")) > 0
        assert mask.shape == truth.shape == (64, 64)
        hit, union = hit + (mask & truth).sum(), union + (mask | truth).sum()
    assert found.metrics["iou"] == pytest.approx(hit / union, abs=1e-12)
    assert "loss" not in found.metrics
    assert "original size" in found.scored_at
    assert "32×32" in usual(unet).scored_at


def test_full_size_is_refused_where_it_means_nothing(unet: Path, resnet: Path) -> None:
    with pytest.raises(ConfigError, match="resnet18 has no option --full-size"):
        evaluated(resnet, options={"full_size": True})
    with pytest.raises(ConfigError, match="--batch-size 4 cannot be combined with --full-size"):
        evaluated(unet, options={"full_size": True}, batch_size=4)


def test_the_background_rule_is_the_runs_own_and_is_said(unet: Path, tmp_path: Path) -> None:
    assert "the background, mask value 0" in usual(unet).scoring
    run = unet_run(tmp_path / "run", {"model.background": None, "train.max_steps": 1})
    found = evaluated(run)
    assert found.metrics["iou"] == found.metrics["iou_all"] == (found.metrics["iou/0"] + found.metrics["iou/1"]) / 2
    assert [row["class"] for row in found.classes] == ["0", "1"]
    assert "all classes" in found.scoring
    assert found.metrics == {name: logged(run)[name] for name in found.metrics}


def test_a_classifier_shows_accuracies_confusion_and_mistakes(resnet: Path) -> None:
    found = usual(resnet)
    accuracies = [float(row["accuracy"] or 0) for row in found.classes]
    assert len(found.classes) == 10
    assert np.mean(accuracies) == pytest.approx(found.metrics["top1"])  # the demo's classes are equally large
    assert {path.name for path in map(Path, found.files)} == {"confusion.png", "mistakes.png", "evaluation.json"}
    assert all(Path(path).stat().st_size > 1000 for path in found.files)


def test_nothing_is_overwritten_and_no_empty_folder_is_left(unet: Path, tmp_path: Path) -> None:
    first, second = (Path(evaluated(unet).files[0]).parent for _ in range(2))
    assert first != second
    assert {first.parent, second.parent} == {unet / "report"}
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="already exists"):
        evaluated(unet, out=tmp_path)
    masks = tmp_path / "other" / "masks"
    shutil.copytree(unet / "data", tmp_path / "other")
    for path in masks.iterdir():
        path.unlink()
        Image.fromarray(np.full((64, 64), 7, dtype=np.uint8)).save(path)
    with pytest.raises(DataError, match="contain the values 7, but the run.s classes are 0, 255"):
        evaluated(unet, data=tmp_path / "other", out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_is_chosen_by_rank_name_or_step(unet: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    checkpoints = Checkpoints(run / "checkpoints")
    first, *_, last = checkpoints.list_all()
    checkpoints.mark_best(first, "iou", 0.5)
    chosen = {wish: open_run(run, checkpoint=wish).path.name for wish in ("best", "last", first.name, "4")}
    assert chosen == {"best": first.name, "last": last.name, first.name: first.name, "4": "step-00000004"}
    with pytest.raises(CheckpointError, match="no checkpoint 'step-99'") as wrong:
        evaluated(run, checkpoint="step-99")
    assert first.name in wrong.value.fix


def test_a_damaged_checkpoint_is_refused_by_name(unet: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    best = Checkpoints(run / "checkpoints").find_best()
    assert best is not None
    weights = best / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"checkpoint {best.name} is damaged") as damaged:
        evaluated(run)
    assert "--checkpoint last" in damaged.value.fix


@pytest.mark.slow
def test_of_another_folder_everything_counts_but_of_the_runs_own_only_what_was_held_out(
    unet: Path, resnet: Path, tmp_path: Path
) -> None:
    pairs, classes, split = tmp_path / "pairs", tmp_path / "classes", tmp_path / "split"
    shutil.copytree(unet / "data", pairs)
    shutil.copytree(resnet / "data" / "val", classes)
    shutil.copytree(resnet / "data" / "val", split / "test")
    assert evaluated(unet, data=pairs).samples == 100
    assert evaluated(unet, data=unet / "data").samples == 20
    expected = usual(resnet).metrics
    for data in (classes, split):
        found = evaluated(resnet, data=data)
        assert (found.samples, found.metrics) == (200, expected)


def test_data_that_were_moved_keep_their_validation_part(unet: Path, tmp_path: Path) -> None:
    """What was trained on proves nothing, wherever it lies now."""
    run = copied(unet, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(unet / "data"), str(tmp_path / "gone")))
    told = Told(run)
    found = evaluate(run, report=told.report, data=unet / "data")
    assert (found.samples, found.metrics) == (20, usual(unet).metrics)
    assert "only its validation split" in told.text
    shutil.copytree(unet / "data", tmp_path / "fewer")
    for part in ("imgs", "masks"):
        for path in sorted((tmp_path / "fewer" / part).iterdir())[:10]:
            path.unlink()
    assert evaluated(run, data=tmp_path / "fewer").samples == 90


def test_a_folder_of_one_known_class_is_evaluated_as_that_class(resnet: Path, tmp_path: Path) -> None:
    shutil.copytree(resnet / "data" / "val" / "rings_fine", tmp_path / "data" / "rings_fine")
    whole = {row["class"]: row for row in usual(resnet).classes}
    found = evaluated(resnet, data=tmp_path / "data")
    seen = {row["class"]: row["samples"] for row in found.classes if row["samples"]}
    assert seen == {"rings_fine": found.samples} == {"rings_fine": 20}
    assert found.metrics["top1"] == whole["rings_fine"]["accuracy"]


def test_other_classes_are_an_error_that_lists_them(resnet: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(resnet / "data" / "val", tmp_path / "data"))
    (data / "rings_fine").rename(data / "zebra")
    with pytest.raises(DataError) as refused:
        evaluated(resnet, data=data)
    assert "rings_fine" in refused.value.why
    assert "zebra" in refused.value.why


def test_a_moved_run_brings_its_demo_data_and_others_say_where_to_name_them(unet: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(unet / "data"), str(tmp_path / "gone")))
    with pytest.raises(DataError, match="does not exist") as missing:
        evaluated(run)
    assert "--data" in missing.value.fix
    shutil.copytree(unet / "data", run / "data")
    told = Told(run)
    assert evaluate(run, report=told.report).metrics == usual(unet).metrics
    assert "using the demo data" in told.text


def test_a_run_of_a_device_that_is_not_here_is_evaluated_on_this_one_with_a_warning(unet: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    folder = RunFolder(run)
    folder.write_plan(dataclasses.replace(folder.read_plan(), device="cuda:97", device_name="Some GPU"))
    told = Told(run)
    evaluate(run, report=told.report)
    assert "cuda:97 (Some GPU) is not available" in told.text


def test_a_simulated_precision_runs_as_it_was_stored(tmp_path: Path) -> None:
    run = unet_run(tmp_path / "run", {"precision.default": "bf16", "precision.simulate": True})
    found = evaluated(run)
    assert (found.precision, found.simulated) == ("bf16", True)
    assert found.metrics == {name: logged(run)[name] for name in found.metrics}
    exact = evaluated(run, precision="fp32")
    assert (exact.precision, exact.simulated) == ("fp32", False)
    assert exact.metrics["loss"] != found.metrics["loss"]


def test_weights_of_another_model_are_refused(unet: Path, tmp_path: Path) -> None:
    run = copied(unet, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("base_channels: 4", "base_channels: 6"))
    with pytest.raises(CheckpointError, match="does not contain the weights of this run's unet"):
        evaluated(run)


def test_a_run_without_validation_asks_for_data(tmp_path: Path) -> None:
    run = unet_run(tmp_path / "run", {"data.val_fraction": 0, "train.max_steps": 2})
    with pytest.raises(DataError, match="no validation data"):
        evaluated(run)
    told = Told(run)
    shutil.copytree(run / "data", tmp_path / "data")
    assert evaluate(run, report=told.report, data=tmp_path / "data").samples == 100
    assert "no checkpoint is marked as the best one" in told.text


def test_data_of_another_kind_are_refused_without_settings_that_no_evaluation_takes(
    unet: Path, resnet: Path, tmp_path: Path
) -> None:
    data_sets.tgs(tmp_path / "masks")
    (tmp_path / "other" / "scans").mkdir(parents=True)
    for run, data in ((resnet, "masks"), (unet, "other")):
        with pytest.raises(DataError) as refused:
            evaluated(run, data=tmp_path / data)
        assert "in the layout of the run's data" in refused.value.fix
        assert "data." not in refused.value.fix
