"""Random numbers as pure functions of a key, so that order, workers and resume cannot change them."""

from __future__ import annotations

import numpy as np
import torch


def make_generator(*key: int) -> torch.Generator:
    """Return a CPU generator whose stream depends on the whole key, such as (seed, epoch, index)."""
    mixed = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed >> 1)


class Key(tuple[int, ...]):
    """Identifies the samples of a batch, to draw random numbers for them.

    As a tuple it identifies the whole batch: what `make_generator(*key)` draws depends on how samples fell into
    batches. `noise` draws by `root` and `place` instead, so a sample gets the same numbers in a batch of any size.
    """

    root: tuple[int, ...]
    """What all samples of the step, or of the validation set, have in common."""
    place: int
    """Position of the batch's first sample in the global batch or in the validation set; the others follow it."""

    batch: tuple[int, ...]
    """Key of the whole micro-batch: the same for every rank that has a part of it."""
    row: int = 0
    """Row of the first sample in that micro-batch; not 0 for a rank that has a later part of it."""
    whole: int | None = None
    """Number of samples of that micro-batch; None: this batch is all of it."""

    @classmethod
    def for_training(
        cls, seed: int, attempted: int, micro_batch: int = 0, place: int = 0, row: int = 0, whole: int | None = None
    ) -> Key:
        """Return the key of a micro-batch that begins at `place` in its window, or of its part from `row` on."""
        batch = (seed, attempted, micro_batch)
        # Code that draws by the tuple and ignores parts must not draw the same numbers for each part.
        key = cls._make((*batch, row) if row else batch, (0, seed, attempted), place)
        key.batch, key.row, key.whole = batch, row, whole
        return key

    @classmethod
    def for_validation(cls, index: int = 0) -> Key:
        """Return the key of samples that are evaluated or predicted, from this index on; it has nothing to augment by.

        It is independent of the run's seed: runs of different seeds are judged with the same noise.
        """
        return cls._make((), (1,), index)

    @classmethod
    def for_sampling(cls, seed: int, place: int = 0) -> Key:
        """Return the key of samples that a model generates, from `place` on; the same each time."""
        return cls._make((), (2, seed), place)

    @classmethod
    def _make(cls, batch: tuple[int, ...], root: tuple[int, ...], place: int) -> Key:
        key = cls(batch)
        key.root, key.place, key.batch = root, place, batch
        return key


class BatchDraws:
    """Random numbers for a whole micro-batch, of which each rank keeps its rows: the same for any number of ranks."""

    def __init__(self, key: tuple[int, ...], num: int, *stream: int) -> None:
        batch, row, whole = (key.batch, key.row, key.whole) if isinstance(key, Key) else (key, 0, None)
        self.generator = make_generator(*batch, *stream)
        self.whole, self.rows = whole or num, slice(row, row + num)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Draw numbers (num, *shape) in 0 <= x < 1."""
        return torch.rand(self.whole, *shape, generator=self.generator)[self.rows]

    def integers(self, high: int) -> torch.Tensor:
        """Draw numbers (num) in 0 <= x < high."""
        return torch.randint(high, (self.whole,), generator=self.generator)[self.rows]
