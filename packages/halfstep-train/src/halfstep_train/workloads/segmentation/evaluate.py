"""Evaluation of segmentation: scores of each class, and a sheet of the worst, median and best images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfstep.errors import ConfigError, DataError
from halfstep_train.data.files import Array, BadFiles, list_some
from halfstep_train.data.images import read_image
from halfstep_train.data.layouts import PairLayout, has_folders
from halfstep_train.report.results import Cell
from halfstep_train.workloads.base.sheets import pick_worst_to_best
from halfstep_train.workloads.base.using import EvaluateRequest, LookAt, PlainEvaluation
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.segmentation.build import SHOWN_VALUES
from halfstep_train.workloads.segmentation.config import UNetConfig
from halfstep_train.workloads.segmentation.data import SegmentationData, collect_values
from halfstep_train.workloads.segmentation.masks import make_table, read_mask, to_colour
from halfstep_train.workloads.segmentation.pictures import SheetRow, draw_contact_sheet
from halfstep_train.workloads.segmentation.predict import WholeImages
from halfstep_train.workloads.segmentation.scores import SegmentationDetails, SegmentationMetrics, predict_classes

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
    names = tuple(pair.image.name for pair in samples.pairs)
    return replace(workload, val_samples=samples, val_names=names, notes=(*workload.notes, *notes))


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
    return mapped, [f"these masks have {theirs}, those of the run {ours}: treated as the same classes, in this order"]


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
        rows = [self._make_row(*shown, look) for shown in pick_worst_to_best(self.metrics.rank_images(), SHOWN_EACH)]
        path = folder / "contact_sheet.png"
        names = [f"{number}: {value}" for number, value in enumerate(self.values)]
        draw_contact_sheet(rows, background=self.background, names=names).save(path)
        return [path]

    def _make_row(self, kind: str, index: int, score: float, look: LookAt) -> SheetRow:
        names, samples = self.workload.val_names, self.workload.val_samples
        name = f"{kind}: {names[index] if names else index}, IoU {score:.3f}"
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
