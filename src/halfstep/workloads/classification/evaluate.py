"""Evaluation of classifiers: accuracy of every class, who is taken for whom, and the most confident mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from halfstep.report.class_pictures import ShownMistake, draw_confusion, draw_mistakes
from halfstep.report.evaluation_view import Cell
from halfstep.workloads.base.other_data import pictures_folder
from halfstep.workloads.base.using import Look, PlainEvaluation
from halfstep.workloads.base.workload import Workload
from halfstep.workloads.classification.scores import ClassificationDetails, Mistake

SHOWN_MISTAKES = 24


class ClassificationEvaluation(PlainEvaluation):
    ranking = "accuracy"
    config_for = staticmethod(pictures_folder)
    metrics: ClassificationDetails

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.names = class_names(workload.store)
        self.metrics = ClassificationDetails(len(self.names))

    def classes(self) -> tuple[dict[str, Cell], ...]:
        """Accuracy: the share of a class that was recognised. Precision: the share of such answers that was right."""
        confusion = self.metrics.confusion().numpy()
        answers = confusion.sum(axis=0)
        rows: list[dict[str, Cell]] = []
        for number, (seen, hits) in enumerate(self.metrics.per_class()):
            rows.append(
                {
                    "class": self.names[number],
                    "samples": seen,
                    "accuracy": hits / seen if seen else None,
                    "precision": hits / int(answers[number]) if answers[number] else None,
                    "most often taken for": self._rival(confusion[number], number),
                }
            )
        return tuple(rows)

    def draw(self, folder: Path, look: Look) -> list[Path]:
        """The confusion matrix, and the mistakes where there are any."""
        paths = [folder / "confusion.png"]
        draw_confusion(self.metrics.confusion().tolist(), self.names, paths[0])
        if mistakes := self.metrics.mistakes():
            paths.append(folder / "mistakes.png")
            draw_mistakes(
                [self._shown(mistake) for mistake in mistakes[:SHOWN_MISTAKES]], paths[1], total=len(mistakes)
            )
        return paths

    def _rival(self, row: np.ndarray[Any, Any], number: int) -> str:
        others = row.copy()
        others[number] = 0
        rival = int(others.argmax())
        return f"{self.names[rival]} ({others[rival]:,})" if others[rival] else ""

    def _shown(self, mistake: Mistake) -> ShownMistake:
        names = self.workload.val_names
        return ShownMistake(
            image=pixels_of(self.workload.val_samples.sample(mistake.index, key=(0, 0, mistake.index))),
            truth=self.names[mistake.label],
            answer=self.names[mistake.predicted],
            confidence=mistake.confidence,
            file=names[mistake.index] if names else f"sample {mistake.index}",
        )


def class_names(store: Any) -> list[str]:
    """What people call the classes: their titles where the data brought them, else the folders' names."""
    return [store["titles"].get(name, name) for name in store["classes"]]


def pixels_of(sample: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    """The bytes of one validation sample; of a stored image only the part that the model sees."""
    image = sample["image"].numpy()
    if "box" not in sample:
        return image
    left, top, right, bottom = (round(float(edge)) for edge in sample["box"])
    return np.asarray(image[top:bottom, left:right])
