"""`hs.seeded`: make each sample of a data set a function of (seed, epoch, index).

A worker of a DataLoader draws from generators that depend on which samples it loaded before. To load one sample again,
a resumed loop would have to load all of those, too. Seeding the generators for each sample removes that dependence, and
with it any influence of the number of workers and of the order. It costs about 0.05 ms per sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from halfstep.errors import DataError


class SeededDataset(Dataset[Any]):
    """A map-style data set whose samples draw from generators seeded by (seed, epoch, index)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        # In shared memory, because persistent workers keep the copy of the data set that they started with.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the samples that are loaded from now on; `step.windows` calls it."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return [self._load(index, int(self._epoch)) for index in indices]
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_rng_state(states[2])

    def _load(self, index: Any, epoch: int) -> Any:
        if not isinstance(index, Integral):
            raise DataError(
                f"hs.seeded was given the index {index!r}",
                why="it seeds each sample by (seed, epoch, index), so an index must be an integer",
                fix="use a sampler that yields integers",
            )
        number = int(index) if int(index) >= 0 else int(index) + len(self)
        mixed = np.random.SeedSequence((3, self.seed, epoch, number)).generate_state(4, np.uint32).tolist()
        random.seed(mixed[0] << 32 | mixed[1])
        np.random.seed(mixed[2])
        # Not torch.manual_seed: with workers=0 that would also reseed the GPUs, from which dropout draws.
        torch.default_generator.manual_seed(mixed[3] << 31 | mixed[0] >> 1)
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


def seeded(dataset: Dataset[Any], seed: int = 0) -> SeededDataset:
    """Return the data set with samples that are functions of (seed, epoch, index), whatever they draw.

    Python's, NumPy's and torch's global CPU generators are seeded for each sample and restored afterwards. A generator
    that the data set created itself is not seeded. `step.windows` sets the epoch; in any other loop call
    `dataset.set_epoch(epoch)`. ::

        loader = DataLoader(hs.seeded(dataset), batch_size=64, shuffle=True, num_workers=4)
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"hs.seeded takes a data set with __getitem__ and integer indices, not a {type(dataset).__name__}",
            why="samples of an iterable data set have no index to seed them by",
            fix="seed inside its __iter__, by the number of the sample",
        )
    if isinstance(seed, bool) or not isinstance(seed, Integral) or int(seed) < 0:
        raise DataError(f"hs.seeded was given seed={seed!r}", fix="give an integer of at least 0")
    return SeededDataset(dataset, int(seed))
