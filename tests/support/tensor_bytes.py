"""The live bytes of all tensors of a process, whichever thread frees them and however FSDP2 resizes their storages.

torch's profiler does not see what gloo's threads free, and LiveBytes counts a storage as large as it was when made.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Sum up the storages that operations inside have read or made, after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                own = value._local_tensor if isinstance(value, DTensor) else value
                self._alive[own.untyped_storage()._cdata] = weakref.ref(own.untyped_storage())
        found = {key: storage.nbytes() for key, kept in self._alive.items() if (storage := kept()) is not None}
        self._alive = {key: self._alive[key] for key in found}
        self.peak = max(self.peak, sum(found.values()))
        return result
