"""The samples of a window: which hold numbers that are not finite, which give a loss far above the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from halfstep.errors import HalfstepError
from halfstep.evidence.attempts import Subject, attempt
from halfstep.step.batches import batch_length

OUTLIER = 10.0
"""A sample whose loss is this many times the median's is what made the spike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadPlace:
    """A number of the input that is not finite."""

    batch: int
    row: int
    key: str
    index: tuple[int, ...]
    value: float
    name: str = ""
    """The sample's id and file, where they are known."""

    @property
    def sample(self) -> str:
        return self.name or row_name((self.batch, self.row))

    def __str__(self) -> str:
        return f"sample {self.sample}: {self.key}{list(self.index)} is {self.value}"


def bad_places(window: Sequence[Any], names: Mapping[int, str]) -> list[BadPlace]:
    """The first such number of each sample."""
    found: dict[tuple[int, int], BadPlace] = {}
    for number, batch in enumerate(window):
        for path, value in tree_flatten_with_path(batch)[0]:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
                continue
            for place in (~value.isfinite()).nonzero().tolist():
                row = place[0]
                bad = BadPlace(
                    batch=number, row=row, key=keystr(path), index=tuple(place[1:]), value=float(value[tuple(place)]),
                    name=sample_name(batch, row, names),
                )  # fmt: skip
                found.setdefault((number, row), bad)
    return list(found.values())


def sample_name(batch: Any, row: int, names: Mapping[int, str]) -> str:
    """`17 (img_0017.png)`: the loader's index and the file, as far as they are known."""
    ids = batch.get("index") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or row >= len(ids):
        return ""
    number = int(ids[row])
    return f"{number} ({names[number]})" if names.get(number) else str(number)


def row_name(place: tuple[int, int]) -> str:
    return f"row {place[1]} of batch {place[0]}"


def culprit(subject: Subject) -> tuple[int, int] | None:
    """Batch and row of the one sample without which the step is good, found by halves; None where it is not one."""
    suspects = [(number, row) for number, batch in enumerate(subject.window) for row in range(batch_length(batch))]
    is_shown = False
    while len(suspects) > 1 or not is_shown:
        halves = (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :])
        guilty = (half for half in halves if half and _is_good_without(subject, set(half)))
        suspects, is_shown = next(guilty, []), True
        if not suspects:
            return None
    return suspects[0]


def _is_good_without(subject: Subject, rows: set[tuple[int, int]]) -> bool:
    left = without(subject.window, rows)
    return bool(left) and attempt(subject, "without samples", window=left).is_good


def without(window: Sequence[Any], rows: set[tuple[int, int]]) -> list[Any]:
    """The window without these samples; batches that are left empty go whole."""
    left = []
    for number, batch in enumerate(window):
        length = batch_length(batch)
        kept = [row for row in range(length) if (number, row) not in rows]
        if kept:
            left.append(rows_of(batch, kept))
    return left


def rows_of(batch: Any, rows: Sequence[int]) -> Any:
    """These samples of a batch: of every tensor that has a row for each sample."""
    length = batch_length(batch)

    def taken(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == length
        return value[torch.tensor(rows, device=value.device)] if has_rows else value

    return tree_map(taken, batch)


def outliers(subject: Subject, names: Mapping[int, str]) -> list[tuple[tuple[int, int], str, float]]:
    """Samples whose loss alone is far above the median: their place, name and loss."""
    losses = _losses(subject)
    if len(losses) < 3:
        return []
    usual = statistics.median(losses.values())
    return [
        (place, sample_name(subject.window[place[0]], place[1], names) or row_name(place), loss)
        for place, loss in losses.items()
        if loss > OUTLIER * max(usual, 1e-12)
    ]


@torch.no_grad()
def _losses(subject: Subject, most: int = 512) -> dict[tuple[int, int], float]:
    """Of each sample alone, in evaluation mode: BatchNorm cannot train on one."""
    subject.model.eval()
    found: dict[tuple[int, int], float] = {}
    try:
        for number, batch in enumerate(subject.window):
            for row in range(batch_length(batch)):
                if len(found) < most:
                    with subject.plan.forward():
                        value = subject.loss(rows_of(batch, [row]))
                    found[number, row] = float(value[0] if isinstance(value, tuple) else value)
    except HalfstepError:
        raise
    except Exception:  # a loss that takes no single sample says nothing of single samples
        return {}
    finally:
        subject.model.train()
        subject.put_back()
    return found
