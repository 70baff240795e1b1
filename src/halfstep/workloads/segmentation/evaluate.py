"""Evaluation of segmentation: IoU and Dice of every class, and a sheet of the worst, middling and best images."""

from __future__ import annotations

from pathlib import Path

from halfstep.config.schema import RunConfig
from halfstep.report.evaluation_view import Cell
from halfstep.use.evaluation import Look
from halfstep.workloads.other_data import pairs_folder, with_all_pairs
from halfstep.workloads.segmentation.per_image import SegmentationDetails
from halfstep.workloads.segmentation.pictures import SheetRow, contact_sheet
from halfstep.workloads.segmentation.scores import predicted_classes
from halfstep.workloads.workload import Workload

SHOWN_EACH = 3
"""Images of each kind on the sheet: more makes it longer than a page."""


class SegmentationEvaluation:
    """Counts every class and every image."""

    ranking = "IoU"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.values = workload.store["mask_values"]
        self.metrics = SegmentationDetails(workload.store["num_classes"])

    @staticmethod
    def config_for(config: RunConfig, folder: Path) -> RunConfig:
        return pairs_folder(config, folder)

    @staticmethod
    def on_all(workload: Workload) -> Workload:
        return with_all_pairs(workload)

    def classes(self) -> tuple[dict[str, Cell], ...]:
        """A class without a pixel in truth and prediction has no score."""
        found = self.metrics.per_class()
        total = sum(pixels.true for pixels in found)
        return tuple(
            {
                "class": f"{number}" + (" (background)" if number == 0 else ""),
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
        """The contact sheet."""
        rows = [self._row(kind, index, score, look) for kind, index, score in _chosen(self.metrics.per_image())]
        path = folder / "contact_sheet.png"
        contact_sheet(rows).save(path)
        return [path]

    def _row(self, kind: str, index: int, score: float, look: Look) -> SheetRow:
        batch, logits = look(index)
        names = self.workload.val_names
        return SheetRow(
            name=f"{kind}: {names[index] if names else index}, IoU {score:.3f}",
            image=batch["image"][0].permute(1, 2, 0).float().cpu().numpy(),
            truth=batch["mask"][0].cpu().numpy(),
            prediction=predicted_classes(logits)[0].cpu().numpy(),
        )


def _chosen(ranked: list[tuple[int, float]]) -> list[tuple[str, int, float]]:
    """The worst, the middling and the best of images sorted by score; all of a few."""
    count = len(ranked)
    if count <= 3 * SHOWN_EACH:
        middle = range(0)
        worst, best = range(-(-count // 2)), range(-(-count // 2), count)
    else:
        start = (count - SHOWN_EACH) // 2
        worst, middle = range(SHOWN_EACH), range(start, start + SHOWN_EACH)
        best = range(count - SHOWN_EACH, count)
    kinds = {"worst": worst, "median": middle, "best": best}
    return [(kind, *ranked[place]) for kind, places in kinds.items() for place in places]
