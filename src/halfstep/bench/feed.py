"""The user's own data as a run reads them: the run's loader and prefetcher, and the time waited for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import torch

from halfstep.bench.runner import Batch
from halfstep.data.loader import Loader
from halfstep.data.prefetch import prefetch
from halfstep.data.read_ahead import BATCHES_A_THREAD


class Feed:
    """So many whole batches on the device, epoch after epoch; an epoch's odd last one runs otherwise: left out."""

    def __init__(self, loader: Loader, batch_size: int, steps: int, device: torch.device) -> None:
        self._loader, self._batch_size, self._steps = loader, batch_size, steps
        self._num_useless = 0
        self._prefetched = prefetch(self._batches(), device)

    def __iter__(self) -> Iterator[Batch]:
        return self._prefetched

    @property
    def waited_s(self) -> float:
        """Host time blocked in fetching so far."""
        return self._prefetched.waited_s

    def use_up(self) -> None:
        """Before the next batch, throw away what was read ahead while steps were slow: a long run lives on no stock.

        Batches the prefetcher has on the device already are still to come.
        """
        self._num_useless = BATCHES_A_THREAD * max(1, self._loader.num_workers)

    def _batches(self) -> Iterator[Batch]:
        try:
            whole = self._whole_batches()
            for _ in range(self._steps):
                for _ in range(self._num_useless):
                    next(whole)
                self._num_useless = 0
                yield next(whole)
        finally:
            self._loader.close()

    def _whole_batches(self) -> Iterator[Batch]:
        for epoch in count():
            for batch in self._loader.epoch(epoch):
                if len(batch["index"]) == self._batch_size:
                    yield batch
