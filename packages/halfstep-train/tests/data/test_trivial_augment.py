"""TrivialAugment on batches, against Pillow's own result for each change."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from data.picture_folders import smooth_picture
from halfstep_train.workloads import load
from halfstep_train.workloads.classification.augment import CHANGES, augment_trivially_, prepare_images
from halfstep_train.workloads.classification.config import ImageAugmentConfig

SIDE = 64
WITHOUT_STRENGTH = ("stretch", "equalise")


def pictures() -> list[Image.Image]:
    """One smooth, one of noise, which shows what smoothness hides."""
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return [smooth_picture(3, (SIDE, SIDE)), Image.fromarray(noise)]


def as_batch(images: list[Image.Image]) -> Tensor:
    return torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1).float() for image in images])


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)


PILLOW: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, s: image,
    "shear x": lambda image, s: affine(image, 1, 0.99 * s, 0, 0, 1, 0),
    "shear y": lambda image, s: affine(image, 1, 0, 0, 0.99 * s, 1, 0),
    "shift x": lambda image, s: affine(image, 1, 0, 32 * s, 0, 1, 0),
    "shift y": lambda image, s: affine(image, 1, 0, 0, 0, 1, 32 * s),
    "turn": lambda image, s: image.rotate(135 * s, Image.Resampling.BILINEAR),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.99 * s),
    "saturation": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.99 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.99 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.99 * s),
    "posterise": lambda image, s: ImageOps.posterize(image, 8 - round(6 * abs(s))),
    "solarise": lambda image, s: ImageOps.solarize(image, math.floor(256 - 256 * abs(s))),
    "stretch": lambda image, s: ImageOps.autocontrast(image),
    "equalise": lambda image, s: ImageOps.equalize(image),
}
# Levels of 255. Colours: Pillow rounds or cuts each of up to two steps to a byte, also contrast's mean.
# Moved images: Pillow clamps at the edge where we fade to black, and a turn's pixels may lie half a rounding apart.
MOVED = ("shear x", "shear y", "shift x", "shift y", "turn")
LARGEST_DIFFERENCE = {"identity": 0.0, "posterise": 0.0, "solarise": 0.0, "equalise": 0.0}


@pytest.mark.parametrize("strength", [-1.0, -0.5, -1 / 30, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_pillows_but_for_rounding(name: str, strength: float) -> None:
    images = pictures()
    ours = CHANGES[name](as_batch(images), torch.full((2,), strength))
    theirs = as_batch([PILLOW[name](image, strength) for image in images])
    difference = (ours - theirs).abs()
    if name in MOVED:
        inside = as_batch([PILLOW[name](Image.new("RGB", (SIDE, SIDE), "white"), strength)] * 2) == 255
        edge = torch.nn.functional.max_pool2d((~inside).float(), 5, stride=1, padding=2)
        edge[..., [0, 1, -1, -2], :] = edge[..., [0, 1, -1, -2]] = 1
        difference = difference[edge == 0]
        assert len(difference) > 100
        assert difference.max() < 1.5
    else:
        assert difference.max() <= LARGEST_DIFFERENCE.get(name, 2.01)


@pytest.mark.parametrize("name", [name for name in CHANGES if name not in WITHOUT_STRENGTH])
def test_a_strength_of_zero_changes_nothing(name: str) -> None:
    images = as_batch(pictures())
    assert (CHANGES[name](images.clone(), torch.zeros(2)) - images).abs().max() < 0.01


def test_flat_images_survive_changes_by_frequency_and_range() -> None:
    flat = torch.full((1, 3, 8, 8), 77.0)
    for name in WITHOUT_STRENGTH:
        assert torch.equal(CHANGES[name](flat.clone(), torch.zeros(1)), flat)


def test_changes_are_a_function_of_the_key_and_all_kinds_come() -> None:
    many = as_batch([pictures()[1]] * 200)
    first, again, other = (augment_trivially_(many.clone(), key=key) for key in ((0, 5, 0), (0, 5, 0), (0, 6, 0)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # 14 kinds with 31 strengths and signs: nearly no two of 200 are alike, and one in fourteen is as it was.
    assert len({row.numpy().tobytes() for row in first}) > 100
    assert 3 < sum(torch.equal(row, many[0]) for row in first) < 40
    assert first.min() >= 0
    assert first.max() <= 255


def test_the_quality_recipe_uses_it_and_nothing_else_is_reshuffled() -> None:
    assert load("resnet50", flags={"preset": "quality"}).config.data.augment.trivial  # type: ignore[attr-defined]
    pixels = torch.tensor(np.stack([np.asarray(image) for image in pictures() * 8]))
    batch = {"image": pixels, "box": torch.tensor([[0.0, 0.0, SIDE, SIDE]]).repeat(16, 1)}
    plain, changed = (
        prepare_images(batch, SIDE, changes=ImageAugmentConfig(trivial=trivial), key=(0, 1))
        for trivial in (False, True)
    )
    same = [torch.equal(a, b) for a, b in zip(plain, changed, strict=True)]
    assert any(same), "identity is one of the changes, and flips are as before"
    assert not all(same)
