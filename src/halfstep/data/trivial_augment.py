"""TrivialAugment (Müller and Hutter 2021), its wide set: to each image one of 14 changes, of a random strength.

Ranges are the paper's: 31 strengths, shear to 0.99, shifts to 32 pixels, turns to 135 degrees, colour factors to
1 ± 0.99, posterising to 2 bits. Images are floats in 0..255 on their device. Which change an image gets, and how
strong, is drawn on the host from a key, so the host knows the rows of each change and nothing waits; what a change
leaves of an image is Pillow's result but for rounding, and for bilinear reading where the image is moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.data.seeds import Drawn

LUMA = (0.299, 0.587, 0.114)  # ITU-R 601


def gray(image: Tensor) -> Tensor:
    """Luma (N, 1, H, W)."""
    red, green, blue = image.unbind(dim=1)
    return (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).unsqueeze(1)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


STRENGTHS = 31
STREAM = 0x7461
"""Sets these random numbers apart from others with the same key ("ta" in ASCII)."""
LARGEST_SHEAR, LARGEST_SHIFT, LARGEST_TURN, LARGEST_FACTOR = 0.99, 32.0, 135.0, 0.99
LOST_BITS = 6

Change = Callable[[Tensor, Tensor], Tensor]
"""Images (N, 3, S, S) and how strong each is changed, in -1..1 (N, on the host) to changed images."""


def trivially_augmented(image: Tensor, *, key: tuple[int, ...]) -> Tensor:
    """Every image with one random change; `image` itself is overwritten."""
    drawn = Drawn(key, len(image), STREAM)
    chosen = drawn.integers(len(CHANGES))
    strengths = drawn.integers(STRENGTHS) / (STRENGTHS - 1)
    signs = drawn.integers(2) * 2 - 1
    for number, change in enumerate(CHANGES.values()):
        rows = (chosen == number).nonzero().flatten()
        if len(rows):
            there = sent(rows, image.device)
            image[there] = change(image[there], (strengths * signs)[rows])
    return image


# --- moved ---


def turned(image: Tensor, strength: Tensor) -> Tensor:
    """Counter-clockwise around the middle."""
    angle, middle = strength * -math.radians(LARGEST_TURN), image.shape[-1] / 2
    cos, sin = angle.cos(), angle.sin()
    rows = {(0, 0): cos, (0, 1): sin, (1, 0): -sin, (1, 1): cos}
    return moved(image, rows | {(0, 2): middle * (1 - cos - sin), (1, 2): middle * (1 - cos + sin)})


def moved(image: Tensor, entries: dict[tuple[int, int], Tensor]) -> Tensor:
    """Each pixel read at a·x + b·y + c and d·x + e·y + f in pixels from the corner, black outside; else identity."""
    num, side = len(image), image.shape[-1]
    matrix = torch.eye(2, 3).repeat(num, 1, 1)
    for (row, column), values in entries.items():
        matrix[:, row, column] = values
    # affine_grid counts from the middle in half sides; x = (u + 1) · side / 2.
    matrix[:, :, 2] = matrix[:, :, 0] + matrix[:, :, 1] + matrix[:, :, 2] * (2 / side) - 1
    grid = F.affine_grid(sent(matrix, image.device), list(image.shape), align_corners=False)
    return F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


# --- recoloured ---


def sharpened(image: Tensor, strength: Tensor) -> Tensor:
    """Against Pillow's SMOOTH filter, which leaves the outermost pixels as they are."""
    smooth = image.clone()
    around = F.avg_pool2d(image, 3, stride=1) * 9
    smooth[..., 1:-1, 1:-1] = (around + 4 * image[..., 1:-1, 1:-1]) / 13
    return blended(smooth, image, strength)


def blended(nothing: Tensor, image: Tensor, strength: Tensor) -> Tensor:
    """From `nothing` at a factor of 0 over the image at 1 to beyond it."""
    factor = sent((1 + strength * LARGEST_FACTOR).view(-1, 1, 1, 1), image.device)
    return torch.lerp(nothing.expand_as(image), image, factor).clamp(0, 255)


def posterised(image: Tensor, strength: Tensor) -> Tensor:
    """Only the leading bits: from all 8 down to 2."""
    lost = sent(2.0 ** (strength.abs() * LOST_BITS).round().view(-1, 1, 1, 1), image.device)
    return (image.round() / lost).floor() * lost


def solarised(image: Tensor, strength: Tensor) -> Tensor:
    """Inverted from a level on: from 256, which none has, down to 0."""
    threshold = sent((256 - strength.abs() * 256).floor().view(-1, 1, 1, 1), image.device)
    return torch.where(image.round() >= threshold, 255 - image, image)


def stretched(image: Tensor, strength: Tensor) -> Tensor:
    """Each channel to the whole of 0..255 (autocontrast)."""
    low, high = image.amin(dim=(2, 3), keepdim=True), image.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (image - low) * (255 / (high - low).clamp(min=1e-6)), image).clamp(0, 255)


def equalised(image: Tensor, strength: Tensor) -> Tensor:
    """Each channel so that all levels are about as frequent, by Pillow's integer table."""
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
    "shear x": lambda image, strength: moved(image, {(0, 1): strength * LARGEST_SHEAR}),
    "shear y": lambda image, strength: moved(image, {(1, 0): strength * LARGEST_SHEAR}),
    "shift x": lambda image, strength: moved(image, {(0, 2): strength * LARGEST_SHIFT}),
    "shift y": lambda image, strength: moved(image, {(1, 2): strength * LARGEST_SHIFT}),
    "turn": turned,
    "brightness": lambda image, strength: blended(torch.zeros_like(image), image, strength),
    "saturation": lambda image, strength: blended(gray(image), image, strength),
    "contrast": lambda image, strength: blended(gray(image).mean(dim=(2, 3), keepdim=True), image, strength),
    "sharpness": sharpened,
    "posterise": posterised,
    "solarise": solarised,
    "stretch": stretched,
    "equalise": equalised,
}
