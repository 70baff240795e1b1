"""From stored bytes to what a classifier sees, for a whole batch on its device.

Crop, resize and flip are one sampling grid, so an image is interpolated once. The grid reads bilinearly; where the
store has many more pixels than the model wants, it reads several a pixel and averages them, against aliasing. The
crop itself comes with the batch (`box`); the other random numbers come from the CPU and from a key such as (seed,
attempted step): the same step always sees the same images, whatever the device, and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.data.seeds import Drawn
from halfstep.data.trivial_augment import gray, sent, trivially_augmented

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's channels in 0..1; official weights expect them."""
SCALE = tuple(1 / (255 * std) for std in STD)
SHIFT = tuple(-mean / std for mean, std in zip(MEAN, STD, strict=True))
PIXELS_A_READING = 1.5
"""Most stored pixels that one bilinear reading may stand for; from 2 on it would miss some."""
NUM_DRAWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageChanges:
    """How far training images are changed beside the crop; 0 switches a change off."""

    flip: float = 0.5
    """Chance of a mirror image."""
    brightness: float = 0.0
    """Largest relative change; likewise contrast and saturation."""
    contrast: float = 0.0
    saturation: float = 0.0
    trivial: bool = False
    """Whether each image gets one more change, of TrivialAugment's."""
    erase: float = 0.0
    """Chance that a rectangle is blanked (Zhong et al. 2017)."""
    erase_area: tuple[float, float] = (0.02, 1 / 3)
    """Share of the image that is blanked."""
    erase_ratio: tuple[float, float] = (0.3, 3.3)

    @property
    def colours(self) -> bool:
        """Whether any change is of colour."""
        return any((self.brightness, self.contrast, self.saturation))


UNCHANGED = ImageChanges(flip=0.0)


def model_images(
    batch: Mapping[str, Tensor], size: int, *, changes: ImageChanges = UNCHANGED, key: tuple[int, ...] = (0,)
) -> Tensor:
    """Normalised float images (N, 3, size, size) from `image` (N, H, W, 3) bytes.

    `box` (N, 4) says which pixels of the stored image are shown, as left, top, right, bottom; without one all are.
    """
    pixels = batch["image"]
    num, stored = pixels.shape[:2]
    # Drawn whatever is switched on, so that one setting does not reshuffle the others.
    draws = Drawn(key, num).uniform(NUM_DRAWS).T.contiguous()
    image = pixels.permute(0, 3, 1, 2).float()
    box = batch.get("box")
    if box is not None:
        # A mirror image costs nothing as part of the grid; training batches always have a box.
        flip = sent(draws[0] < changes.flip, pixels.device)
        image = resample(image, mirrored(box, flip), size)
    else:
        assert stored == size, f"images of {stored} pixels without a box, asked for {size}"
    if changes.colours:
        image = recoloured(image, draws[1:4], changes)
    if changes.trivial:
        image = trivially_augmented(image, key=key)
    scale, shift = (sent(torch.tensor(values), pixels.device).view(1, 3, 1, 1) for values in (SCALE, SHIFT))
    image = torch.addcmul(shift, image, scale)
    if changes.erase:
        image = torch.where(sent(erased(draws[4:8], size, changes), pixels.device), 0.0, image)
    return image


def mirrored(box: Tensor, flip: Tensor) -> Tensor:
    """The boxes with left and right exchanged where `flip` says so: read backwards, they show a mirror image."""
    left, top, right, bottom = box.unbind(dim=1)
    # Not by a list of columns: that would be copied to the device, with a wait.
    return torch.stack([torch.where(flip, right, left), top, torch.where(flip, left, right), bottom], dim=1)


def resample(image: Tensor, box: Tensor, size: int) -> Tensor:
    """The pixels inside each box, enlarged or shrunk to (size, size); what is outside a box is never read."""
    height, width = image.shape[2:]
    readings = max(1, math.ceil(max(height, width) / (PIXELS_A_READING * size)))
    steps = (torch.arange(size * readings, device=image.device, dtype=torch.float32) + 0.5) / (size * readings)
    left, top, right, bottom = box.T.unsqueeze(2)
    x = _positions(left, right, steps) * (2 / width) - 1
    y = _positions(top, bottom, steps) * (2 / height) - 1
    num, side = len(box), size * readings
    grid = torch.stack([x.unsqueeze(1).expand(num, side, side), y.unsqueeze(2).expand(num, side, side)], dim=-1)
    read = F.grid_sample(image, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return F.avg_pool2d(read, readings) if readings > 1 else read


def recoloured(image: Tensor, draws: Tensor, changes: ImageChanges) -> Tensor:
    """Brightness, contrast and saturation of images in 0..255, each changed by its own factor."""
    reach = torch.tensor([changes.brightness, changes.contrast, changes.saturation]).unsqueeze(1)
    factors = sent(1 + (draws * 2 - 1) * reach, image.device).view(3, -1, 1, 1, 1)
    brightness, contrast, saturation = factors.unbind()
    image = (image * brightness).clamp(0, 255)
    middle = gray(image).mean(dim=(2, 3), keepdim=True)
    image = torch.lerp(middle, image, contrast).clamp(0, 255)
    return torch.lerp(gray(image), image, saturation).clamp(0, 255)


def erased(draws: Tensor, size: int, changes: ImageChanges) -> Tensor:
    """Booleans (N, 1, size, size) that are true inside each image's blanked rectangle."""
    happens, area, shape, place = draws
    low, high = changes.erase_area
    share = (low + area * (high - low)).sqrt()
    flat, tall = (math.log(ratio) / 2 for ratio in changes.erase_ratio)
    stretch = torch.exp(flat + shape * (tall - flat))
    wide, high_ = ((share * s).clamp(max=1) * size for s in (stretch, 1 / stretch))
    # One draw gives both places: its leading bits the column, the rest the row.
    column, row = place, (place * 4096) % 1
    left, top = column * (size - wide), row * (size - high_)
    middle = torch.arange(size) + 0.5
    in_x = (middle > left.unsqueeze(1)) & (middle < (left + wide).unsqueeze(1))
    in_y = (middle > top.unsqueeze(1)) & (middle < (top + high_).unsqueeze(1))
    inside: Tensor = in_x.unsqueeze(1) & in_y.unsqueeze(2) & (happens < changes.erase).view(-1, 1, 1)
    return inside.unsqueeze(1)


def _positions(start: Tensor, end: Tensor, steps: Tensor) -> Tensor:
    """Pixel positions (N, side) from start to end, at least half a pixel inside."""
    low, high = torch.minimum(start, end) + 0.5, torch.maximum(start, end) - 0.5
    middle = (start + end) / 2  # of a box narrower than a pixel
    low, high = torch.minimum(low, middle), torch.maximum(high, middle)
    return (start + (end - start) * steps).clamp(low, high)
