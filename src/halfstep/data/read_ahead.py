"""Batches from memory, made ahead by threads.

A data set whose batch is one gather from an array needs no worker processes: the gather runs without the
interpreter's lock, and its result need not be sent from process to process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

Key = TypeVar("Key")
Made = TypeVar("Made")

BATCHES_A_THREAD = 2


@runtime_checkable
class WholeBatches(Protocol):
    """A data set that makes many samples at once, each the same as `sample` makes it alone."""

    def batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]: ...


def read_ahead(make: Callable[[Key], Made], keys: Iterable[Key], *, num_threads: int) -> Iterator[Made]:
    """`make` of every key, in order, a few of them ahead of their use."""
    waiting = iter(keys)
    with ThreadPoolExecutor(num_threads) as threads:
        begun: deque[Future[Made]] = deque()
        try:
            for key in waiting:
                begun.append(threads.submit(make, key))
                if len(begun) > BATCHES_A_THREAD * num_threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


def pinned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """In pinned memory where CUDA is in use, so that the copy to the device need not do it; as it is elsewhere."""
    if not torch.cuda.is_initialized():
        return batch
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
