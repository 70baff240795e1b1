from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep_train.workloads.base.sheets import CELL
from halfstep_train.workloads.segmentation.masks import IGNORED
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
from halfstep_train.workloads.segmentation.predict import predict_file, predict_image
from halfstep_train.workloads.segmentation.unet import UNet

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


def test_a_tile_within_the_receptive_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="tiles of 32 pixels are too small"):
        predict_image(model_in_use(), torch.rand(3, 100, 100), depth=DEPTH, tile=32)


@pytest.mark.parametrize("resize", [[1.0, 1.0], [0.5, 0.25]])
def test_a_file_comes_back_at_its_own_size(tmp_path: Path, resize: list[float]) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (90, 70), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    shapes = []

    def forward(part: Tensor) -> Tensor:
        shapes.append(tuple(part.shape))
        assert float(part.max()) <= 1
        return part

    classes = predict_file(tmp_path / "a.png", forward, store=store(resize=resize), depth=DEPTH, device=CPU)
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
    line = torch.tensor([-1.0, -1.0, 3.0, 3.0]).expand(1, 1, 4, 4)
    classes = predict_file(tmp_path / "a.png", lambda part: line, store=store(resize=[1, 0.25]), depth=2, device=CPU)
    assert classes[0].tolist() == [0] * 7 + [1] * 9


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
