"""Batches that a worker process makes as a whole, straight into memory that it shares with the main process.

Sample by sample, every image would be copied once more into its batch, and what is computed for all of them at once
at nearly no cost would be computed for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import get_worker_info


@runtime_checkable
class WorkerBatches(Protocol):
    """A data set that makes many samples at once in a worker, each the same as `sample` makes it alone."""

    def filled(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, Tensor]: ...


def shared_bytes(*shape: int) -> Tensor:
    """Zero bytes; in a worker in shared memory, where the loader would have to copy others."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    # What torch's own collate does in a worker. New shared memory is zero, and costs only where it is written.
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]
