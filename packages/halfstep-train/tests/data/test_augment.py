from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.segmentation.augment import augment
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig
from halfstep_train.workloads.segmentation.masks import IGNORED


def only(**changes: float) -> UNetAugmentConfig:
    return UNetAugmentConfig(**dict.fromkeys(UNetAugmentConfig.model_fields, 0) | changes)  # type: ignore[arg-type]


EVERYTHING = only(flip=0.5, rotate_degrees=30, scale=0.2, brightness=0.2)


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


def test_what_comes_from_outside_is_ignored() -> None:
    image, mask = blobs()
    assert (augment(image, mask, only(rotate_degrees=45), key=(1,))[1] == IGNORED).any()


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
