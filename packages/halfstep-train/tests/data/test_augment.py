from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from data.picture_folders import smooth_picture
from halfstep_train.data.image_samples import CROP_AREA, draw_boxes, draw_uniform, make_centre_boxes
from halfstep_train.models.patch_gan import IMAGENET_MEAN, IMAGENET_STD
from halfstep_train.workloads import load
from halfstep_train.workloads.classification.augment import CHANGES, augment_trivially_, prepare_images
from halfstep_train.workloads.classification.config import ImageAugmentConfig
from halfstep_train.workloads.segmentation.build import augment
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig
from halfstep_train.workloads.segmentation.data import IGNORED


def only(**changes: float) -> UNetAugmentConfig:
    return UNetAugmentConfig(**dict.fromkeys(UNetAugmentConfig.model_fields, 0) | changes)  # type: ignore[arg-type]


EVERYTHING = only(flip=0.5, rotate_degrees=30, scale=0.2, crop=0.3, brightness=0.2)


def blobs(num: int = 4, height: int = 40, width: int = 56) -> tuple[Tensor, Tensor]:
    """Images that show their own mask, so that a disagreement of the two is visible."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(num, 1, 5, 7, generator=generator)
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    image = (image > 0.5).float()
    return image, image[:, 0].byte()


def test_the_same_key_gives_the_same_bits_and_another_key_does_not() -> None:
    image, mask = blobs()
    first, again, other = (augment(image, mask, EVERYTHING, key=(3, step)) for step in (7, 7, 8))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert all(
        torch.equal(one, same)
        for one, same in zip((image, mask), augment(image, mask, only(), key=(0, 0)), strict=True)
    )


@pytest.mark.parametrize(
    "spec",
    [
        only(flip=1),
        only(rotate_degrees=90),
        only(scale=0.5),
        only(crop=0.5),
        EVERYTHING,
    ],
)
def test_image_and_mask_move_together(spec: UNetAugmentConfig) -> None:
    image, mask = blobs()
    moved, classes = augment(image, mask, spec, key=(1, 2))
    assert classes.dtype == torch.uint8
    assert not torch.equal(classes, mask)
    counts = classes != IGNORED
    # Bilinear and nearest differ only on the one-pixel rim of a blob.
    agree = ((moved[:, 0] > 0.5) == (classes == 1))[counts].float().mean()
    assert agree > 0.97
    assert set(classes.unique().tolist()) <= {0, 1, IGNORED}


def test_flips_are_exact() -> None:
    image, mask = blobs()
    moved, classes = augment(image, mask, only(flip=1), key=(0,))
    torch.testing.assert_close(moved, image.flip(2, 3), atol=1e-4, rtol=0)
    assert torch.equal(classes, mask.flip(1, 2))


def test_rotation_keeps_shapes_in_an_oblong_image() -> None:
    y, x = torch.meshgrid(torch.arange(64.0), torch.arange(128.0), indexing="ij")
    disc = ((y - 31.5) ** 2 + (x - 63.5) ** 2 < 20**2).byte().expand(8, -1, -1)
    _, turned = augment(disc[:, None].float(), disc, only(rotate_degrees=180), key=(4,))
    assert ((turned == disc) | (turned == IGNORED)).float().mean() > 0.995


def test_what_comes_from_outside_is_ignored_and_a_crop_never_leaves_the_image() -> None:
    image, mask = blobs()
    assert (augment(image, mask, only(rotate_degrees=45), key=(1,))[1] == IGNORED).any()
    for step in range(20):
        assert not (augment(image, mask, only(crop=0.5), key=(1, step))[1] == IGNORED).any()


def test_brightness_leaves_the_mask_alone_and_stays_in_bounds() -> None:
    image, mask = blobs()
    changed, same = augment(image + 0.5, mask, only(brightness=0.1), key=(1,))
    assert torch.equal(same, mask)
    difference = (changed - image - 0.5).abs()
    assert 0 < difference.max() <= 0.1 * 1.5 + 0.1 + 1e-6


def test_the_global_random_state_is_neither_read_nor_written() -> None:
    image, mask = blobs()
    before = torch.get_rng_state()
    augment(image, mask, EVERYTHING, key=(0,))
    assert torch.equal(torch.get_rng_state(), before)


# --- TrivialAugment, compared with Pillow ---

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


def batch_of(size: int = 48, count: int = 4) -> dict[str, Tensor]:
    images = [torch.tensor(np.array(smooth_picture(i, (size, size)))) for i in range(count)]
    whole = torch.tensor([0.0, 0.0, size, size]).repeat(count, 1)
    return {"image": torch.stack(images), "box": whole}


def levels(image: Tensor) -> Tensor:
    """Back from normalised values to 0..255."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    return (image * std + mean) * 255


def test_a_whole_box_shows_the_image_itself() -> None:
    batch = batch_of()
    expected = batch["image"].permute(0, 3, 1, 2)
    assert (levels(prepare_images(batch, 48)) - expected).abs().max() < 0.01
    without_box = {"image": batch["image"]}
    assert (levels(prepare_images(without_box, 48)) - expected).abs().max() < 0.001


@pytest.mark.parametrize(("box", "size"), [((5, 10, 37, 34), 64), ((0, 0, 48, 48), 40), ((8, 0, 9, 1), 16)])
def test_a_box_is_cropped_and_resized_as_pillow_does(box: tuple[int, int, int, int], size: int) -> None:
    batch = batch_of() | {"box": torch.tensor([box], dtype=torch.float32).repeat(4, 1)}
    shown = levels(prepare_images(batch, size))
    for row, image in enumerate(batch["image"]):
        cut = Image.fromarray(image.numpy()).crop(box).resize((size, size), Image.Resampling.BILINEAR)
        expected = torch.tensor(np.asarray(cut)).permute(2, 0, 1)
        # Pillow rounds to bytes, and reads 1.2 pixels where we read one.
        assert (shown[row] - expected).abs().mean() < 1


def test_many_stored_pixels_are_averaged_instead_of_missed() -> None:
    stripes = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    batch = {"image": stripes, "box": torch.tensor([[0.0, 0.0, 64.0, 64.0]])}
    shown = levels(prepare_images(batch, 16))
    assert (shown - 127.5).abs().max() < 1


def test_pixels_outside_the_box_are_never_read() -> None:
    batch = batch_of() | {"box": torch.tensor([[8.0, 8.0, 30.0, 30.0]]).repeat(4, 1)}
    poisoned = batch["image"].clone()
    poisoned[:, 30:] = poisoned[:, :, 30:] = poisoned[:, :8] = 0
    poisoned[:, :, :8] = 255
    one, other = levels(prepare_images(batch, 40)), levels(prepare_images(batch | {"image": poisoned}, 40))
    assert (one - other).abs().max() < 0.01  # of 255: positions are rounded to fp32


def test_the_key_alone_decides_and_one_setting_does_not_reshuffle_another() -> None:
    batch = batch_of(count=16)
    everything = ImageAugmentConfig(brightness=0.4, erase=0.5)
    assert torch.equal(
        prepare_images(batch, 32, changes=everything, key=(1, 2)),
        prepare_images(batch, 32, changes=everything, key=(1, 2)),
    )
    assert not torch.equal(
        prepare_images(batch, 32, changes=everything, key=(1, 2)),
        prepare_images(batch, 32, changes=everything, key=(1, 3)),
    )
    flipped = prepare_images(batch, 32, changes=ImageAugmentConfig(), key=(1, 2))
    erased = prepare_images(batch, 32, changes=ImageAugmentConfig(erase=0.5), key=(1, 2))
    assert torch.equal(erased[erased != 0], flipped[erased != 0])


def test_the_chance_of_a_flip_is_kept_and_a_flip_is_a_mirror_image() -> None:
    batch = batch_of(count=400)
    plain = prepare_images(batch, 48)
    mixed = prepare_images(batch, 48, changes=ImageAugmentConfig(flip=0.25), key=(0, 1))
    is_mirrored = (mixed - plain.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-3
    is_plain = (mixed - plain).abs().amax(dim=(1, 2, 3)) < 1e-3
    assert torch.equal(is_mirrored, ~is_plain)
    assert 0.15 < is_mirrored.float().mean() < 0.35


def test_erasing_blanks_a_rectangle_of_the_allowed_share() -> None:
    batch = batch_of(count=200)
    changes = ImageAugmentConfig(flip=0, erase=0.5)
    blank = (prepare_images(batch, 48, changes=changes, key=(3, 4)) == 0).all(dim=1)
    shares = blank.float().mean(dim=(1, 2))
    happened = shares > 0
    assert 0.38 < happened.float().mean() < 0.62
    assert shares[happened].min() > 0.01
    assert shares[happened].max() < 0.36
    for mask in blank[happened]:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns


def test_colour_changes_do_what_they_are_called() -> None:
    gray = {"image": torch.full((8, 16, 16, 3), 100, dtype=torch.uint8), "box": torch.tensor([[0.0, 0, 16, 16]] * 8)}
    brighter = levels(prepare_images(gray, 16, changes=ImageAugmentConfig(brightness=0.5), key=(0, 1)))[:, 0, 0, 0]
    assert brighter.min() >= 49.9
    assert brighter.max() <= 150.1
    assert brighter.std() > 5
    # Left dark red, right light blue: contrast changes their ratio, saturation that of their channels.
    halves = torch.tensor([[60, 20, 20]] * 8 + [[80, 80, 110]] * 8, dtype=torch.uint8).expand(8, 16, 16, 3)
    changed = levels(
        prepare_images({**gray, "image": halves}, 16, changes=ImageAugmentConfig(brightness=0.5), key=(0, 1))
    )
    left, right = changed[:, :, 0, 2], changed[:, :, 0, 13]
    assert (left.mean(1) / right.mean(1)).std() > 0.01
    assert (left[:, 0] / left[:, 1]).std() > 0.1


def torchvision_share(rng: np.random.Generator, width: int, height: int) -> float:
    """The area of a RandomResizedCrop: the first of ten random boxes that fits."""
    for _ in range(10):
        area, ratio = rng.uniform(0.08, 1) * width * height, np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, tall = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
        if wide <= width and tall <= height:
            return wide * tall / (width * height)
    raise AssertionError("no box fits in a picture of an allowed ratio")


def test_crops_have_the_shares_and_ratios_asked_for_and_stay_inside() -> None:
    sizes = np.tile([500, 375], (4000, 1))
    boxes = draw_boxes(sizes, CROP_AREA, seed=0, epoch=0, indices=np.arange(4000))
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0
    assert (boxes[:, 2:] <= [500, 375]).all()
    share, ratio = width * height / (500 * 375), width / height
    assert 0.07 < share.min() < 0.1
    assert 0.9 < share.max() <= 1
    reference = np.array([torchvision_share(np.random.default_rng(i), 500, 375) for i in range(4000)])
    # Three standard errors of a difference of two means.
    assert abs(share.mean() - reference.mean()) < 3 * np.sqrt(2 / 4000) * reference.std()
    assert abs(share.std() - reference.std()) < 0.02
    assert 0.73 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.36
    centre = (boxes[:, 0] + boxes[:, 2]) / 2
    assert abs(centre.mean() - 250) < 5


@pytest.mark.parametrize("size", [(1, 1), (2000, 10), (10, 2000)])
def test_a_crop_exists_for_every_image(size: tuple[int, int]) -> None:
    boxes = draw_boxes(np.tile(size, (200, 1)), CROP_AREA, seed=0, epoch=0, indices=np.arange(200))
    assert (boxes[:, 2:] - boxes[:, :2] >= 1).all()
    assert (boxes >= 0).all()
    assert (boxes[:, 2:] <= size).all()


def test_the_random_numbers_of_a_sample_are_its_own_and_even() -> None:
    many = draw_uniform(5, 2, np.arange(1000), count=8)
    assert np.array_equal(draw_uniform(5, 2, np.array([17]), count=8)[0], many[17])
    assert abs(many.mean() - 0.5) < 0.02
    assert len(np.unique(many)) == many.size
    for other in (draw_uniform(6, 2, np.arange(1000), count=8), draw_uniform(5, 3, np.arange(1000), count=8)):
        assert abs(np.corrcoef(many.ravel(), other.ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(many[:-1, 0], many[1:, 0])[0, 1]) < 0.1


def test_centre_boxes_are_squares_of_the_shorter_side() -> None:
    assert make_centre_boxes(np.array([[500, 400]]), 0.875).tolist() == [[75.0, 25.0, 425.0, 375.0]]
