"""Find the samples of a window that are to blame for a bad step.

Samples with non-finite or odd numbers are found by reading the window. Others are found by running the step without
some of them: bisection needs about 2·log2(samples) attempts for one culprit.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from halfstep.errors import HalfstepError
from halfstep.evidence.attempts import Subject, attempt
from halfstep.evidence.ranges import has_fractions
from halfstep.step.batches import count_samples

OUTLIER = 10.0
"""A sample with this many times the median loss caused the spike."""
MOST_ALONE = 512
"""Samples whose own loss is measured."""
ODD = 1e4
"""A number this many times the largest of all other samples is odd."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSample:
    """A number of the input that is not finite, or unlike those of other samples."""

    batch: int
    row: int
    key: str
    index: tuple[int, ...]
    value: complex
    sample: str = ""
    """The sample's id and file, as far as known."""
    others: str = ""
    """What the other samples have there."""

    def __str__(self) -> str:
        others = f", all others are {self.others}" if self.others else ""
        index = list(self.index) if self.index else ""
        return f"sample {self.sample}: {self.key}{index} is {self.value:.6g}{others}"


def find_bad_samples(window: Sequence[Any], names: Mapping[int, str]) -> list[BadSample]:
    """Return the first non-finite number of each sample."""
    found: dict[tuple[int, int], BadSample] = {}
    for number, key, value in _iterate_rows(window):
        for place in (~value.isfinite()).nonzero().tolist() if has_fractions(value) else ():
            row = (number, place[0])
            bad = BadSample(batch=number, row=place[0], key=key, index=tuple(place[1:]),
                           value=value[tuple(place)].item(), sample=name_sample(window, row, names))  # fmt: skip
            found.setdefault(row, bad)
    return list(found.values())


def find_odd_samples(
    window: Sequence[Any], rows: set[tuple[int, int]], names: Mapping[int, str], *, with_integers: bool
) -> list[BadSample]:
    """Return numbers of these samples that are not finite, far larger than all others', or integers outside the others'
    range: a marker for missing values, a label past the classes."""
    found: dict[tuple[int, int], BadSample] = {}
    for number, key, value in _iterate_rows(window):
        own = sorted(row for batch, row in rows if batch == number)
        rest = [row for row in range(len(value)) if row not in own]
        value = value.abs() if value.is_complex() else value  # complex numbers have no order
        if key == "['index']" or not own or not rest or not (value.is_floating_point() or with_integers):
            continue
        others = value[rest]
        low, high = float(others.min()), float(others.max())
        # Integers have no margin: a label outside of the range of all others is odd already.
        margin = (ODD - 1) * max(abs(low), abs(high)) if value.is_floating_point() else 0
        is_odd = (value < low - margin) | (value > high + margin) | ~value.isfinite()
        for place in is_odd[own].nonzero().tolist():
            row, index = (number, own[place[0]]), tuple(place[1:])
            odd = BadSample(batch=number, row=row[1], key=key, index=index, value=float(value[(row[1], *index)]),
                           sample=name_sample(window, row, names), others=f"{low:g} to {high:g}")  # fmt: skip
            found.setdefault(row, odd)
    return list(found.values())


def _iterate_rows(window: Sequence[Any]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield batch number, name and values of each tensor with one row per sample."""
    for number, batch in enumerate(window):
        for path, value in tree_flatten_with_path(batch)[0]:
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() and len(value) == count_samples(batch):
                yield number, keystr(path), value


def name_sample(window: Sequence[Any], place: tuple[int, int], names: Mapping[int, str]) -> str:
    """Return `17 (img_0017.png)`: the loader's index and the file, or the position in the window."""
    batch, row = window[place[0]], place[1]
    ids = batch.get("index") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or row >= len(ids):
        return f"row {row} of batch {place[0]}"
    number = int(ids[row])
    return f"{number} ({names[number]})" if names.get(number) else str(number)


def find_culprits(subject: Subject) -> set[tuple[int, int]]:
    """Return samples without which the step is good: one, found by bisection, or a few, each of which is bad in its
    half; empty if it takes more than half of them."""
    window = [(number, row) for number, batch in enumerate(subject.window) for row in range(count_samples(batch))]
    found = _find_one(subject, window) or set(_find_few(subject, window))
    return found if 2 * len(found) <= len(window) and _is_good_without(subject, found) else set()


def _find_one(subject: Subject, suspects: list[tuple[int, int]]) -> set[tuple[int, int]]:
    while len(suspects) > 1:
        halves = (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :])
        # Drop each half in turn: the culprit is in the half without which the step is good. If neither helps, there is
        # more than one.
        suspects = next((half for half in halves if _is_good_without(subject, set(half))), [])
    return set(suspects)


def _find_few(subject: Subject, suspects: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the samples that fail when run alone, found by bisection."""
    if len(suspects) == 1:
        yield suspects[0]
        return
    for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
        # Run this half alone, that is, without all other samples.
        everything = {(k, row) for k, batch in enumerate(subject.window) for row in range(count_samples(batch))}
        if not _is_good_without(subject, everything - set(half)):
            yield from _find_few(subject, half)


def _is_good_without(subject: Subject, rows: set[tuple[int, int]]) -> bool:
    left = drop_samples(subject.window, rows)
    return bool(left) and attempt(subject, "without samples", window=left).is_good


def drop_samples(window: Sequence[Any], rows: Collection[tuple[int, int]]) -> list[Any]:
    """Return the window without these samples; empty batches are removed."""
    left = []
    for number, batch in enumerate(window):
        if kept := [row for row in range(count_samples(batch)) if (number, row) not in rows]:
            left.append(take_rows(batch, kept))
    return left


def draw_samples(window: Sequence[Any], generator: torch.Generator) -> list[Any]:
    """Return as many samples of each batch, drawn with replacement, to imitate another window of the same data."""
    sizes = [count_samples(batch) for batch in window]
    return [
        take_rows(b, torch.randint(n, (n,), generator=generator).tolist()) for b, n in zip(window, sizes, strict=True)
    ]


def take_rows(batch: Any, rows: Sequence[int]) -> Any:
    """Return these samples of a batch: the rows of every tensor with one row per sample."""
    length = count_samples(batch)

    def taken(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == length
        return value[torch.tensor(rows, device=value.device)] if has_rows else value

    return tree_map(taken, batch)


def find_outliers(subject: Subject, names: Mapping[int, str]) -> list[tuple[tuple[int, int], str, float]]:
    """Return samples whose loss alone is far above the median: their position, name and loss."""
    losses = _measure_losses(subject)
    if len(losses) < 3:
        return []
    high = OUTLIER * max(statistics.median(losses.values()), 1e-12)
    outliers = [(place, loss) for place, loss in losses.items() if loss > high]
    return [(place, name_sample(subject.window, place, names), loss) for place, loss in outliers]


@torch.no_grad()
def _measure_losses(subject: Subject) -> dict[tuple[int, int], float]:
    """Return the loss of each sample alone, in evaluation mode: BatchNorm cannot train on one sample."""
    subject.model.eval()
    found: dict[tuple[int, int], float] = {}
    try:
        for number, batch in enumerate(subject.window):
            for row in range(count_samples(batch)):
                if len(found) < MOST_ALONE:
                    with subject.plan.forward():
                        value = subject.loss(take_rows(batch, [row]))
                    found[number, row] = float(value[0] if isinstance(value, tuple) else value)
    except HalfstepError:
        raise
    except Exception:  # the loss function does not take single samples
        return {}
    finally:
        subject.model.train()
        # The loss may have drawn random numbers or changed buffers.
        subject.restore_state()
    return found
