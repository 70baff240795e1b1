"""Evaluation of classifiers: accuracy of each class, the confusion matrix, and the most confident mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from halfstep_train.report.picture_file import BAD, FAINT, GOOD, INK, make_figure, save_figure, shorten_name
from halfstep_train.report.results import Cell
from halfstep_train.workloads.base.other_data import use_all_pictures
from halfstep_train.workloads.base.using import LookAt, PlainEvaluation
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.classification.scores import ClassificationDetails

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SHOWN_MISTAKES = 24


class ClassificationEvaluation(PlainEvaluation):
    """Evaluation with scores per class, a confusion matrix and a page of mistakes."""

    ranking = "accuracy"
    change_data_folder = staticmethod(use_all_pictures)
    metrics: ClassificationDetails

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.names = get_class_names(workload.store)
        self.metrics = ClassificationDetails(len(self.names))

    def score_classes(self) -> tuple[dict[str, Cell], ...]:
        """Return the accuracy of each class (how many of its samples are recognised) and its precision (how many of
        these answers are correct)."""
        confusion = self.metrics.get_confusion().numpy()
        answers = confusion.sum(axis=0)
        rows: list[dict[str, Cell]] = []
        for number, (seen, hits) in enumerate(self.metrics.count_by_class()):
            rows.append(
                {
                    "class": self.names[number],
                    "samples": seen,
                    "accuracy": hits / seen if seen else None,
                    "precision": hits / int(answers[number]) if answers[number] else None,
                    "most often confused with": self._find_rival(confusion[number], number),
                }
            )
        return tuple(rows)

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Draw the confusion matrix, and the mistakes if there are any."""
        paths = [folder / "confusion.png"]
        draw_confusion(self.metrics.get_confusion().tolist(), self.names, paths[0])
        if mistakes := self.metrics.list_mistakes():
            paths.append(folder / "mistakes.png")
            shown = [self._describe_mistake(*mistake) for mistake in mistakes[:SHOWN_MISTAKES]]
            draw_mistakes(shown, paths[1], total=len(mistakes))
        return paths

    def _find_rival(self, row: np.ndarray[Any, Any], number: int) -> str:
        others = row.copy()
        others[number] = 0
        rival = int(others.argmax())
        return f"{self.names[rival]} ({others[rival]:,})" if others[rival] else ""

    def _describe_mistake(self, index: int, label: int, predicted: int, confidence: float) -> ShownMistake:
        names = self.workload.val_names
        return ShownMistake(
            image=get_shown_pixels(self.workload.val_samples.sample(index, key=(0, 0, index))),
            truth=self.names[label],
            answer=self.names[predicted],
            confidence=confidence,
            file=names[index] if names else f"sample {index}",
        )


def get_class_names(store: Any) -> list[str]:
    """Return readable class names: titles if the data has them, else the names of folders."""
    return [store["titles"].get(name, name) for name in store["classes"]]


def get_shown_pixels(sample: dict[str, Tensor]) -> np.ndarray[Any, Any]:
    """Return the pixels of a validation sample as the model sees them, uint8 (H, W, 3)."""
    image = sample["image"].numpy()
    if "box" not in sample:
        return image
    left, top, right, bottom = (round(float(edge)) for edge in sample["box"])
    return np.asarray(image[top:bottom, left:right])


NUMBERED_UP_TO = 24
"""Up to this many classes, cells contain numbers; beyond it they would be illegible."""
NAMED_UP_TO = 64
"""Up to this many classes, all are named at the axes; beyond it only some."""
INCHES_PER_CLASS, LEAST_INCHES, MOST_INCHES = 0.42, 4.2, 14.0
NAME_LENGTH = 22


def draw_confusion(counts: Sequence[Sequence[int]], names: Sequence[str], path: Path) -> None:
    """Draw the confusion matrix: counts by true class (row) and predicted class (column)."""
    matrix = np.asarray(counts, dtype=np.float64)
    # Colours are shares of each true class, so that rare classes are visible; 1 avoids 0/0 for absent ones.
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(min=1)
    side = min(MOST_INCHES, max(LEAST_INCHES, INCHES_PER_CLASS * len(names)))
    figure = make_figure((side + 2.6, side + 1.8))
    axes: Axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    _label_axes(axes, names)
    if len(names) <= NUMBERED_UP_TO:
        for row, column in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if shares[row, column] > 0.55 else INK
            axes.text(column, row, f"{int(matrix[row, column]):,}", ha="center", va="center", fontsize=8, color=colour)
    hits = matrix.trace() / max(matrix.sum(), 1)
    axes.set_title(
        f"{hits:.1%} of {int(matrix.sum()):,} correct", loc="left", fontsize=11, fontweight="bold", color=INK
    )
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, format=lambda value, _: f"{value:.0%}")
    bar.set_label("share of the true class", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    save_figure(figure, path)


def _label_axes(axes: Axes, names: Sequence[str]) -> None:
    # Name every n-th class if there are many.
    every = -(-len(names) // NAMED_UP_TO)
    positions = range(0, len(names), every)
    labels = [shorten_name(names[index], NAME_LENGTH) for index in positions]
    size = 9 if len(names) <= NUMBERED_UP_TO else 7
    upright: dict[str, Any] = {} if max(map(len, labels)) <= 3 else {"rotation": 45, "ha": "right"}
    axes.set_xticks(positions, labels, fontsize=size, rotation_mode="anchor", **upright)
    axes.set_yticks(positions, labels, fontsize=size)
    axes.set_xlabel("predicted", fontsize=10, color=INK)
    axes.set_ylabel("true", fontsize=10, color=INK)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


ACROSS = 6
PICTURE, INCHES_WIDE, INCHES_HIGH = 1.8, 2.0, 2.45
"""In inches: side of an image, and the space it takes including text and margins."""
TITLE_WIDE, TITLE_HIGH = 4.0, 0.32
LINE_LENGTH = 26


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownMistake:
    """A wrong prediction with everything that is drawn."""

    image: np.ndarray[Any, Any]
    """(H, W, 3) uint8, as the model saw it."""
    truth: str
    answer: str
    confidence: float
    file: str


def draw_mistakes(mistakes: Sequence[ShownMistake], path: Path, *, total: int) -> None:
    """Draw a page of mistakes in the given order; `total` is the number of all mistakes."""
    across = min(ACROSS, len(mistakes))
    down = -(-len(mistakes) // across)
    wide, high = max(across * INCHES_WIDE, TITLE_WIDE), down * INCHES_HIGH + TITLE_HIGH
    figure = make_figure((wide, high), makes_room=False)
    for index, mistake in enumerate(mistakes):
        row, column = divmod(index, across)
        top = high - TITLE_HIGH - row * INCHES_HIGH
        # add_axes takes fractions of the figure, measured from its lower left corner.
        corner = column * INCHES_WIDE / wide, (top - PICTURE) / high
        _draw_mistake(figure.add_axes((*corner, PICTURE / wide, PICTURE / high)), mistake)
    title = f"The most confident mistakes, {len(mistakes):,} of {total:,}"
    figure.text(0, 1, title, va="top", fontsize=11, fontweight="bold", color=INK)
    save_figure(figure, path)


def _draw_mistake(axes: Axes, mistake: ShownMistake) -> None:
    axes.imshow(mistake.image, interpolation="nearest", aspect="auto")
    axes.axis("off")
    lines = (
        (f"{shorten_name(mistake.answer, LINE_LENGTH - 6)}  {mistake.confidence:.0%}", 8.5, BAD, "bold"),
        (f"is {shorten_name(mistake.truth, LINE_LENGTH - 3)}", 8.5, GOOD, "normal"),
        (shorten_name(mistake.file, LINE_LENGTH + 4), 7, FAINT, "normal"),
    )
    for index, (text, size, colour, weight) in enumerate(lines):
        style: dict[str, Any] = {"fontsize": size, "color": colour, "fontweight": weight}
        axes.annotate(
            text, (0, 0), (0, -3 - 11 * index), xycoords="axes fraction", textcoords="offset points", va="top", **style
        )
