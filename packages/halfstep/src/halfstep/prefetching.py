"""Batches copied to the device ahead of their use, and the time spent waiting for them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

B = TypeVar("B")


class Prefetcher(Generic[B]):
    """Iterate over batches on `device`; `waited_s` is the host time spent waiting for them."""

    def __init__(self, batches: Iterable[B], device: torch.device, depth: int) -> None:
        self.source, self.depth = batches, depth
        self._batches: Iterator[B] | None = None
        self._device = device
        self._ready: deque[tuple[B, torch.cuda.Event | None]] = deque()
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waited_s = 0.0

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        self.fetch(self.depth - len(self._ready))
        if not self._ready:
            raise StopIteration
        batch, copied = self._ready.popleft()
        if copied is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # Made on the side stream: without this its memory could be handed out while we still read it.
            _map_tensors(lambda tensor: _record(tensor, stream), batch)
        return batch

    @property
    def has_begun(self) -> bool:
        return self._batches is not None

    def begin(self, batches: Iterator[B]) -> None:
        """Read from this iterator over the source instead of making one when the first batch is wanted."""
        self._batches = batches

    def fetch(self, num: int) -> None:
        """Load up to `num` further batches and start copying them."""
        if self._batches is None:
            self._batches = iter(self.source)
        for _ in range(num):
            start = time.perf_counter()
            found = list(itertools.islice(self._batches, 1))
            self.waited_s += time.perf_counter() - start
            if not found:
                return
            self._ready.append(self._send(found[0]))

    def _send(self, batch: B) -> tuple[B, torch.cuda.Event | None]:
        if self._side is None:
            return _map_tensors(lambda tensor: tensor.to(self._device), batch), None
        with torch.cuda.stream(self._side):
            sent = _map_tensors(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True), batch)
            copied = torch.cuda.Event()
            copied.record(self._side)
        return sent, copied


def prefetch(batches: Iterable[B], device: torch.device | str, *, depth: int = 2) -> Prefetcher[B]:
    """Return the same batches in the same order on `device`; on CUDA up to `depth` are copied ahead.

    A batch is a tensor, or dicts, lists, tuples, named tuples and dataclasses of them, nested in any way; everything
    else in it stays as it is.
    """
    device = torch.device(device)
    return Prefetcher(batches, device, depth if device.type == "cuda" else 1)


def _map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    """Return the nest with `function` applied to its tensors; containers are copied and keep their types."""
    if isinstance(nest, (Tensor, PackedSequence)):
        return function(nest)
    if isinstance(nest, MutableMapping):
        mapped = copy.copy(nest)
        for key, value in nest.items():
            mapped[key] = _map_tensors(function, value)
        return mapped
    if isinstance(nest, (list, tuple)):
        items = [_map_tensors(function, item) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        made = copy.copy(nest)
        for field in dataclasses.fields(nest):
            # Not setattr, which a frozen dataclass refuses.
            object.__setattr__(made, field.name, _map_tensors(function, getattr(nest, field.name)))
        return made
    return nest


def _record(held: Tensor | PackedSequence, stream: torch.cuda.Stream) -> Tensor | PackedSequence:
    for tensor in [held] if isinstance(held, Tensor) else held:
        if tensor is not None and tensor.is_cuda:  # the batch sizes of a PackedSequence stay on the CPU
            tensor.record_stream(stream)
    return held


def send_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to the device without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
