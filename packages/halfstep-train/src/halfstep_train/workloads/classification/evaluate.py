"""Evaluation and prediction of classifiers: accuracy of each class, the confusion matrix, the worst mistakes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import DataError
from halfstep_train.data.files import IMAGE_ENDINGS, run_in_threads
from halfstep_train.data.image_samples import crop_centre
from halfstep_train.data.images import open_image_file
from halfstep_train.data.loader import name_sample
from halfstep_train.report.picture_file import BAD, FAINT, GOOD, INK, make_figure, save_figure, shorten_name
from halfstep_train.report.run_report import Answer, Bar, Cell, Failure
from halfstep_train.workloads.base.kind import Store
from halfstep_train.workloads.base.sheets import Array, draw_captioned
from halfstep_train.workloads.base.using import (
    Input,
    LookAt,
    PlainEvaluation,
    PredictRequest,
    TrainedModel,
    describe_failure,
    use_all_pictures,
)
from halfstep_train.workloads.base.workload import Workload
from halfstep_train.workloads.classification.build import PrepareImages, build_model
from halfstep_train.workloads.classification.config import ClassifierConfig
from halfstep_train.workloads.classification.data import get_evaluation_share, get_evaluation_size
from halfstep_train.workloads.classification.scores import ClassificationDetails, compute_probabilities

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_MISTAKES, ACROSS = 24, 6
LINE_LENGTH = 32
"""Characters below an image."""
Captioned = tuple[Array, list[tuple[str, str]]]
"""Pixels (H, W, 3), and lines of text with their colours."""


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
        return tuple(
            {
                "class": self.names[number],
                "samples": seen,
                "accuracy": hits / seen if seen else None,
                "precision": hits / int(answers[number]) if answers[number] else None,
                "most often confused with": self._find_rival(confusion[number], number),
            }
            for number, (seen, hits) in enumerate(self.metrics.count_by_class())
        )

    def draw_pictures(self, folder: Path, look: LookAt) -> list[Path]:
        """Draw the confusion matrix, and the mistakes if there are any."""
        paths = [folder / "confusion.png"]
        draw_confusion(self.metrics.get_confusion().tolist(), self.names, paths[0])
        if mistakes := self.metrics.list_mistakes():
            paths.append(folder / "mistakes.png")
            shown = [self._describe_mistake(*mistake) for mistake in mistakes[:SHOWN_MISTAKES]]
            title = f"The most confident mistakes, {len(shown):,} of {len(mistakes):,}"
            draw_captioned([title], shown, columns=min(ACROSS, len(shown))).save(paths[1])
        return paths

    def _find_rival(self, row: Array, number: int) -> str:
        others = row.copy()
        others[number] = 0
        rival = int(others.argmax())
        return f"{self.names[rival]} ({others[rival]:,})" if others[rival] else ""

    def _describe_mistake(self, index: int, label: int, predicted: int, confidence: float) -> Captioned:
        """Return the image as the model saw it, and the lines below it."""
        samples = self.workload.val_samples
        answer, truth = (shorten_name(self.names[number], NAME_LENGTH) for number in (predicted, label))
        file = shorten_name(name_sample(samples, index), LINE_LENGTH)
        pixels = get_shown_pixels(samples.sample(index, key=(0, 0, index)))
        return pixels, [(f"{answer}  {confidence:.0%}", BAD), (f"is {truth}", GOOD), (file, FAINT)]


def get_class_names(store: Any) -> list[str]:
    """Return readable class names: titles if the data has them, else the names of folders."""
    return [store["titles"].get(name, name) for name in store["classes"]]


def get_shown_pixels(sample: dict[str, Tensor]) -> Array:
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


# --- halfstep predict ---


class ClassPredictor:
    """Predictor of classes."""

    endings = IMAGE_ENDINGS

    def __init__(self, config: ClassifierConfig, store: Store) -> None:
        self.config, self.classes, self.names = config, store["classes"], get_class_names(store)
        self.model = build_model(config, store)
        self.prepare, self.eval_share = PrepareImages(config.data), get_evaluation_share(config.data, store)

    def answer_all(
        self, inputs: list[Input], trained: TrainedModel, request: PredictRequest, bar: Bar
    ) -> Iterator[Answer | Failure]:
        """Yield answers in the order of the files, computed in batches of the training size."""
        top_k, size = request.options["top_k"], self.config.train.batch_size
        for start in range(0, len(inputs), size):
            chunk = inputs[start : start + size]
            read = run_in_threads(self._read, chunk)
            pictures = [pixels for pixels in read if isinstance(pixels, Tensor)]
            found = iter(())
            if pictures:
                batch = self.prepare({"image": torch.stack(pictures).to(trained.device)}, key=(), training=False)
                found = iter(compute_probabilities(trained(batch["image"])).tolist())
            for item, outcome in zip(chunk, read, strict=True):
                if isinstance(outcome, DataError):
                    yield describe_failure(item, outcome)
                else:
                    yield self._make_answer(item, next(found), top_k)

    def _read(self, item: Input) -> Tensor:
        with open_image_file(item.path) as picture:
            return torch.from_numpy(crop_centre(picture, get_evaluation_size(self.config.data), self.eval_share))

    def _make_answer(self, item: Input, probabilities: list[float], top_k: int) -> Answer:
        best = sorted(range(len(probabilities)), key=lambda k: (-probabilities[k], k))[:top_k]
        top = [{"class": self.classes[k], "title": self.names[k], "probability": probabilities[k]} for k in best]
        first, *others = [f"{self.names[k]} {probabilities[k]:.1%}" for k in best]
        brief = {"answer": first, "then": ", ".join(others)}
        return Answer(file=str(item.path), found={"top": top}, brief=brief)
