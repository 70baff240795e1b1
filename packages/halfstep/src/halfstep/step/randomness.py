"""Seeds, generator states and deterministic algorithms: what makes a run repeatable."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from halfstep.errors import format_count


def seed_everything(seed: int) -> None:
    """Seed the global generators, which initialisation and dropout draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def read_generators() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {**read_cpu_generators(), "cuda": cuda}


def read_cpu_generators() -> dict[str, Any]:
    """Return the states of the global generators that data draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }


def restore_generators(states: Mapping[str, Any]) -> list[str]:
    """Restore the generators; return a note for each that cannot be restored."""
    random.setstate(states["python"])
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    num_here, num_then = torch.cuda.device_count(), len(states["cuda"])
    for device, state in zip(range(num_here), states["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
    if num_here >= num_then:
        return []
    return [
        f"the run had {format_count(num_then, 'GPU')}, but this machine has {num_here}: "
        "the random generators of the other devices start over"
    ]


@contextmanager
def choose_algorithms(*, deterministic: bool) -> Iterator[None]:
    """Let torch use deterministic kernels only, or any; restore its settings on exit."""
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_before = torch.backends.cudnn.deterministic
    if deterministic:
        # cuBLAS reads it when its handle is made; without it torch refuses deterministic matmuls.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.deterministic = cudnn_before
