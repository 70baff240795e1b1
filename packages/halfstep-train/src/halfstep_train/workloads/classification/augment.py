"""Convert stored bytes to the input of a classifier, with augmentation, for a whole batch on its device.

Crop, resize and flip are one sampling grid, so an image is interpolated only once. The grid reads bilinearly; if the
stored image has many more pixels than the model needs, several readings per pixel are averaged to avoid aliasing. The
crop is part of the batch (`box`). All other random numbers are drawn on the CPU from a key such as (seed, attempted
step): the same step sees the same images on any device, and nothing waits for the device.

TrivialAugment (Müller and Hutter 2021, wide set) applies one of 14 changes of random strength to each image. Ranges
are the paper's: 31 strengths, shear to 0.99, shifts to 32 pixels, rotations to 135 degrees, colour factors to 1 ± 0.99,
posterising to 2 bits. Images are floats in 0..255. Results equal those of Pillow up to rounding, and up to
bilinear interpolation in geometric changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.prefetching import send_to_device
from halfstep_train.data.image_samples import PIXELS_PER_READING
from halfstep_train.data.loader import BatchDraws
from halfstep_train.models.patch_gan import IMAGENET_MEAN, IMAGENET_STD
from halfstep_train.workloads.classification.config import ImageAugmentConfig

# (x / 255 - mean) / std = x * SCALE + SHIFT.
SCALE = tuple(1 / (255 * std) for std in IMAGENET_STD)
SHIFT = tuple(-mean / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True))
UNCHANGED = ImageAugmentConfig(flip=0.0)
NUM_DRAWS = 8
"""Random numbers per image: one for the flip, three for colours, four for erasing."""


ERASED_AREA, ERASED_RATIO = (0.02, 1 / 3), (0.3, 3.3)
"""Ranges of an erased rectangle's share of the image and of its aspect ratio (Zhong et al. 2017)."""


def prepare_images(
    batch: Mapping[str, Tensor],
    size: int,
    *,
    changes: ImageAugmentConfig = UNCHANGED,
    key: tuple[int, ...] = (0,),
) -> Tensor:
    """Return normalised float images (N, 3, size, size) from `image` (N, H, W, 3) bytes, with the training changes
    apart from crop and mixing.

    `box` (N, 4) selects the visible pixels of the stored image as left, top, right, bottom; without one, all are
    visible.
    """
    pixels = batch["image"]
    num, stored = pixels.shape[:2]
    # Always draw all numbers, so that enabling one change does not alter the random numbers of the others.
    draws = BatchDraws(key, num).uniform(NUM_DRAWS).T.contiguous()
    image = pixels.permute(0, 3, 1, 2).float()
    box = batch.get("box")
    if box is not None:
        # A flip is free as part of the grid; training batches always have a box.
        flip = send_to_device(draws[0] < changes.flip, pixels.device)
        image = resample(image, mirror_boxes(box, flip), size)
    else:
        assert stored == size, f"images of {stored} pixels without a box cannot become {size}"
    if changes.brightness:
        image = change_colours(image, draws[1:4], changes)
    if changes.trivial:
        image = augment_trivially_(image, key=key)
    scale, shift = (send_to_device(torch.tensor(values), pixels.device).view(1, 3, 1, 1) for values in (SCALE, SHIFT))
    image = torch.addcmul(shift, image, scale)
    if changes.erase:
        image = torch.where(send_to_device(draw_erased(draws[4:8], size, changes), pixels.device), 0.0, image)
    return image


def mirror_boxes(box: Tensor, flip: Tensor) -> Tensor:
    """Swap left and right of the boxes where `flip` is true: read backwards, they give a flipped image."""
    left, top, right, bottom = box.unbind(dim=1)
    # Indexing with a list of columns would copy the list to the device and synchronise.
    return torch.stack([torch.where(flip, right, left), top, torch.where(flip, left, right), bottom], dim=1)


def resample(image: Tensor, box: Tensor, size: int) -> Tensor:
    """Resize the pixels inside each box to (size, size), without reading pixels outside it."""
    height, width = image.shape[2:]
    # Readings per output pixel and axis, which are averaged at the end.
    readings = max(1, math.ceil(max(height, width) / (PIXELS_PER_READING * size)))
    steps = (torch.arange(size * readings, device=image.device, dtype=torch.float32) + 0.5) / (size * readings)
    left, top, right, bottom = box.T.unsqueeze(2)
    # grid_sample expects positions in -1..1.
    x = _spread_positions(left, right, steps) * (2 / width) - 1
    y = _spread_positions(top, bottom, steps) * (2 / height) - 1
    num, side = len(box), size * readings
    grid = torch.stack([x.unsqueeze(1).expand(num, side, side), y.unsqueeze(2).expand(num, side, side)], dim=-1)
    read = F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return F.avg_pool2d(read, readings) if readings > 1 else read


def change_colours(image: Tensor, draws: Tensor, changes: ImageAugmentConfig) -> Tensor:
    """Change brightness, contrast and saturation of images in 0..255, each by a random factor per image."""
    factors = send_to_device(1 + (draws * 2 - 1) * changes.brightness, image.device).view(3, -1, 1, 1, 1)
    brightness, contrast, saturation = factors.unbind()
    image = (image * brightness).clamp(0, 255)
    middle = to_gray(image).mean(dim=(2, 3), keepdim=True)
    image = torch.lerp(middle, image, contrast).clamp(0, 255)
    return torch.lerp(to_gray(image), image, saturation).clamp(0, 255)


def draw_erased(draws: Tensor, size: int, changes: ImageAugmentConfig) -> Tensor:
    """Return booleans (N, 1, size, size): true inside the erased rectangle of each image."""
    happens, area, shape, position = draws
    low, high = ERASED_AREA
    # Side of a square with the drawn share of the area, then stretched to the drawn aspect ratio.
    share = (low + area * (high - low)).sqrt()
    flat, tall = (math.log(ratio) / 2 for ratio in ERASED_RATIO)
    stretch = torch.exp(flat + shape * (tall - flat))
    wide, high_ = ((share * s).clamp(max=1) * size for s in (stretch, 1 / stretch))
    # One draw gives both coordinates: the column from its leading bits, the row from the bits after the first twelve.
    column, row = position, (position * 4096) % 1
    left, top = column * (size - wide), row * (size - high_)
    middle = torch.arange(size) + 0.5
    in_x = (middle > left.unsqueeze(1)) & (middle < (left + wide).unsqueeze(1))
    in_y = (middle > top.unsqueeze(1)) & (middle < (top + high_).unsqueeze(1))
    inside: Tensor = in_x.unsqueeze(1) & in_y.unsqueeze(2) & (happens < changes.erase).view(-1, 1, 1)
    return inside.unsqueeze(1)


def _spread_positions(start: Tensor, end: Tensor, steps: Tensor) -> Tensor:
    """Return pixel positions (N, side) from start to end, at least half a pixel inside the box."""
    low, high = torch.minimum(start, end) + 0.5, torch.maximum(start, end) - 0.5
    middle = (start + end) / 2  # for a box narrower than a pixel
    low, high = torch.minimum(low, middle), torch.maximum(high, middle)
    return (start + (end - start) * steps).clamp(low, high)


LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


def to_gray(image: Tensor) -> Tensor:
    """Return the luma (N, 1, H, W) of images (N, 3, H, W)."""
    red, green, blue = image.unbind(dim=1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).unsqueeze(1)


STRENGTHS = 31
"""Number of discrete strengths, from 0 to 1."""
STREAM = 0x7461
"""Distinguishes these random numbers from others with the same key ("ta" in ASCII)."""
LARGEST_SHEAR, LARGEST_SHIFT, LARGEST_TURN, LARGEST_FACTOR = 0.99, 32.0, 135.0, 0.99
"""Shift in pixels, turn in degrees."""
LOST_BITS = 6

Change = Callable[[Tensor, Tensor], Tensor]
"""(images (N, 3, S, S), strengths (N,) in -1..1 on the host) -> changed images."""


def augment_trivially_(image: Tensor, *, key: tuple[int, ...]) -> Tensor:
    """Apply one random change of random strength to every image, in place."""
    drawn = BatchDraws(key, len(image), STREAM)
    chosen = drawn.integers(len(CHANGES))
    strengths = drawn.integers(STRENGTHS) / (STRENGTHS - 1)
    signs = drawn.integers(2) * 2 - 1
    for number, change in enumerate(CHANGES.values()):
        rows = (chosen == number).nonzero().flatten()
        if len(rows):
            indices = send_to_device(rows, image.device)
            image[indices] = change(image[indices], (strengths * signs)[rows])
    return image


# --- geometric changes ---


def rotate(image: Tensor, strength: Tensor) -> Tensor:
    """Rotate counter-clockwise around the centre."""
    angle, middle = strength * -math.radians(LARGEST_TURN), image.shape[-1] / 2
    cos, sin = angle.cos(), angle.sin()
    rows = {(0, 0): cos, (0, 1): sin, (1, 0): -sin, (1, 1): cos}
    return move(image, rows | {(0, 2): middle * (1 - cos - sin), (1, 2): middle * (1 - cos + sin)})


def move(image: Tensor, entries: dict[tuple[int, int], Tensor]) -> Tensor:
    """Transform images: output pixel (x, y) is read at (a·x + b·y + c, d·x + e·y + f), in pixels from the corner.

    `entries` holds values (N,) by (row, column) of the matrix [[a, b, c], [d, e, f]]; others are those of the identity.
    Pixels from outside are black.
    """
    num, side = len(image), image.shape[-1]
    matrix = torch.eye(2, 3).repeat(num, 1, 1)
    for (row, column), values in entries.items():
        matrix[:, row, column] = values
    # affine_grid uses u in -1..1, with x = (u + 1) · side / 2.
    matrix[:, :, 2] = matrix[:, :, 0] + matrix[:, :, 1] + matrix[:, :, 2] * (2 / side) - 1
    grid = F.affine_grid(send_to_device(matrix, image.device), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# --- changes of colour ---


def sharpen(image: Tensor, strength: Tensor) -> Tensor:
    """Sharpen or blur by blending with Pillow's SMOOTH filter, which leaves the outermost pixels unchanged."""
    smooth = image.clone()
    # The filter is [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13.
    around = F.avg_pool2d(image, 3, stride=1) * 9
    smooth[..., 1:-1, 1:-1] = (around + 4 * image[..., 1:-1, 1:-1]) / 13
    return blend(smooth, image, strength)


def blend(nothing: Tensor, image: Tensor, strength: Tensor) -> Tensor:
    """Interpolate from `nothing` (factor 0) to the image (factor 1), or extrapolate beyond it."""
    factor = send_to_device((1 + strength * LARGEST_FACTOR).view(-1, 1, 1, 1), image.device)
    return torch.lerp(nothing.expand_as(image), image, factor).clamp(0, 255)


def posterise(image: Tensor, strength: Tensor) -> Tensor:
    """Keep only the leading bits of each channel: from all 8 down to 2."""
    lost = send_to_device(2.0 ** (strength.abs() * LOST_BITS).round().view(-1, 1, 1, 1), image.device)
    return (image.round() / lost).floor() * lost


def solarise(image: Tensor, strength: Tensor) -> Tensor:
    """Invert pixels at or above a threshold, which falls from 256 (none) to 0 (all)."""
    threshold = send_to_device((256 - strength.abs() * 256).floor().view(-1, 1, 1, 1), image.device)
    return torch.where(image.round() >= threshold, 255 - image, image)


def stretch_contrast(image: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to the full range 0..255 (autocontrast)."""
    low, high = image.amin(dim=(2, 3), keepdim=True), image.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (image - low) * (255 / (high - low).clamp(min=1e-6)), image).clamp(0, 255)


def equalise(image: Tensor, strength: Tensor) -> Tensor:
    """Equalise the histogram of each channel with Pillow's integer table."""
    levels = image.round().long().flatten(2)
    counts = torch.zeros(*levels.shape[:2], 256, dtype=torch.int64, device=image.device)
    counts.scatter_add_(2, levels, torch.ones_like(levels))
    # Pillow leaves the brightest level that occurs out of the sum.
    brightest = counts.gather(2, levels.amax(dim=2, keepdim=True))
    step = (counts.sum(dim=2, keepdim=True) - brightest) // 255
    table = ((step // 2 + counts.cumsum(dim=2) - counts) // step.clamp(min=1)).clamp(max=255)
    found = table.gather(2, levels).to(image.dtype).view_as(image)
    return torch.where((step > 0).unsqueeze(3), found, image)


CHANGES: dict[str, Change] = {
    "identity": lambda image, strength: image,
    "shear x": lambda image, strength: move(image, {(0, 1): strength * LARGEST_SHEAR}),
    "shear y": lambda image, strength: move(image, {(1, 0): strength * LARGEST_SHEAR}),
    "shift x": lambda image, strength: move(image, {(0, 2): strength * LARGEST_SHIFT}),
    "shift y": lambda image, strength: move(image, {(1, 2): strength * LARGEST_SHIFT}),
    "turn": rotate,
    "brightness": lambda image, strength: blend(torch.zeros_like(image), image, strength),
    "saturation": lambda image, strength: blend(to_gray(image), image, strength),
    "contrast": lambda image, strength: blend(to_gray(image).mean(dim=(2, 3), keepdim=True), image, strength),
    "sharpness": sharpen,
    "posterise": posterise,
    "solarise": solarise,
    "stretch": stretch_contrast,
    "equalise": equalise,
}
