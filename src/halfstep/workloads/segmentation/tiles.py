"""Prediction for images of any size: whole where it fits, else in overlapping tiles that agree with the whole.

A tile's result is used only where the model's receptive field lies inside the tile or ends at the image's own edge,
and tiles start where all pooling levels start. So with transposed upsampling each used pixel is computed from the
same inputs in both ways, and logits differ by no more than the rounding of convolutions at different sizes (1e-4 of
the largest logit in fp32). Bilinear upsampling stretches with the tile, so there the agreement is only close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.data.images import image_facts
from halfstep.data.masks import resize_mask
from halfstep.data.segmentation import read_planes
from halfstep.errors import ConfigError
from halfstep.models.unet import receptive_radius
from halfstep.workloads.segmentation.build import image_format_of_store, unit_range
from halfstep.workloads.segmentation.scores import predicted_classes

Forward = Callable[[Tensor], Tensor]
"""Images (N, C, H, W) to logits (N, K, H, W), with the model in evaluation mode and its precision applied."""
Array = np.ndarray[Any, Any]
Span = tuple[int, int]


def predict_file(
    path: Path, forward: Forward, *, store: Mapping[str, Any], depth: int, device: torch.device, tile: int = 1024
) -> Array:
    """The class map (uint8) of an image file at its own size, computed at the scale the model was trained at."""
    original = image_facts(path).size
    height, width = (
        max(2**depth, round(side * factor)) for side, factor in zip(original, store["resize"], strict=True)
    )
    planes = read_planes(path, replace(image_format_of_store(store), size=(height, width)))
    classes = predict_image(forward, torch.from_numpy(planes).to(device), depth=depth, tile=tile)
    return resize_mask(classes.numpy(), original)


@torch.no_grad()
def predict_image(forward: Forward, image: Tensor, *, depth: int, tile: int = 1024) -> Tensor:
    """The class map (H, W, uint8, on the CPU) of one image (C, H, W); in tiles where a side is longer than `tile`."""
    _, height, width = image.shape
    classes = torch.empty(height, width, dtype=torch.uint8)
    for rows, used_rows in _spans(height, tile, depth):
        for columns, used_columns in _spans(width, tile, depth):
            part = unit_range(image[None, :, slice(*rows), slice(*columns)])
            found = predicted_classes(forward(part))[0].to(torch.uint8).cpu()
            inner = found[_inside(rows, used_rows), _inside(columns, used_columns)]
            classes[slice(*used_rows), slice(*used_columns)] = inner
    return classes


def _spans(length: int, tile: int, depth: int) -> Iterator[tuple[Span, Span]]:
    """Along one axis: what each tile sees, and the part of it whose result is used; the parts cover the axis once."""
    if length <= tile:
        yield (0, length), (0, length)
        return
    step = 1 << depth
    margin = -(-receptive_radius(depth) // step) * step
    core = (tile - 2 * margin) // step * step
    if core < step:
        raise ConfigError(
            f"tiles of {tile} pixels are too small for a U-Net of depth {depth}",
            why=f"a pixel depends on {margin} pixels to each side",
            fix=f"tiles of {2 * margin + 8 * step} pixels or more",
        )
    for start in range(0, length, core):
        end = min(start + core, length)
        yield (max(0, start - margin), min(length, end + margin)), (start, end)


def _inside(seen: Span, used: Span) -> slice:
    return slice(used[0] - seen[0], used[1] - seen[0])
