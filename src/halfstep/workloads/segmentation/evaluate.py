"""Evaluation of segmentation: IoU and Dice of every class, and a sheet of the worst, middling and best images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from halfstep.data.images import read_image
from halfstep.data.masks import Array, read_mask
from halfstep.data.segmentation import SegmentationData
from halfstep.errors import ConfigError
from halfstep.report.evaluation_view import Cell
from halfstep.report.progress import Bar
from halfstep.workloads.other_data import pairs_folder, with_all_pairs
from halfstep.workloads.segmentation.config import UNetConfig
from halfstep.workloads.segmentation.pictures import SheetRow, contact_sheet
from halfstep.workloads.segmentation.predict import WholeImages
from halfstep.workloads.segmentation.scores import SegmentationDetails, SegmentationMetrics, predicted_classes
from halfstep.workloads.sheets import worst_to_best
from halfstep.workloads.using import Look, Phase, PlainEvaluation, Trained
from halfstep.workloads.workload import Workload

SHOWN_EACH = 3  # images of each kind on the sheet: more makes it longer than a page


class SegmentationEvaluation:
    ranking = "IoU"
    to_validate = staticmethod(PlainEvaluation.to_validate)
    config_for = staticmethod(pairs_folder)
    on_all = staticmethod(with_all_pairs)

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.values = workload.store["mask_values"]
        counted = workload.metrics()
        assert isinstance(counted, SegmentationMetrics)
        self.background = counted.background
        self.metrics = SegmentationDetails(counted.num_classes, counted.background)
        self._at_full_size: FullSize | None = None

    @property
    def scored_at(self) -> str:
        """The size of the masks that were compared."""
        if self._at_full_size is not None:
            return "each image's own size, as predict writes masks"
        side = self.workload.store["image_size"]
        return f"{side}×{side} pixels, as in training; --full-size scores masks at the size that predict writes"

    def scored(
        self, config: UNetConfig, trained: Trained, options: Mapping[str, Any], phase: Phase, batch_size: int | None
    ) -> dict[str, float] | None:
        """With --full-size every validation image at its own size; there is no loss to report."""
        if not options["full_size"]:
            return None
        if batch_size is not None:
            raise ConfigError(
                f"--batch-size {batch_size} means nothing with --full-size",
                why="images of different sizes are taken one at a time",
                fix="leave one of them out",
            )
        with phase("Evaluating", len(self.workload.val_samples)) as bar:
            return self._score_full_size(config, trained, bar)

    def _score_full_size(self, config: UNetConfig, trained: Trained, bar: Bar) -> dict[str, float]:
        assert isinstance(self.workload.val_samples, SegmentationData)
        images = WholeImages(trained, store=self.workload.store, depth=config.model.depth)
        self._at_full_size = FullSize(self.workload.val_samples, images, bar)
        for index in range(len(self.workload.val_samples)):
            truth, prediction = self._at_full_size.maps(index)
            self.metrics.count(torch.from_numpy(prediction), torch.from_numpy(truth), index)
            bar.advance()
        return self.metrics.compute()

    def classes(self) -> tuple[dict[str, Cell], ...]:
        """A class without a pixel in truth and prediction has no score."""
        found = self.metrics.per_class()
        total = sum(pixels.true for pixels in found)
        return tuple(
            {
                "class": f"{number}" + (" (background)" if number == self.background else ""),
                "mask value": str(self.values[number]),
                "IoU": pixels.iou,
                "Dice": pixels.dice,
                "precision": pixels.precision,
                "recall": pixels.recall,
                "share of pixels": pixels.true / total if total else None,
            }
            for number, pixels in enumerate(found)
        )

    def draw(self, folder: Path, look: Look) -> list[Path]:
        rows = [self._row(*shown, look) for shown in worst_to_best(self.metrics.per_image(), SHOWN_EACH)]
        path = folder / "contact_sheet.png"
        names = [f"{number}: {value}" for number, value in enumerate(self.values)]
        contact_sheet(rows, background=self.background, names=names).save(path)
        return [path]

    def _row(self, kind: str, index: int, score: float, look: Look) -> SheetRow:
        names = self.workload.val_names
        name = f"{kind}: {names[index] if names else index}, IoU {score:.3f}"
        if self._at_full_size is not None:
            truth, prediction = self._at_full_size.maps(index)
            return SheetRow(name=name, image=self._at_full_size.image(index), truth=truth, prediction=prediction)
        batch, logits = look(index)
        return SheetRow(
            name=name,
            image=batch["image"][0].permute(1, 2, 0).float().cpu().numpy(),
            truth=batch["mask"][0].cpu().numpy(),
            prediction=predicted_classes(logits)[0].cpu().numpy(),
        )


class FullSize:
    def __init__(self, samples: SegmentationData, images: WholeImages, bar: Bar) -> None:
        self._samples, self._images, self._bar = samples, images, bar

    def maps(self, index: int) -> tuple[Array, Array]:
        """Truth and prediction; the file is read and predicted again each time, since many would not fit in memory."""
        pair = self._samples.pairs[index]
        return self._samples.table.classes_of(read_mask(pair.mask), pair.mask), self._images.classes(
            pair.image, self._bar
        )

    def image(self, index: int) -> Array:
        form = self._samples.image
        pixels = read_image(self._samples.pairs[index].image, channels=form.channels, raw_scale=form.raw_scale)
        return pixels if pixels.shape[-1] != 2 else pixels[..., :1]
