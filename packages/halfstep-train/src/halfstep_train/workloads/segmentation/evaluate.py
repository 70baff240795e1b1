"""Evaluation and prediction of masks: scores of each class, and a sheet of the worst, median and best images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from halfstep.errors import ConfigError, DataError
from halfstep_train.data.files import READABLE_ENDINGS, Array, BadFiles, list_some
from halfstep_train.data.images import read_image, read_image_facts
from halfstep_train.data.layouts import MASK_SUFFIX, PairLayout, has_folders
from halfstep_train.data.loader import name_sample
from halfstep_train.report.run_report import Answer, Bar, Cell, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.using import (
    EvaluateRequest,
    Input,
    LookAt,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    answer_each,
    save_picture,
)
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.segmentation.build import (
    SHOWN_VALUES,
    build_model,
    find_background,
    read_image_format,
    read_table,
    to_unit_range,
)
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.data import (
    SegmentationData,
    collect_values,
    make_table,
    read_mask,
    read_planes,
    to_colour,
)
from halfstep_train.workloads.segmentation.pictures import SheetRow, draw_contact_sheet, draw_overlay
from halfstep_train.workloads.segmentation.scores import SegmentationDetails, SegmentationMetrics, predict_classes
from halfstep_train.workloads.segmentation.unet import compute_receptive_radius

SHOWN_EACH = 3
"""Number of worst, of median and of best images on the sheet, which then fits on a page."""


def use_pairs_folder(config: UNetConfig, folder: Path) -> UNetConfig:
    """Return settings for another folder without a split: `use_all_pairs` evaluates all its pairs."""
    values: dict[str, Any] = {"dir": str(folder), "val_fraction": 0.0, "val_list": None, "train_list": None}
    named = (config.data.val_images, config.data.val_masks)
    if any(named) and not has_folders(folder, PairLayout().make_names(*named)):
        values |= {"val_images": "", "val_masks": ""}  # they refer to the folder of the run
    return config.replace(data=values)


def use_all_pairs(workload: Workload) -> Workload:
    """Return the workload with all pairs as validation samples, unless the folder has a validation split.

    Masks with other values are mapped to the classes of the run.
    """
    samples = workload.val_samples if len(workload.val_samples) else workload.train_samples
    assert isinstance(samples, SegmentationData)
    samples, notes = _map_to_run_classes(samples)
    return replace(workload, val_samples=samples, notes=(*workload.notes, *notes))


def _map_to_run_classes(samples: SegmentationData) -> tuple[SegmentationData, list[str]]:
    """If both have two mask values that differ, map them to the run's classes in order (0 and 255 to 0 and 1)."""
    own = samples.table
    found = make_table(collect_values(samples.pairs, bad_files=BadFiles("error")), ignored=own.ignored)
    if {to_colour(value) for value in found.values} <= {to_colour(value) for value in own.values}:
        return samples, []
    theirs, ours = (list_some(table.values, SHOWN_VALUES) for table in (found, own))
    if not len(found.values) == len(own.values) == 2:
        raise DataError(
            f"these masks contain the values {theirs}, but the run's classes are {ours}",
            why="only two values for two classes can be matched by order",
            fix=f"save the masks with the values of the run: {ours}",
        )
    mapped = SegmentationData(samples.pairs, table=found, image=samples.image)
    return mapped, [f"these masks have {theirs}, but the run has {ours}: treated as the same classes, in this order"]


class SegmentationEvaluation(PlainEvaluation):
    """Evaluation of a U-Net, at the training size or (--full-size) at the original size of each image."""

    ranking = "IoU"
    change_data_folder = staticmethod(use_pairs_folder)
    use_all_samples = staticmethod(use_all_pairs)

    metrics: SegmentationDetails

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.values = workload.store["mask_values"]
        counted = workload.metrics()
        assert isinstance(counted, SegmentationMetrics)
        self.background = counted.background
        self.metrics = SegmentationDetails(counted.num_classes, counted.background)
        side = workload.store["image_size"]
        self.scored_at = (
            f"{side}×{side} pixels, as in training; --full-size scores masks at the size that predict writes"
        )
        self._segment: Callable[[Path], Array] | None = None
        """Returns the class map of an image at its original size; None unless --full-size is set."""

    def score_with_options(self, request: EvaluateRequest) -> dict[str, float] | None:
        """With --full-size, score every validation image at its original size; there is no loss then."""
        if not request.options["full_size"]:
            return None
        if request.batch_size is not None:
            raise ConfigError(
                f"--batch-size {request.batch_size} cannot be combined with --full-size",
                why="images of different sizes are evaluated one at a time",
                fix="leave one of them out",
            )
        self.scored_at = "the original size of each image, as predict writes masks"
        images = WholeImages(request.trained, store=self.workload.store, depth=request.config.model.depth)
        with request.phase("Evaluating", len(self.workload.val_samples)) as bar:
            self._segment = partial(images.segment, bar=bar)
            for index in range(len(self.workload.val_samples)):
                truth, prediction = self._load_maps(index)
                self.metrics.add_image(torch.from_numpy(prediction), torch.from_numpy(truth), index)
                bar.advance()
        return self.metrics.compute()

    def _load_maps(self, index: int) -> tuple[Array, Array]:
        """Return truth and prediction of an image at its original size. Files are read and predicted each time: all
        maps together may not fit in memory."""
        samples = self.workload.val_samples
        assert isinstance(samples, SegmentationData)
        assert self._segment is not None
        pair = samples.pairs[index]
        return samples.table.to_classes(read_mask(pair.mask), pair.mask), self._segment(pair.image)

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        """Return the scores of each class; None for a class that is absent from truth and prediction."""
        return tuple(
            {
                "class": f"{number}" + (" (background)" if number == self.background else ""),
                "mask value": str(self.values[number]),
                **scores,
            }
            for number, scores in enumerate(self.metrics.score_classes())
        )

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        rows = [self._make_row(*shown, look) for shown in pick_worst_to_best(self.metrics.rank_samples(), SHOWN_EACH)]
        path = folder / "contact_sheet.png"
        names = [f"{number}: {value}" for number, value in enumerate(self.values)]
        draw_contact_sheet(rows, background=self.background, names=names).save(path)
        return [path]

    def _make_row(self, kind: str, index: int, score: float, look: LookAt) -> SheetRow:
        samples = self.workload.val_samples
        name = f"{kind}: {name_sample(samples, index)}, IoU {score:.3f}"
        if self._segment is not None and isinstance(samples, SegmentationData):
            truth, prediction = self._load_maps(index)
            form = samples.image
            image = read_image(samples.pairs[index].image, channels=form.channels, raw_scale=form.raw_scale)
            return SheetRow(name=name, image=image, truth=truth, prediction=prediction)
        batch, logits = look(index)
        return SheetRow(
            name=name,
            image=batch["image"][0].permute(1, 2, 0).float().cpu().numpy(),
            truth=batch["mask"][0].cpu().numpy(),
            prediction=predict_classes(logits)[0].cpu().numpy(),
        )


# --- halfstep predict ---
#
# Small images are computed as a whole, large ones in overlapping tiles that give the same result: a tile is used only
# where the model's receptive field is inside the tile or ends at the edge of the image, and tiles start at multiples of
# the deepest pooling cell. With transposed convolutions each used pixel is then computed from the same inputs either
# way, and logits differ only by the rounding of convolutions at different sizes (1e-4 of the largest logit in fp32).
# Bilinear upsampling depends on the size of the tile, so the results are only close.


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
