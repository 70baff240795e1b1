"""Random numbers as pure functions of a key, so that order, workers and resume cannot change them."""

from __future__ import annotations

import numpy as np
import torch


def generator_for(*key: int) -> torch.Generator:
    """A CPU generator whose stream depends on the whole key, such as (seed, epoch, index)."""
    mixed = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed >> 1)
