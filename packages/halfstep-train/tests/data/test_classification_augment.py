from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data.picture_folders import smooth_picture
from halfstep_train.data.image_samples import CROP_AREA, draw_boxes, draw_uniform, make_centre_boxes
from halfstep_train.workloads.classification.augment import MEAN, STD, prepare_images
from halfstep_train.workloads.classification.config import ImageAugmentConfig


def batch_of(size: int = 48, count: int = 4) -> dict[str, Tensor]:
    images = [torch.tensor(np.array(smooth_picture(i, (size, size)))) for i in range(count)]
    whole = torch.tensor([0.0, 0.0, size, size]).repeat(count, 1)
    return {"image": torch.stack(images), "box": whole}


def levels(image: Tensor) -> Tensor:
    """Back from normalised values to 0..255."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
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
