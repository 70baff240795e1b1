from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from halfstep.errors import ConfigError, DataError
from halfstep_train.data.loader import Batch, Loader
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.segmentation.unet import UNet
from tiny_runs import Told, unet_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unet") / "demo"
    write_demo(folder, num_images=10)
    return folder


def config(
    folder: Path | None, *, data: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> UNetConfig:
    settings = {"dir": str(folder) if folder else None, "image_size": 32, "val_fraction": 0.2}
    return UNetConfig.model_validate(
        {
            "workload": "unet",
            "data": settings | (data or {}),
            "model": {"base_channels": 2, "depth": 2} | (model or {}),
        }
    )


def first_batch(workload: Workload) -> Batch:
    return next(Loader(workload.train_samples, batch_size=4).iterate_epoch(0))


def test_the_workload_trains_and_scores_from_loader_to_metrics(demo: Path) -> None:
    workload = build_workload(config(demo))
    assert (len(workload.train_samples), len(workload.val_samples)) == (8, 2)
    batch = workload.prepare(first_batch(workload), key=(0, 0), training=True)
    assert batch["image"].dtype == torch.float32
    outputs = workload.forward(workload.model, batch)
    loss, weight = workload.loss(outputs, batch)
    loss.backward()
    assert weight == 4
    metrics = workload.metrics()
    metrics.update(outputs, batch)
    assert workload.metric in metrics.compute()


def test_preparing_is_a_function_of_the_key_and_leaves_validation_alone(demo: Path) -> None:
    workload = build_workload(config(demo))
    raw = first_batch(workload)
    one, again, other = (workload.prepare(raw, key=(0, step), training=True)["image"] for step in (5, 5, 6))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    plain = workload.prepare(raw, key=(), training=False)
    assert torch.equal(plain["image"], raw["image"].float() / 255)
    assert torch.equal(plain["mask"], raw["mask"])


def test_the_store_is_plain_json_and_rebuilds_the_same_workload(demo: Path) -> None:
    workload = build_workload(config(demo))
    store = json.loads(json.dumps(dict(workload.store)))
    assert store["mask_values"] == [0, 255]
    assert store["resize"] == [0.5, 0.5]
    assert build_workload(config(demo), store).store == store


def test_classes_auto_is_one_logit_a_class_and_one_is_the_binary_form(demo: Path) -> None:
    assert build_workload(config(demo)).store["num_classes"] == 2
    binary = build_workload(config(demo, model={"classes": 1}))
    batch = binary.prepare(first_batch(binary), key=(0, 0), training=True)
    assert binary.forward(binary.model, batch).shape[1] == 1
    with pytest.raises(DataError, match=r"model\.classes is 5, the masks contain 2 values"):
        build_workload(config(demo, model={"classes": 5}))


def test_gray_files_make_a_gray_model(tmp_path: Path) -> None:
    for part, suffix in (("image", ""), ("label", "")):
        (tmp_path / part).mkdir()
        for i in range(3):
            pixels = np.full((32, 32), 255, dtype=np.uint8) * (np.arange(32) > 9 + i).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / f"{i}{suffix}.png")
    workload = build_workload(config(tmp_path))
    assert workload.store["channels"] == 1
    assert first_batch_channels(build_workload(config(tmp_path, data={"channels": 3}))) == 3


def first_batch_channels(workload: Workload) -> int:
    return next(Loader(workload.train_samples, batch_size=1).iterate_epoch(0))["image"].shape[1]


def test_weights_of_another_run_are_the_start(demo: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    theirs = UNet(base_channels=2, depth=2)
    torch.save(theirs.state_dict() | {"mask_values": [0, 255]}, tmp_path / "start.pth")
    workload = build_workload(config(demo, model={"weights": str(tmp_path / "start.pth")}))
    assert all(torch.equal(a, b) for a, b in zip(workload.model.parameters(), theirs.parameters(), strict=True))


def test_a_run_that_goes_on_or_is_used_needs_no_weights_to_start_from(demo: Path, tmp_path: Path) -> None:
    run = unet_run(tmp_path / "first", {"train.max_steps": 1})
    file = next((run / "checkpoints").glob("*/model.safetensors"))
    start = file.rename(tmp_path / "start.safetensors")
    run = unet_run(tmp_path / "second", {"train.max_steps": 1, "model.weights": str(start)})
    start.unlink()
    train(load(str(run / "config.yaml"), overrides=["train.max_steps=2", "log.quiet=true"]), resume=run)
    assert evaluate(run, report=Told(run).report).metrics
    predict(run, [run / "data" / "imgs"], report=Told(run).report, request=PredictRequest(out=tmp_path / "out"))


def test_skipped_files_are_told(demo: Path, tmp_path: Path) -> None:
    write_demo(tmp_path / "own", num_images=4)
    broken = tmp_path / "own" / "imgs" / "002.png"
    broken.write_bytes(broken.read_bytes()[:500])
    workload = build_workload(config(tmp_path / "own", data={"on_bad_file": "skip"}))
    assert len(workload.train_samples) + len(workload.val_samples) == 3
    assert len(workload.notes) == 1
    assert "002.png" in workload.notes[0]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"data": {"dir": "nowhere"}}, DataError, "data folder nowhere does not exist"),
        ({"data": {"dir": None}}, DataError, "no data folder"),
        ({"data": {"image_size": 3}}, ConfigError, "too small"),
        ({"model": {"class_weights": [1, 2, 3]}}, ConfigError, "3 class weights for 2 classes"),
        ({"data": {"val_list": "none.txt"}}, DataError, "no list of ids"),
    ],
)
def test_a_wrong_setting_is_explained(demo: Path, change: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        build_workload(config(demo, **change))


def test_masks_with_grey_edges_are_told_and_their_values_are_not_all_listed(tmp_path: Path) -> None:
    write_demo(tmp_path / "own", num_images=4, side=16)
    mask = sorted((tmp_path / "own" / "masks").iterdir())[0]
    Image.fromarray((np.arange(256) % 200).astype(np.uint8).reshape(16, 16)).save(mask)
    [note] = build_workload(config(tmp_path / "own")).notes
    assert "the masks contain 201 different values" in note
    assert "and 193 more" in note
    assert not build_workload(config(tmp_path / "own", model={"classes": 201})).notes
    with pytest.raises(DataError, match=r"model.classes is 2, the masks contain 201 values: 0, 1, .* and 193 more"):
        build_workload(config(tmp_path / "own", model={"classes": 2}))


def test_masks_of_one_value_are_refused(tmp_path: Path) -> None:
    write_demo(tmp_path / "own", num_images=3)
    for mask in (tmp_path / "own" / "masks").iterdir():
        Image.new("L", (64, 64)).save(mask)
    with pytest.raises(DataError, match="every mask contains only the value 0"):
        build_workload(config(tmp_path / "own"))
