"""Batches copied to the device ahead of their use, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = dict[str, Tensor]


class Prefetcher:
    """Iterate over batches on `device`; `waited_s` is the host time spent waiting for them."""

    def __init__(self, batches: Iterable[Batch], device: torch.device, depth: int) -> None:
        self._batches, self._device, self._depth = iter(batches), device, depth
        self._ready: deque[tuple[Batch, torch.cuda.Event | None]] = deque()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while len(self._ready) < self._depth and (batch := self._fetch()) is not None:
            self._ready.append(self._send(batch))
        if not self._ready:
            raise StopIteration
        batch, copied = self._ready.popleft()
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in batch.values():
                # Made on the side stream: without this its memory could be handed out while we still read it.
                tensor.record_stream(stream)
        return batch

    def _fetch(self) -> Batch | None:
        start = time.perf_counter()
        batch = next(self._batches, None)
        self.waited_s += time.perf_counter() - start
        return batch

    def _send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._side is None:
            return {name: tensor.to(self._device) for name, tensor in batch.items()}, None
        with torch.cuda.stream(self._side):
            sent = {name: tensor.pin_memory().to(self._device, non_blocking=True) for name, tensor in batch.items()}
            copied = torch.cuda.Event()
            copied.record(self._side)
        return sent, copied


def prefetch(batches: Iterable[Batch], device: torch.device | str, *, depth: int = 2) -> Prefetcher:
    """Return the same batches in the same order on `device`; on CUDA up to `depth` are copied ahead."""
    device = torch.device(device)
    return Prefetcher(batches, device, depth if device.type == "cuda" else 1)


def send_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to the device without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
