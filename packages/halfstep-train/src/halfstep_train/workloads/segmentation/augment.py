"""Augment images and masks together, for a whole batch on its device.

All geometric changes (flip, rotation, scale) form one sampling grid, so an image is interpolated only
once. Random numbers are drawn on the CPU from a key such as (seed, attempted step): the same step sees the same images
on any device, and nothing waits for the device. The grid is computed without `affine_grid`, which is a matrix product:
TF32 would round positions to half a pixel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.prefetching import send_to_device
from halfstep_train.data.seeds import BatchDraws
from halfstep_train.workloads.segmentation.config import UNetAugmentConfig
from halfstep_train.workloads.segmentation.masks import IGNORED


def augment(image: Tensor, mask: Tensor, spec: UNetAugmentConfig, *, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Augment images (N, C, H, W) in 0..1 and class maps (N, H, W) together; pixels from outside become IGNORED."""
    num, _, height, width = image.shape
    # Always draw all numbers, so that enabling one change does not alter the random numbers of the others.
    numbers = BatchDraws(key, num).uniform(9).T.contiguous()
    if spec.flip or spec.rotate_degrees or spec.scale:
        grid = _make_affine_grid(send_to_device(_draw_affine(numbers[:4], spec), image.device), height, width)
        image, mask = _sample(image, mask, grid)
    if spec.brightness:
        gain, offset = send_to_device((numbers[7:9] * 2 - 1) * spec.brightness, image.device).view(2, num, 1, 1, 1)
        image = image * (1 + gain) + offset
    return image, mask


def _draw_affine(numbers: Tensor, spec: UNetAugmentConfig) -> Tensor:
    """Return matrices (N, 4), row by row, that map output positions in -1..1 to input positions."""
    flip_x, flip_y, turn, zoom = numbers
    angle = (turn * 2 - 1) * math.radians(spec.rotate_degrees)
    window = 1 / (1 + (zoom * 2 - 1) * spec.scale)
    sign_x, sign_y = (1 - 2 * (flip < spec.flip).float() for flip in (flip_x, flip_y))
    cos, sin = angle.cos() * window, angle.sin() * window
    return torch.stack([sign_x * cos, -sign_x * sin, sign_y * sin, sign_y * cos], dim=1)


def _make_affine_grid(affine: Tensor, height: int, width: int) -> Tensor:
    """Return the sampling grid (N, height, width, 2) of affine matrices."""
    y, x = (
        ((torch.arange(side, device=affine.device, dtype=torch.float32) + 0.5) * 2 - side) / side
        for side in (height, width)
    )
    # Rotate in pixels, not in the unit square, which would distort images that are not square.
    ratio = width / height
    x, y = x.view(1, 1, width), y.view(1, height, 1)
    a = affine.view(-1, 4, 1, 1)
    source_x = a[:, 0] * x + a[:, 1] * y / ratio
    source_y = a[:, 2] * x * ratio + a[:, 3] * y
    return torch.stack([source_x, source_y], dim=-1)


def _sample(image: Tensor, mask: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Read images bilinearly and masks by nearest neighbour; pixels from outside become IGNORED in masks."""
    moved = F.grid_sample(image, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    # Classes below 256 are exact in fp32.
    classes = F.grid_sample(mask.unsqueeze(1).float(), grid, mode="nearest", padding_mode="border", align_corners=False)
    is_inside = (grid.abs() <= 1).all(dim=-1)
    return moved, torch.where(is_inside, classes.squeeze(1), IGNORED).to(mask.dtype)
