"""Random numbers as pure functions of a key, so that order, workers and resume cannot change them."""

from __future__ import annotations

import numpy as np
import torch


def generator_for(*key: int) -> torch.Generator:
    """A CPU generator whose stream depends on the whole key, such as (seed, epoch, index)."""
    mixed = int(np.random.SeedSequence((len(key), *key)).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(mixed >> 1)


class Key(tuple[int, ...]):
    """Which samples a batch holds, for whoever draws random numbers for them.

    As a tuple it names a whole batch: what `generator_for(*key)` draws depends on how samples fell into batches.
    `noise` draws by `root` and place, so that a sample gets the same numbers in a batch of any size.
    """

    root: tuple[int, ...]
    """What all samples of the step, or of the validation set, have in common."""
    place: int
    """Of the batch's first sample, in the global batch or in the validation set; the others follow it."""

    @classmethod
    def of_training(cls, seed: int, attempted: int, micro_batch: int = 0, place: int = 0) -> Key:
        """Of the micro-batch that begins with this place in its window."""
        return cls._made((seed, attempted, micro_batch), (0, seed, attempted), place)

    @classmethod
    def of_validation(cls, seed: int, index: int = 0) -> Key:
        """Of samples that are evaluated or predicted, from this index on; it has nothing to augment by."""
        return cls._made((), (1, seed), index)

    @classmethod
    def of_sampling(cls, seed: int, place: int = 0) -> Key:
        """Of what a model makes by itself, from this one on; the same each time."""
        return cls._made((), (2, seed), place)

    @classmethod
    def _made(cls, batch: tuple[int, ...], root: tuple[int, ...], place: int) -> Key:
        key = cls(batch)
        key.root, key.place = root, place
        return key
