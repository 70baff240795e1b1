"""Read from a user's batches what a step needs: number of samples, sample ids, and weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep.errors import DataError

Batch = Any
Window = Sequence[Batch]
Weight = Tensor | float | int  # what a micro-batch counts in its window


def count_samples(batch: Batch) -> int:
    """Return the number of samples in a micro-batch: the first dimension of its first tensor or array."""
    array = find_first_array(batch)
    if array is None or array.ndim == 0:
        raise DataError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} contains",
            fix="let loss_fn return (loss, weight), for example (loss, number_of_tokens)",
        )
    return len(array)


def find_first_array(batch: Batch) -> Tensor | np.ndarray[Any, Any] | None:
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch
    if isinstance(batch, (list, tuple, Mapping)):  # in this order: a look at an abstract class takes long
        for part in batch if isinstance(batch, (list, tuple)) else batch.values():
            if (found := find_first_array(part)) is not None:
                return found
    return None


def read_sample_ids(window: Window) -> tuple[Tensor, ...]:
    """Return the `index` entries of the window's batches, if the loader gives them."""
    found = [batch.get("index") for batch in window if isinstance(batch, Mapping)]
    return tuple([ids for ids in found if isinstance(ids, Tensor)])


def is_one(factor: Weight) -> bool:
    """True if the host knows that the factor is 1: a multiplication would waste a kernel."""
    return not isinstance(factor, Tensor) and factor == 1


def make_positive(weight: Weight) -> Weight:
    """Return the weight if it is positive, else 1: the other weights of its window are divided by it."""
    if isinstance(weight, Tensor):
        weight = weight.detach().float()
        return torch.where(weight > 0, weight, torch.ones_like(weight))
    return weight
