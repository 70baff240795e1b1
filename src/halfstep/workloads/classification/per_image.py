"""A closer look at a classifier's answers: which classes it confuses, and where it is wrong and sure of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.islands import fp32_island, to_fp32
from halfstep.workloads.classification.scores import ClassificationMetrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    index: int
    label: int
    predicted: int
    confidence: float
    """Probability that the model gave to its answer."""


class ClassificationDetails(ClassificationMetrics):
    """The metrics of validation, the confusion matrix, and every answer with its confidence."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, confusion=True)
        self._answers: list[Tensor] = []

    def update(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> None:
        super().update(outputs, batch)
        predicted = outputs.argmax(dim=1)
        confidence = probabilities(outputs).gather(1, predicted.unsqueeze(1)).squeeze(1)
        # Numbers of samples and classes are exact in fp64.
        columns = (batch["index"], batch["label"], predicted, confidence)
        self._answers.append(torch.stack([column.double() for column in columns]))

    def mistakes(self) -> list[Mistake]:
        """Every wrong answer, the most confident first; waits for the device."""
        rows = torch.cat(self._answers, dim=1).T.tolist() if self._answers else []
        wrong = [
            Mistake(index=int(index), label=int(label), predicted=int(predicted), confidence=confidence)
            for index, label, predicted, confidence in rows
            if label != predicted
        ]
        return sorted(wrong, key=lambda m: (-m.confidence if math.isfinite(m.confidence) else 0.0, m.index))


def probabilities(logits: Tensor) -> Tensor:
    with fp32_island():
        return to_fp32(logits).softmax(dim=1)
