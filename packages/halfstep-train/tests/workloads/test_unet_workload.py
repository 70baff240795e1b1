from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from halfstep.errors import ConfigError, DataError
from halfstep_train.data.loader import Batch, Loader
from halfstep_train.report.run_report import Bar
from halfstep_train.run.assemble import build_workload
from halfstep_train.run.train import train
from halfstep_train.use.evaluate import evaluate
from halfstep_train.use.predict import predict
from halfstep_train.workloads import load
from halfstep_train.workloads.base.sheets import CELL
from halfstep_train.workloads.base.using import PredictRequest
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.data import IGNORED
from halfstep_train.workloads.segmentation.demo import write_demo
from halfstep_train.workloads.segmentation.evaluate import WholeImages, predict_image
from halfstep_train.workloads.segmentation.pictures import (
    CLASS_COLOURS,
    COLUMNS,
    CONFUSED,
    FALSE_ALARM,
    MISSED,
    SheetRow,
    colour_classes,
    draw_contact_sheet,
    draw_errors,
    draw_overlay,
)
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
    with pytest.raises(DataError, match=r"model\.classes is 5, but the masks contain 2 values"):
        build_workload(config(demo, model={"classes": 5}))


def test_gray_files_make_a_gray_model(tmp_path: Path) -> None:
    for part, suffix in (("image", ""), ("label", "")):
        (tmp_path / part).mkdir()
        for i in range(3):
            pixels = np.full((32, 32), 255, dtype=np.uint8) * (np.arange(32) > 9 + i).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / f"{i}{suffix}.png")
    assert build_workload(config(tmp_path)).store["channels"] == 1
    coloured = build_workload(config(tmp_path, data={"channels": 3}))
    assert coloured.train_samples.sample(0, key=(0, 0, 0))["image"].shape == (3, 32, 32)


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
    predict(
        run, [run / "data" / "imgs" / "000.png"], report=Told(run).report, request=PredictRequest(out=tmp_path / "out")
    )


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
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
    with pytest.raises(DataError, match=r"model.classes is 2, but the masks contain 201 values: 0, 1, .* and 193 more"):
        build_workload(config(tmp_path / "own", model={"classes": 2}))


def test_masks_of_one_value_are_refused(tmp_path: Path) -> None:
    write_demo(tmp_path / "own", num_images=3)
    for mask in (tmp_path / "own" / "masks").iterdir():
        Image.new("L", (64, 64)).save(mask)
    with pytest.raises(DataError, match="every mask contains only the value 0"):
        build_workload(config(tmp_path / "own"))


DEPTH = 2
CPU = torch.device("cpu")


def model_in_use(num_classes: int = 3) -> UNet:
    torch.manual_seed(3)
    model = UNet(base_channels=4, depth=DEPTH, num_classes=num_classes)
    with torch.no_grad():
        model(torch.rand(4, 3, 32, 32))  # statistics that are not the initial ones
    return model.eval()


def store(**changes: Any) -> dict[str, Any]:
    plain = {
        "mask_values": [0, 128, 255],
        "ignored_value": None,
        "num_classes": 3,
        "image_size": 64,
        "channels": 3,
        "is_float": False,
        "raw_scale": 1.0,
        "resize": [1.0, 1.0],
    }
    return plain | changes


@pytest.mark.parametrize("size", [(150, 97), (64, 201), (63, 64)])
def test_tiles_agree_with_the_whole_image(size: tuple[int, int]) -> None:
    model = model_in_use()
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(image[None])[0]
    whole = predict_image(model, image, depth=DEPTH, tile=1000)
    tiled = predict_image(model, image, depth=DEPTH, tile=64)
    # Only where two logits tie within the stated bound may the rounding of another tile size decide.
    best = logits.topk(2, dim=0).values
    is_clear = (best[0] - best[1]) > 1e-4 * logits.abs().max()
    assert torch.equal(whole, logits.argmax(0).byte())
    assert torch.equal(whole[is_clear], tiled[is_clear])
    assert is_clear.float().mean() > 0.99


def test_every_tile_fits_the_limit() -> None:
    seen: list[tuple[int, ...]] = []

    def forward(part: Tensor) -> Tensor:
        seen.append(tuple(part.shape[2:]))
        return part

    predict_image(forward, torch.rand(3, 100, 300), depth=DEPTH, tile=64)
    assert len(seen) > 10
    assert max(max(size) for size in seen) <= 64


@pytest.mark.parametrize("resize", [[1.0, 1.0], [0.5, 0.25]])
def test_a_file_comes_back_at_its_own_size(tmp_path: Path, resize: list[float]) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (90, 70), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    shapes = []

    def forward(part: Tensor) -> Tensor:
        shapes.append(tuple(part.shape))
        assert float(part.max()) <= 1
        return part

    forward.device = CPU  # type: ignore[attr-defined]
    classes = WholeImages(forward, store=store(resize=resize), depth=DEPTH).segment(tmp_path / "a.png", Bar("", 1))
    assert classes.shape == (90, 70)
    assert shapes == [(1, 3, round(90 * resize[0]), round(70 * resize[1]))]


@pytest.mark.parametrize("tile", [64, 1000])
@pytest.mark.parametrize("size", [(301, 130), (75, 200)])
def test_logits_are_resampled_not_classes(size: tuple[int, int], tile: int) -> None:
    """As torch's bilinear interpolation of the whole, in tiles as well; smaller ones too."""
    model = model_in_use()
    image = torch.rand(3, 150, 97, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = torch.nn.functional.interpolate(model(image[None]), size, mode="bilinear")[0]
    best = logits.topk(2, dim=0).values
    is_clear = (best[0] - best[1]) > 1e-4 * logits.abs().max()
    found = predict_image(model, image, depth=DEPTH, tile=tile, size=size)
    assert found.shape == size
    assert torch.equal(found[is_clear], logits.argmax(0).byte()[is_clear])
    assert is_clear.float().mean() > 0.99


def test_an_edge_between_two_pixels_lands_between_them_at_full_size(tmp_path: Path) -> None:
    """Logits of -1 and 3 cross zero a quarter of the way; copied classes would cross at the half."""
    Image.fromarray(np.zeros((4, 16), dtype=np.uint8)).save(tmp_path / "a.png")
    line = nn.Conv2d(1, 1, 1)
    line.device, line.forward = CPU, lambda part: torch.tensor([-1.0, -1.0, 3.0, 3.0]).expand(1, 1, 4, 4)
    images = WholeImages(line, store=store(resize=[1, 0.25]), depth=2)
    assert images.segment(tmp_path / "a.png", Bar("", 1))[0].tolist() == [0] * 7 + [1] * 9


def test_the_tiles_done_are_told_before_each() -> None:
    told: list[tuple[int, int]] = []
    predict_image(model_in_use(), torch.rand(3, 60, 150), depth=DEPTH, tile=64, report=lambda *at: told.append(at))
    assert told == [(number, len(told)) for number in range(len(told))]
    assert len(told) > 2


def test_errors_are_coloured_by_their_kind() -> None:
    truth = np.array([[0, 1], [1, IGNORED]], dtype=np.uint8)
    prediction = np.array([[1, 0], [1, 1]], dtype=np.uint8)
    picture = draw_errors(np.full((2, 2, 1), 255, dtype=np.uint8), truth, prediction)
    assert tuple(picture[0, 0]) == FALSE_ALARM
    assert tuple(picture[0, 1]) == MISSED
    assert tuple(picture[1, 0]) == (255, 255, 255)


def test_an_overlay_tints_classes_and_leaves_the_background() -> None:
    image = np.full((2, 2, 3), 100, dtype=np.uint8)
    tinted = np.asarray(draw_overlay(image, np.array([[0, 0], [0, 1]], dtype=np.uint8)))
    assert (tinted[0] == 100).all()
    assert tinted[1, 1].tolist() == [round((100 + int(c)) / 2) for c in CLASS_COLOURS[0]]


def test_without_a_background_every_class_is_tinted_and_every_error_is_a_wrong_class() -> None:
    image = np.full((1, 2, 3), 100, dtype=np.uint8)
    classes = np.array([[0, 1]], dtype=np.uint8)
    assert (np.asarray(draw_overlay(image, classes, background=None)) != 100).any(axis=-1).all()
    assert (colour_classes(classes, None) != 0).any(axis=-1).all()
    assert (draw_errors(image, classes, classes[:, ::-1], None) == CONFUSED).all()


@pytest.mark.parametrize("background", [0, 7, None])
def test_forty_classes_have_forty_colours_that_eyes_can_tell_apart(background: int | None) -> None:
    colours = colour_classes(np.arange(40, dtype=np.uint8)[None], background)[0].astype(int)
    apart = np.abs(colours[:, None] - colours[None]).sum(-1) + 999 * np.eye(40)
    assert apart.min() > 40  # of 3 · 255


def test_the_contact_sheet_has_a_row_a_sample() -> None:
    classes = np.zeros((10, 20), dtype=np.uint8)
    row = SheetRow(name="a", image=np.zeros((10, 20, 1), dtype=np.float32), truth=classes, prediction=classes)
    one, two = draw_contact_sheet([row]), draw_contact_sheet([row, row])
    assert one.width > len(COLUMNS) * CELL
    assert two.height - one.height > CELL
    assert draw_contact_sheet([row], names=["0: sky"]).height > one.height  # a legend of the classes
