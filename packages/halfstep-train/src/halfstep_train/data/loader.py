"""Keys of random numbers, and batches in an order that is a pure function of (seed, epoch).

A sample is a pure function of (seed, epoch, index), so to resume in the middle of an epoch is to start at a later
batch. Torch's DataLoader moves the work into processes; errors come back as values, because torch would wrap them in
a traceback of the worker.

Two kinds of data sets make whole batches. `WorkerBatches` fill memory that a worker shares with the main process, which
saves a copy of every image. `WholeBatches` gather them from an array: that runs without the interpreter's lock, so
threads read ahead, and nothing is sent between processes.
"""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info

from halfstep.disk import is_alive
from halfstep.errors import DataError, HalfstepError, format_count, summarise_error

# --- keys: random numbers as pure functions ---


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


Asked = TypeVar("Asked")
Made = TypeVar("Made")
Offered = TypeVar("Offered")

BATCHES_PER_THREAD = 2


class WholeBatches(Protocol):
    """A data set that makes many samples at once, each equal to its `sample`."""

    def make_batch(self, indices: Tensor, *, seed: int, epoch: int) -> dict[str, Tensor]: ...


def read_ahead(make: Callable[[Asked], Made], keys: Iterable[Asked], *, num_threads: int) -> Iterator[Made]:
    """Yield `make` of every key, in order, computing a few ahead in threads."""
    waiting = iter(keys)
    with ThreadPoolExecutor(num_threads) as threads:
        begun: deque[Future[Made]] = deque()
        try:
            for key in waiting:
                begun.append(threads.submit(make, key))
                if len(begun) > BATCHES_PER_THREAD * num_threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            threads.shutdown(cancel_futures=True)


class WorkerBatches(Protocol):
    """A data set that makes many samples at once in a worker, each equal to its `sample`."""

    def fill_batch(self, indices: Sequence[int], *, seed: int, epoch: int) -> dict[str, Tensor]: ...


def make_shared_bytes(*shape: int) -> Tensor:
    """Return zero bytes; in a worker they are in shared memory, otherwise the loader would copy them."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    # What torch's own collate does in a worker. New shared memory is zero, and costs only where it is written.
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


Batch: TypeAlias = dict[str, Tensor]

LOOK_S = 2.0
"""Interval at which a worker checks that its run still exists, in seconds."""


class Samples(Protocol):
    """A data set: samples by index, each a pure function of its key (seed, epoch, index)."""

    def __len__(self) -> int: ...

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        """Return one sample as tensors; all samples have the same shapes."""
        ...


class TensorSamples:
    """Data that fit into memory: sample i is row i of each tensor."""

    def __init__(self, **rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return min(map(len, self.rows.values()))

    def sample(self, index: int, *, key: tuple[int, int, int]) -> dict[str, Tensor]:
        return {name: tensor[index] for name, tensor in self.rows.items()}


class NamedSamples(Protocol):
    """Samples that can name their files; optional."""

    def name_of(self, index: int) -> str:
        """Return the file's name, short enough for a message; empty if there is none."""
        ...


def name_sample(samples: object, index: int) -> str:
    """Return the name of a sample for messages and pictures."""
    return (implements(samples, NamedSamples) and samples.name_of(index)) or f"sample {index}"


class FileSamples(Protocol):
    """Samples that are read from files."""

    def files(self) -> Iterable[Path]:
        """Return every file that is read, in the order of the samples."""
        ...


def implements(samples: object, protocol: Callable[..., Offered]) -> TypeGuard[Offered]:
    """True if samples have all methods of a protocol; an attribute such as a list called `files` does not count."""
    return all(callable(getattr(samples, name, None)) for name in vars(protocol) if not name.startswith("_"))


class Loader:
    """Batches of a data set; each batch holds its sample ids as `index`."""

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        seed: int = 0,
        num_workers: int = 0,
        shuffle: bool = True,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Load batches of samples. `part` is (rank, number of ranks): each rank gets its rows of every batch."""
        if shuffle and batch_size > len(samples):
            raise DataError(
                f"batch size {batch_size} is larger than the training set of {format_count(len(samples), 'sample')}",
                fix=f"train.batch_size={max(1, len(samples))} or less; train.accumulate enlarges the effective batch",
            )
        self._order = _SampleOrder(len(samples), batch_size, seed, shuffle=shuffle, part=part)
        self._fetch = _Fetch(samples, seed)
        self.num_workers, self.seed = num_workers, seed
        self._workers: DataLoader[Batch | HalfstepError] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self._order)

    def list_sizes(self, first: int, num: int) -> list[int]:
        """Return the sizes of `num` batches from `first` on, over all ranks."""
        # Only the last batch of an epoch can be smaller.
        starts = (batch * self._order.batch_size for batch in range(first, first + num))
        return [min(self._order.batch_size, self._order.num_samples - start) for start in starts]

    def iterate_epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_batch` on. Use one iterator at a time: workers are reused."""
        self._order.epoch, self._order.start_batch = epoch, start_batch
        if implements(self._fetch.samples, WholeBatches):
            return self._check(read_ahead(self._fetch.__getitems__, self._order, num_threads=max(1, self.num_workers)))
        with warnings.catch_warnings():
            # Workers are forked before they start threads and touch none of our locks; Python 3.12 warns anyway.
            warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
            # Torch warns of more workers than cores; how many pay is the user's to try.
            warnings.filterwarnings("ignore", message=".*worker processes.*", category=UserWarning)
            self._workers = self._workers or self._start()
            batches = iter(self._workers)
        return self._check(batches)

    def close(self) -> None:
        """End the workers now, even if a traceback still holds their batches. Left to the garbage collector, torch
        takes five seconds for each worker."""
        workers, self._workers = self._workers, None
        running = workers._iterator if workers is not None else None
        if running is not None:  # None if no worker was started
            running._shutdown_workers()  # type: ignore[attr-defined]  # torch has no other way to ask for it

    def _start(self) -> DataLoader[Batch | HalfstepError]:
        return DataLoader(
            self._fetch,
            batch_sampler=self._order,
            num_workers=self.num_workers,
            collate_fn=_return_unchanged,
            worker_init_fn=functools.partial(_leave_signals_to_the_run, os.getpid()),
            persistent_workers=self.num_workers > 0,
            generator=torch.Generator(),  # else torch draws from the global one
        )

    def _check(self, batches: Iterator[Batch | HalfstepError]) -> Iterator[Batch]:
        while True:
            try:
                batch = next(batches, None)
            except RuntimeError as error:
                if self.num_workers == 0:
                    raise
                self.close()
                raise DataError(
                    f"a loader worker failed: {summarise_error(error)}",
                    why="a worker that dies silently has usually run out of memory, or of shared memory in a container",
                    fix="data.num_workers=0 shows the cause; docker needs --shm-size or --ipc=host",
                ) from error.with_traceback(None)
            if batch is None:
                return
            if isinstance(batch, HalfstepError):
                del batches  # the traceback keeps this frame, and with it the workers, alive
                self.close()
                raise batch
            yield batch


class _SampleOrder(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index)."""

    def __init__(
        self, num_samples: int, batch_size: int, seed: int, *, shuffle: bool, part: tuple[int, int] = (0, 1)
    ) -> None:
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.shuffle, self.part = shuffle, part
        self.epoch, self.start_batch = 0, 0

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first = self.epoch, self.start_batch
        order = torch.arange(self.num_samples)
        if self.shuffle:
            order = torch.randperm(self.num_samples, generator=make_generator(self.seed, epoch))
        for batch in range(first, len(self)):
            indices = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield [(epoch, index) for index in take_own_rows(indices.tolist(), *self.part)]


def take_own_rows(batch: list[int], rank: int, size: int) -> list[int]:
    """Return the rows of one rank, in order. A rank without rows gets the first one: it must still take part in the
    step, with a weight of 0."""
    # The first `more` ranks take one row more than the others.
    each, more = divmod(len(batch), size)
    start = rank * each + min(rank, more)
    return batch[start : start + each + (rank < more)] or batch[:1]


class _Fetch(Dataset[Batch | HalfstepError]):
    def __init__(self, samples: Samples, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __getitems__(self, keys: list[tuple[int, int]]) -> Batch | HalfstepError:
        indices, epoch = torch.tensor([index for _, index in keys]), keys[0][0]
        try:
            if implements(self.samples, WholeBatches):
                batch = self.samples.make_batch(indices, seed=self.seed, epoch=epoch) | {"index": indices}
                # Pinned, so that the copy to the device does not have to copy to pinned memory first.
                is_cuda = torch.cuda.is_initialized()
                return {name: tensor.pin_memory() for name, tensor in batch.items()} if is_cuda else batch
            if implements(self.samples, WorkerBatches):
                batch = self.samples.fill_batch(indices.tolist(), seed=self.seed, epoch=epoch)
            else:
                rows = [self.samples.sample(index, key=(self.seed, epoch, index)) for _, index in keys]
                batch = default_collate(rows)  # in a worker, straight into shared memory
        except HalfstepError as error:
            return error
        return batch | {"index": indices}


def _return_unchanged(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_run(run: int, worker: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach every process of a job. The run finishes its step and saves, for which it
    # still needs batches: a worker ends when the run signals it, or when the run is gone. Its parent need not be the
    # run: Python 3.14 forks workers from a server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal: the run saves then, too
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_run, args=(run,), daemon=True).start()


def _exit_with_run(run: int) -> None:
    while is_alive(run):
        word = signal.sigtimedwait({signal.SIGTERM}, LOOK_S)
        if word is not None and word.si_pid == run:
            break
    os._exit(0)
