"""`halfstep predict` for segmentation: write masks with the values and size of the originals, and overlays.

Small images are computed as a whole, large ones in overlapping tiles that give the same result: a tile is used only
where the model's receptive field is inside the tile or ends at the edge of the image, and tiles start at multiples of
the deepest pooling cell. With transposed convolutions each used pixel is then computed from the same inputs either way,
and logits differ only by the rounding of convolutions at different sizes (1e-4 of the largest logit in fp32). Bilinear
upsampling depends on the size of the tile, so the results are only close.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep_train.data.files import READABLE_ENDINGS, Array
from halfstep_train.data.images import read_image, read_image_facts
from halfstep_train.data.layouts import MASK_SUFFIX
from halfstep_train.report.progress import Bar
from halfstep_train.report.results import Answer, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.using import Input, PredictRequest, TrainedModel, answer_each, save_picture
from halfstep_train.workloads.segmentation.build import (
    build_model,
    find_background,
    read_image_format,
    read_table,
    to_unit_range,
)
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.data import read_planes
from halfstep_train.workloads.segmentation.pictures import draw_overlay
from halfstep_train.workloads.segmentation.scores import predict_classes
from halfstep_train.workloads.segmentation.unet import compute_receptive_radius


class MaskPredictor:
    """Predictor of masks: writes a mask and an overlay per image."""

    endings = READABLE_ENDINGS

    def __init__(self, config: UNetConfig, store: Store) -> None:
        self.config, self.store, self.table = config, store, read_table(store)
        self.model = build_model(config, store)

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        out = request.out
        assert out is not None
        images = WholeImages(trained, store=self.store, depth=self.config.model.depth, tile=request.options["tile"])
        return answer_each(inputs, lambda item: self._write_answer(item, images.segment(item.path, bar), out))

    def _write_answer(self, item: Input, classes: Array, out: Path) -> Answer:
        name = item.name.with_suffix("")
        mask_image = Image.fromarray(self.table.to_mask(classes))
        mask = save_picture(mask_image, out / "masks" / f"{name}{MASK_SUFFIX}.png")
        with allow_any_size():
            image = read_image(item.path, channels=self.store["channels"], raw_scale=self.store["raw_scale"])
        overlay = draw_overlay(image, classes, background=find_background(self.config, self.table))
        picture = save_picture(overlay, out / "overlays" / f"{name}_overlay.png")
        shares = {str(value): float((classes == k).mean()) for k, value in enumerate(self.table.values)}
        files = {"mask": str(mask), "overlay": str(picture)}
        listed = ", ".join(f"{value}: {share:.1%}" for value, share in shares.items())
        return Answer(
            file=str(item.path),
            found={**files, "shares": shares},
            cells={**files, **{f"share of {value}": share for value, share in shares.items()}},
            brief={"mask": str(mask), "share of each mask value": listed},
        )


Forward = Callable[[Tensor], Tensor]
"""images (N, C, H, W) -> logits (N, K, H, W), in evaluation mode and the run's precision."""
Span = tuple[int, int]
ReportTile = Callable[[int, int], None]
"""(tiles done, total), called before each tile."""

TILE = 1024
"""Usual side of a tile in pixels; takes a few GB at full model width."""
RESAMPLED_AT_ONCE = 1 << 24
"""Logits resampled at a time: 64 MiB."""
MAX_PIXELS = 1_000_000_000
"""Limit of pixels per image. Large scans and satellite images have about 10^8. Pillow needs 4 bytes per RGB pixel: 4 GB
at this limit."""


@torch.no_grad()
def predict_image(
    forward: Forward,
    image: Tensor,
    *,
    depth: int,
    tile: int = TILE,
    size: tuple[int, int] | None = None,
    report: ReportTile = lambda done, total: None,
) -> Tensor:
    """Return the class map (uint8, on the CPU) of one image (C, H, W), at its own size or at `size`.

    Images with a side longer than `tile` are computed in tiles. Logits are resampled instead of classes, which keeps
    edges at subpixel positions and thin lines connected.
    """
    _, height, width = image.shape
    classes = torch.empty(size or (height, width), dtype=torch.uint8)
    tiles = list(itertools.product(_list_spans(height, tile, depth), _list_spans(width, tile, depth)))
    for number, ((rows, used_rows), (columns, used_columns)) in enumerate(tiles):
        report(number, len(tiles))
        logits = forward(to_unit_range(image[None, :, slice(*rows), slice(*columns)]))
        _write_classes(classes, logits, _Axis(height, classes.shape[0], rows, used_rows),
               _Axis(width, classes.shape[1], columns, used_columns))  # fmt: skip
    return classes


class _Axis:
    """One tile along one axis: the pixels of the result that it determines, and their positions in the tile."""

    def __init__(self, length: int, result: int, seen: Span, used: Span) -> None:
        # Pixels are areas: the centre of the first one is half a pixel from the edge, at either size.
        positions = (torch.arange(result, dtype=torch.float64) + 0.5) * (length / result) - 0.5
        positions = positions.clamp(0, length - 1)
        first, end = torch.searchsorted(positions, torch.tensor(used, dtype=torch.float64)).tolist()
        self.own = slice(first, end if used[1] < length else result)
        self.positions = (positions[self.own] - seen[0]).float()


def _write_classes(classes: Tensor, logits: Tensor, rows: _Axis, columns: _Axis) -> None:
    """Write the classes of the pixels that a tile determines, some rows at a time to limit memory."""
    logits_per_row = logits.shape[1] * max(1, len(columns.positions))
    num_rows = max(1, RESAMPLED_AT_ONCE // logits_per_row)
    indices = torch.arange(len(classes))[rows.own]
    for positions, lines in zip(rows.positions.split(num_rows), indices.split(num_rows), strict=True):
        # Linear interpolation is separable: first along rows, then along columns.
        resampled = _resample(_resample(logits.float(), positions, 2), columns.positions, 3)
        classes[lines, columns.own] = predict_classes(resampled)[0].to(torch.uint8).cpu()


def _resample(logits: Tensor, positions: Tensor, axis: int) -> Tensor:
    """Interpolate linearly at `positions` along one axis; exact at integer positions."""
    before = positions.floor()
    weight = (positions - before).to(logits.device).view(-1, *[1] * (logits.ndim - axis - 1))
    first = before.long().to(logits.device)
    second = (first + 1).clamp(max=logits.shape[axis] - 1)
    return torch.lerp(logits.index_select(axis, first), logits.index_select(axis, second), weight)


def compute_margin(depth: int) -> int:
    """Return the margin that a tile needs around the used part, in pixels; one is for interpolation at the edge."""
    step = 1 << depth
    return -(-(compute_receptive_radius(depth) + 1) // step) * step


def _list_spans(length: int, tile: int, depth: int) -> Iterator[tuple[Span, Span]]:
    """Yield the span that each tile covers along one axis, and the part of it that is used. Parts do not overlap."""
    if length <= tile:
        yield (0, length), (0, length)
        return
    step = 1 << depth
    margin = compute_margin(depth)
    core = (tile - 2 * margin) // step * step
    if core < step:
        raise ConfigError(
            f"tiles of {tile} pixels are too small for a U-Net of depth {depth}",
            why=f"a pixel depends on {margin} pixels to each side",
            fix=f"use tiles of {2 * margin + 8 * step} pixels or more",
        )
    for start in range(0, length, core):
        end = min(start + core, length)
        yield (max(0, start - margin), min(length, end + margin)), (start, end)


class WholeImages:
    """Segments image files with a trained U-Net; halves the tiles if the device runs out of memory."""

    def __init__(self, trained: TrainedModel, *, store: Mapping[str, Any], depth: int, tile: int | None = None) -> None:
        self.trained, self.store, self.depth = trained, store, depth
        # Very deep models need larger tiles: eight cells of the deepest level between the margins.
        self.tile = tile or max(TILE, 2 * compute_margin(depth) + 8 * (1 << depth))

    def segment(self, path: Path, bar: Bar) -> Array:
        """Return the class map (uint8) of a file at its original size, computed at the scale of training; the progress
        bar shows tiles if there are several."""

        def report(done: int, total: int) -> None:
            bar.show({"tile": f"{done + 1}/{total}"} if total > 1 else {})

        with allow_any_size():
            image, size = self._read(path)
        while True:
            try:
                found = predict_image(self.trained, image, depth=self.depth, tile=self.tile, size=size, report=report)
                return found.numpy()
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None  # its frames hold activations, which must be freed
                torch.cuda.empty_cache()
                self.tile //= 2
                self.trained.warn(f"out of memory: continuing with tiles of {self.tile} pixels")

    def _read(self, path: Path) -> tuple[Tensor, tuple[int, int]]:
        """Return an image at the scale of training, on the device, and its original size."""
        original = read_image_facts(path).size
        if math.prod(original) > MAX_PIXELS:
            raise DataError(
                f"{path} has {original[1]:,}×{original[0]:,} = {math.prod(original):,} pixels, and the limit is "
                f"{MAX_PIXELS:,}: cut it into smaller images",
                why="decoding it could use up the memory of the machine",
            )
        factors, least = self.store["resize"], 2**self.depth
        height, width = (max(least, round(side * one)) for side, one in zip(original, factors, strict=True))
        planes = read_planes(path, replace(read_image_format(self.store), size=(height, width)))
        return torch.from_numpy(planes).to(self.trained.device), original


@contextmanager
def allow_any_size() -> Iterator[None]:
    """Disable Pillow's limit of 179 million pixels inside this context; `MAX_PIXELS` applies instead."""
    limit = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = limit
