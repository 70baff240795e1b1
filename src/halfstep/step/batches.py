"""What a step has to know of batches, which are the user's: how many samples one holds, and which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from halfstep.errors import DataError

Batch = Any
Window = Sequence[Batch]


def batch_length(batch: Batch) -> int:
    """Samples in a micro-batch: the first dimension of its first tensor."""
    tensor = next(_tensors_in(batch), None)
    if tensor is None or tensor.ndim == 0:
        raise DataError(
            f"cannot tell how many samples a batch of type {type(batch).__name__} holds",
            fix="let loss_fn return (loss, weight), for example (loss, number_of_tokens)",
        )
    return len(tensor)


def _tensors_in(batch: Batch) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(part)


def sample_ids(window: Window) -> tuple[Tensor, ...]:
    """The `index` entries of the window's batches, where the loader gives them."""
    found = (batch.get("index") for batch in window if isinstance(batch, Mapping))
    return tuple(ids for ids in found if isinstance(ids, Tensor))
