"""Decoded samples kept in RAM, shared by all loader workers."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_train.data.files import Array

CACHE_BYTES = 2 << 30


class SampleCache:
    """Fixed-size samples in one anonymous shared mapping, which forked workers fill for each other.

    Not in /dev/shm: containers often allow 64 MB there and kill processes that write more. The mapping takes real
    memory only where it was written. A sample is read again an epoch after it was written, with the loader's queues in
    between, so no lock is needed. If all samples exceed the limit, nothing is cached rather than a random subset.
    """

    def __init__(
        self, num_samples: int, *, fields: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], limit_bytes: int
    ) -> None:
        self._num_samples, self._fields, self._limit_bytes = num_samples, dict(fields), limit_bytes
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in self._fields.items()}
        self.is_enabled = 0 < num_samples * sum(sizes.values()) <= limit_bytes
        self._arrays: dict[str, Array] = {}
        if self.is_enabled:
            for name, (shape, dtype) in self._fields.items():
                memory = mmap.mmap(-1, num_samples * sizes[name])
                self._arrays[name] = np.frombuffer(memory, dtype=dtype).reshape(num_samples, *shape)
            self._is_filled = np.frombuffer(mmap.mmap(-1, num_samples), dtype=np.bool_)

    def get_or_read(self, index: int, read: Callable[[], Mapping[str, Array]]) -> dict[str, Tensor]:
        """Return sample `index` as tensors, copied from the cache; otherwise read it, and store it if all samples
        fit."""
        if self.is_enabled and self._is_filled[index]:
            return {name: torch.from_numpy(array[index].copy()) for name, array in self._arrays.items()}
        found = read()
        for name, array in self._arrays.items():  # none if the cache is off
            array[index] = found[name]
        if self.is_enabled:
            self._is_filled[index] = True
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker cannot inherit the mapping: it gets a new, empty one.
        create = functools.partial(SampleCache, fields=self._fields, limit_bytes=self._limit_bytes)
        return create, (self._num_samples,)
