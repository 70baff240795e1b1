"""The position of a custom loop in its data: a resumed loop continues with the very next batch.

The state has the generators (Python's, NumPy's, torch's, CUDA's, and those of loader, samplers and data set) as they
are now and as they were before the pass began, and the number of batches yielded since. To resume, the pass begins
again with the generators of that time, so torch draws the same seed of the workers and the same order again. The
index sampler, for which `_Order` stands in, drops the batches of indices that were yielded, without loading a sample.
Last, the generators are set to how they were when the state was stored.

Samples need to be loaded again only where indices are not enough:
- workers drew random numbers (`_WorkerWatch` compares their generators), so a sample depends on those before it;
- the sampler draws from the global generators in the middle of a pass, between the draws of the data set;
- the data come from an iterable data set, or from anything that is not a DataLoader.

Rejected: storing the order, which is as long as the data set, and seeding workers for each batch, which would make
hs.Step train on other samples than the same loop without it.
"""

from __future__ import annotations

import random
import weakref
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from halfstep.errors import CheckpointError, ConfigError, format_count
from halfstep.own_loop.arguments import iterate_loader
from halfstep.own_loop.seeded import SeededDataset
from halfstep.prefetching import Prefetcher
from halfstep.step.batches import Batch
from halfstep.step.randomness import read_cpu_generators, read_generators, restore_generators
from halfstep.step.user_warnings import warn_user
from halfstep.tensor_files import view_bytes

DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""torch's samplers: they draw from the global generators before their first index only."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
INEXACT = "training continues, but may not be bit-exact"


@runtime_checkable
class Stateful(Protocol):
    """A loader that stores its own position, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class _PassState:
    """What is stored of one pass over the data."""

    num_batches: int | None
    num_workers: int
    is_persistent: bool
    num_yielded: int = 0
    is_over: bool = False
    is_left: bool = False
    is_reused: bool = False
    """True if it uses the persistent workers of an earlier pass, so that torch draws no seed for them."""
    has_draws: bool = False
    """True if samples draw random numbers in workers."""
    late_draws: list[str] = field(default_factory=list)
    """The global generators that the sampler draws from after its first item."""
    before: dict[str, Any] = field(default_factory=dict)
    """All generators before the pass began."""
    now: dict[str, Any] = field(default_factory=dict)
    """The generators and epochs of loader, samplers and data set."""
    ahead: list[dict[str, Any]] = field(default_factory=list)
    """The generators before each batch was loaded that hs.prefetch holds and the loop has not seen."""
    seen: int | str | None = None
    """A checksum of the yielded batches: a resumed loop has to skip the same ones."""
    data: dict[str, str] = field(default_factory=dict)
    """What `_describe_data` says of attributes that training has not changed."""
    loader: Any = None
    """The state of a loader that stores its own position."""


class DataPosition:
    """How many passes over the data have ended, and the position in the current one."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.epoch = 0
        self.ranks = [rank, num_ranks]
        self._pass: _Pass | None = None
        self._state: _PassState | None = None
        """Of the present pass; of a loaded one until a pass begins, while `_pass` is None."""
        self._generators: Mapping[str, Any] = {}
        """As they were loaded."""
        self._has_overlap = False
        self._fingerprint: tuple[Callable[[], Any], dict[str, str]] = lambda: None, {}
        """The data set, and what `_describe_data` returned when this process first read it."""

    @property
    def num_yielded(self) -> int:
        """Return how many batches of the present pass the loop was given; after loading, of the stored one."""
        return 0 if self._state is None or self._state.is_over else self._state.num_yielded

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a pass; after `load_state_dict`, those that the stored pass has not yielded yet."""
        stored = self._state if self._pass is None else None
        if self._pass is not None:
            self._has_overlap |= not self._pass.state.is_over and not self._pass.state.is_left
            self.end_pass()
        current = _Pass(batches)
        if self._fingerprint[0]() is not current.data or current.data is None:
            self._fingerprint = _refer_weakly(current.data), _describe_data(current.batches)
        current.fingerprint = self._fingerprint[1]
        loaded = current.follow(self.epoch, stored, self._generators)
        current.prefetcher = None  # it holds the loader
        self._pass, self._state = current, current.state
        try:
            for batch in loaded:
                current.count(batch)
                yield batch
                if current.is_replaced:
                    raise ConfigError(
                        "a state was loaded while step.windows was running",
                        why="the loaded state has its own position in the data, which is not that of this pass",
                        fix="leave the loop after loading, and call step.windows again: it continues there. To go on "
                        'with this pass instead, load step.state_dict() without its "position"',
                    )
        except GeneratorExit:
            current.state.is_left = True
            raise
        if self._pass is current:
            self.end_pass()

    def warn_if_unread(self) -> None:
        """Warn of a batch that does not come from `step.windows` although a pass was loaded that goes on there."""
        if self._pass is None and self._state is not None and not self._state.is_over:
            warn_user(f"this batch does not come from step.windows, where the loaded state continues: {INEXACT}")
            self._state = None

    def end_pass(self) -> None:
        """Count the present pass as ended, also one that was left by `break` or is still to be continued."""
        if self._state is not None and not self._state.is_over:
            self._state.is_over = True
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        if self._has_overlap:
            warn_user("several passes of step.windows overlap: only the newest is stored, so resuming is not exact")
        if self._pass is not None:
            self._pass.update_state()
        state = None if self._state is None else vars(self._state)
        return _make_plain({"epoch": self.epoch, "ranks": self.ranks, "generators": read_generators(), "pass": state})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generators now, and the position when the next pass begins."""
        state = _make_plain(state)
        self._generators = state["generators"]
        if list(state["ranks"]) != self.ranks:
            rank, num_ranks = self.ranks
            warn_user(
                f"this is rank {rank} of {num_ranks}, and the state is from rank {state['ranks'][0]} of "
                f"{state['ranks'][1]}: its generators are not used, {INEXACT}. Each rank has to load its own file"
            )
            self._generators = read_generators()
        for note in restore_generators(self._generators):
            warn_user(f"{note}; {INEXACT}")
        if self._pass is not None:
            self._pass.is_replaced = True
        self.epoch, self._pass, self._has_overlap = int(state["epoch"]), None, False
        self._state = None if state["pass"] is None else _PassState(**state["pass"])


class _Pass:
    """One pass over the data."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.prefetcher = batches if isinstance(batches, Prefetcher) and not batches.has_begun else None
        batches = batches if self.prefetcher is None else self.prefetcher.source
        self._get_batches = _refer_weakly(batches)
        num_workers = 0 if self.loader is None else self.loader.num_workers
        is_persistent = num_workers > 0 and self.loader is not None and self.loader.persistent_workers
        self.state = _PassState(_count_batches(batches), num_workers, is_persistent)
        # Generators of the data set are copied into workers, so they count like a worker's global ones.
        self.state.has_draws = num_workers > 0 and any(
            name.startswith("loader.dataset") and _find_generators(owner) for name, owner in self.owners.items()
        )
        self.is_iterable = self.loader is None or isinstance(self.loader.dataset, IterableDataset)
        self.is_opaque = self.loader is None and not isinstance(batches, (Sequence, Stateful))
        """True for a generator or a wrapper, whose batches can only be skipped by loading them again."""
        self.is_replaced = False
        """True once another position was loaded: this pass is not the loop's any more."""
        self.fingerprint: dict[str, str] = {}
        self._differences: list[str] = []
        """Why a resumed pass may differ from the stored one."""
        self._order: _Order | None = None
        self._watch: _WorkerWatch | None = None

    @property
    def batches(self) -> Any:
        return self._get_batches()

    @property
    def loader(self) -> DataLoader[Any] | None:
        return self.batches if isinstance(self.batches, DataLoader) else None

    @property
    def data(self) -> Any:
        """The data set, or the list of batches."""
        return self.batches if self.loader is None else self.loader.dataset

    @property
    def owners(self) -> dict[str, Any]:
        """What may hold generators or an epoch, by name."""
        return dict(_walk("loader", self.batches))

    def count(self, batch: Batch) -> None:
        """Count a batch that the loop is given."""
        self.state.num_yielded += 1
        if self.is_opaque:
            self.state.seen = _summarise(batch)
        if self.state.ahead:
            self.state.ahead.pop(0)

    # --- storing ---

    def update_state(self) -> None:
        """Read what changes while the pass runs."""
        now = _describe_data(self.batches)
        self.state.data = {name: value for name, value in self.fingerprint.items() if now.get(name) == value}
        self.state.now = self._read_own()
        self.state.has_draws |= self._watch is not None and self._watch.has_draws
        if self._order is not None:
            self.state.late_draws = sorted({*self.state.late_draws, *self._order.late_draws})
        self._note_order()
        if isinstance(self.batches, Stateful) and not self.state.is_over:
            self.state.loader = self.batches.state_dict()

    def _note_order(self) -> None:
        """Note the yielded batches' indices; not those of torch's samplers, which keep no state from pass to pass."""
        if self._order is not None and self._order.is_watched and not self.is_iterable and self.state.num_yielded:
            self.state.seen = self._order.checksums[self.state.num_yielded - 1]

    def _read(self) -> dict[str, Any]:
        return {"global": read_cpu_generators(), "own": self._read_own()}

    def _restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `_read` returned, in the middle of a pass."""
        restore_generators({**states["global"], "cuda": ()})
        self._write_own(states["own"], is_inside=True)

    def _read_own(self) -> dict[str, Any]:
        """Return the states of the generators that loader, samplers and data set hold, and their epochs."""
        generators = {
            f"{name}.{attribute}": _read_state(generator)
            for name, owner in self.owners.items()
            for attribute, generator in _find_generators(owner).items()
        }
        held = ((name, getattr(owner, "__dict__", {}).get("epoch")) for name, owner in self.owners.items())
        epochs = {name: epoch for name, epoch in held if isinstance(epoch, int)}
        return {"generators": generators, "epochs": epochs}

    def _write_own(self, states: Mapping[str, Any], *, is_inside: bool) -> None:
        """Restore what `_read_own` returned; `is_inside`: in the middle of a pass."""
        for name, owner in self.owners.items():
            for attribute, generator in _find_generators(owner).items():
                if (state := states["generators"].get(f"{name}.{attribute}")) is not None:
                    _write_state(generator, state)
            # The loop itself calls set_epoch before each pass; only a pass that goes on has to keep its epoch.
            if name in states["epochs"] and (is_inside or not hasattr(owner, "set_epoch")):
                owner.epoch = states["epochs"][name]

    # --- beginning and continuing ---

    def follow(self, epoch: int, found: _PassState | None, generators: Mapping[str, Any]) -> Iterator[Batch]:
        """Return the batches of the pass, or those that are left of the stored one."""
        for owner in self.owners.values():
            if isinstance(owner, SeededDataset):
                owner.set_epoch(epoch)
        if found is not None and not found.is_over:
            batches = self._continue(found, generators)
        else:
            if found is not None:
                self._write_own(found.now, is_inside=False)
            self.state.before = self._read()
            self.state.is_reused = (
                self._has_workers() if found is None else found.is_persistent and self.state.is_persistent
            )
            if found is not None and self.state.is_reused and (found.has_draws or self.is_iterable):
                self._note_worker_generators()
            batches = self._prefetch(self._iterate())
        if self._differences:
            warn_user(f"{INEXACT}: {'; '.join(self._differences)}")
        return batches

    def _continue(self, found: _PassState, generators: Mapping[str, Any]) -> Iterator[Batch]:
        """Begin the stored pass again and skip what it has yielded."""
        num = found.num_yielded
        skipped = format_count(num, "batch", "batches")
        if found.num_batches != self.state.num_batches:
            raise CheckpointError(
                f"the state is in the middle of a pass over {found.num_batches or 'an unknown number of'} batches, "
                f"but this loader has {self.state.num_batches or 'an unknown number'}",
                why=f"the {skipped} to skip would be different ones",
                fix="resume with the same data and batch size, or call step.end_pass() first to begin a new pass",
            )
        for name, then in found.data.items():
            if (now := self.fingerprint.get(name, then)) != then:
                self._note_difference(f"the data differs: {name} was {then} and is {now}")
                break
        if found.is_left:
            warn_user(
                f"the stored pass was left by `break` after {skipped} and continues from there; to begin a new one "
                "instead, call step.end_pass() before you save"
            )
        self.state.num_yielded, self.state.before = num, found.before
        self.state.is_reused, self.state.late_draws = found.is_reused, found.late_draws
        self.state.has_draws |= found.has_draws
        self._restore(found.before)
        if found.loader is not None and isinstance(self.batches, Stateful):
            self.batches.load_state_dict(found.loader)
            batches = self._iterate()
            if self.state.num_workers:
                self._note_worker_generators()
        else:
            batches = self._skip(found, generators)
        batches = self._prefetch(batches)
        if found.ahead and self.prefetcher is not None:
            self._restore(found.ahead[0])
            self.prefetcher.fetch(len(found.ahead))
            self._note_shared_generators(found.ahead[0]["global"], generators)
        restore_generators(generators)
        self._write_own(found.now, is_inside=True)
        return batches

    def _prefetch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self.prefetcher is None:
            return batches
        self.prefetcher.begin(self._note_generators(batches) if self.prefetcher.depth > 1 else batches)
        return iter(self.prefetcher)

    def _note_generators(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        state = self._read()
        for batch in batches:
            self.state.ahead.append(state)
            yield batch
            state = self._read()

    def _note_difference(self, what: str) -> None:
        order = "torch.randperm(num, generator=torch.Generator().manual_seed(epoch))"
        self._differences.append(f"{what} (draw an order from the epoch: {order}; step.end_pass() begins a new pass)")

    def _note_worker_generators(self) -> None:
        self._differences.append(
            "the generators of workers that were started before the pass cannot be restored, so samples that draw "
            "random numbers differ (hs.seeded(dataset) or persistent_workers=False makes them exact)"
        )

    def _note_shared_generators(self, before: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        """Note generators that the data drew from since `before` and that were elsewhere when the state was stored."""
        if _find_draws(before) & _find_draws(then):
            self._differences.append(
                "the data draw from a global generator that the model or the loop draws from, too, so the batches that "
                "follow may differ (give the data their own generator, or use hs.seeded(dataset))"
            )

    def _why_loaded(self, found: _PassState) -> str:
        """Return why the skipped batches have to be loaded again; empty if their indices are enough."""
        if self.loader is None:
            return f"a {type(self.batches).__name__} has no sampler (pass the DataLoader itself to step.windows)"
        if not getattr(self.loader, "in_order", True):
            self._differences.append("in_order=False lets the workers decide the order of batches")
        depends_on_workers = self.is_iterable or self.state.num_workers > 0 and self.state.has_draws
        has_same_workers = self.state.num_workers == found.num_workers
        if depends_on_workers and not has_same_workers:
            self._differences.append(
                f"there are {self.state.num_workers} loader workers, and the state was saved with {found.num_workers}, "
                "which changes iterable data sets and samples that draw random numbers (hs.seeded(dataset) avoids it)"
            )
        elif depends_on_workers and self.state.is_reused:
            self._note_worker_generators()
        if self.is_iterable:
            return f"{type(self.loader.dataset).__name__} is an iterable data set"
        if self.state.late_draws:
            return "the sampler draws from the global generators during the pass (give it its own generator)"
        if depends_on_workers and has_same_workers and not self.state.is_reused:
            return "samples draw random numbers in workers (hs.seeded(dataset) makes this unnecessary)"
        return ""

    def _skip(self, found: _PassState, generators: Mapping[str, Any]) -> Iterator[Batch]:
        """Return the batches after those that the stored pass has yielded."""
        num, reason = found.num_yielded, self._why_loaded(found)
        batches = self._iterate(skip=0 if reason else num)
        if reason:
            self._load_and_drop(batches, num, reason, generators)
        elif self._order is not None:
            self._order.skip()
        self._note_order()
        if self.state.seen != found.seen:
            self._note_difference("the skipped batches differ from those of the stored pass")
        return batches

    def _load_and_drop(self, batches: Iterator[Batch], num: int, why: str, now: Mapping[str, Any]) -> None:
        """Load the skipped batches again; note if their draws met others, so that what follows depends on both."""
        if not isinstance(self.batches, Sequence):
            warn_user(f"resuming loads {format_count(num, 'batch', 'batches')} again and drops them: {why}")
        first: dict[str, Any] = {}
        for number in range(num):
            if (batch := next(batches, self)) is self:
                raise _make_too_short(number, num)
            if self.is_opaque and number == num - 1:
                self.state.seen = _summarise(batch)
            first = first or read_cpu_generators()
        # With a sampler only its own draws matter: samples that follow draw from the generators as they are restored.
        names = self.state.late_draws or list(first)
        self._note_shared_generators({name: first[name] for name in names if first}, now)

    def _iterate(self, *, skip: int = 0) -> Iterator[Batch]:
        """Return an iterator over the batches, with stand-ins for the sampler and for what runs in workers."""
        loader = self.loader
        if loader is None or isinstance(self.batches, Stateful):
            return iterate_loader(self.batches)
        restart = None
        if self._has_workers():
            # They hold the stand-ins that they were started with.
            running: Any = loader._iterator
            self._order = running._index_sampler if isinstance(running._index_sampler, _Order) else None
            self._watch = running._collate_fn if isinstance(running._collate_fn, _WorkerWatch) else None
        elif self.state.is_reused:
            # A new process has to start the workers, for which torch draws a seed that it did not draw in the old one.
            restart = lambda: self._restore(self.state.before)  # noqa: E731
        attributes: dict[str, Any] = {}
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = getattr(loader, name)
        if self._order is None and (skip or restart or not self.is_iterable and not _draws_once(sampler)):
            self._order = attributes[name] = _Order(sampler)
        if self._watch is None and self.state.num_workers and not self.is_iterable and not self.state.has_draws:
            self._watch = _WorkerWatch(loader.worker_init_fn, loader.collate_fn)
            attributes |= {"worker_init_fn": self._watch.start, "collate_fn": self._watch}
        if self._order is not None:
            self._order.num_to_skip, self._order.restart = skip, restart
        before = {name: loader.__dict__[name] for name in attributes}
        loader.__dict__.update(attributes)  # DataLoader refuses to set them
        try:
            return iterate_loader(loader)
        finally:
            loader.__dict__.update(before)
            if self._order is not None:
                self._order.num_to_skip, self._order.restart = 0, None

    def _has_workers(self) -> bool:
        return self.state.is_persistent and self.loader is not None and self.loader._iterator is not None


# --- stand-ins for the sampler and for collate_fn ---


class _Order(Iterator[Any]):
    """A sampler that skips the first items, and notices draws from the global generators after the first one.

    It is its own iterator: with workers torch calls iter() twice and uses the second one.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.is_watched = not _draws_once(sampler)
        self.num_to_skip = 0
        self.restart: Callable[[], None] | None = None
        self.late_draws: set[str] = set()

    def __iter__(self) -> Iterator[Any]:
        if self.restart is not None:
            self.restart()
        self._indices, self._num_left = iter(self.sampler), self.num_to_skip
        self.checksums = array("L")
        """After each item, of all items until then: workers ask for items ahead of the loop."""
        return self

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        self.skip()
        return self._take()

    def skip(self) -> None:
        """Skip now: without workers torch asks for the first item only when the first batch is wanted."""
        num, self._num_left = self._num_left, 0
        for number in range(num):
            try:
                self._take()
            except StopIteration:
                raise _make_too_short(number, num) from None

    def _take(self) -> Any:
        if not self.is_watched:
            return next(self._indices)
        before = read_cpu_generators() if self.checksums else {}
        try:
            item = next(self._indices)
        finally:
            self.late_draws |= _find_draws(before)
        self.checksums.append(zlib.crc32(_summarise(item).encode(), self.checksums[-1] if self.checksums else 0))
        return item


class _WorkerWatch:
    """Stands in for collate_fn, to notice in the workers that samples draw from the global generators."""

    def __init__(self, init: Callable[[int], None] | None, collate: Callable[[Any], Any]) -> None:
        self.init, self.collate = init, collate
        self._flag = torch.zeros((), dtype=torch.bool).share_memory_()
        self._before: dict[str, Any] = {}

    @property
    def has_draws(self) -> bool:
        return bool(self._flag)

    def start(self, worker: int) -> None:
        """Run the user's worker_init_fn, which may seed, then remember the generators."""
        if self.init is not None:
            self.init(worker)
        self._before = read_cpu_generators()

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if not self._flag:
            self._flag.fill_(bool(_find_draws(self._before)))
        return batch


def _draws_once(sampler: Any) -> bool:
    """True for torch's own samplers, also in batches: they draw before their first index, and need no watch."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in DRAW_ONCE


# --- generators ---


def _make_plain(value: Any) -> Any:
    """Return a state of lists and CPU tensors: torch.load takes no arrays, and its map_location moves generators, too.

    The state of a loader that stores its own position stays as it is.
    """
    if isinstance(value, Mapping):
        return {key: one if key == "loader" else _make_plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_make_plain, value))
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.cpu() if isinstance(value, Tensor) else value


def _find_draws(before: Mapping[str, Any]) -> set[str]:
    """Return the global generators of the CPU whose state is not what it was."""
    now = read_cpu_generators() if before else {}
    return {name for name in now if name in before and not _is_equal(now[name], before[name])}


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, list):
        return all(map(_is_equal, a, b))
    return bool(a == b)


def _walk(name: str, owner: Any, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield what may hold generators or an epoch: a loader, its data set and its samplers, with what they wrap."""
    seen = set() if seen is None else seen
    if owner is None or id(owner) in seen:
        return
    seen.add(id(owner))
    yield name, owner
    inner = getattr(owner, "__dict__", {})
    for key in ("dataset", "batch_sampler", "sampler"):
        yield from _walk(f"{name}.{key}", inner.get(key), seen)
    datasets = inner.get("datasets")
    for number, dataset in enumerate(datasets if isinstance(datasets, (list, tuple)) else ()):
        yield from _walk(f"{name}.dataset{number}", dataset, seen)


def _find_generators(owner: Any) -> dict[str, Any]:
    found = getattr(owner, "__dict__", {}).items()
    return {name: one for name, one in found if isinstance(one, GENERATORS) and one is not torch.default_generator}


def _read_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


# --- which data these are ---


def _describe_data(batches: Any) -> dict[str, str]:
    """Return what tells data sets of one length apart: their types, and the first and last entries of what they hold.

    No sample is loaded: that may be slow or draw random numbers. Of a path only the file name counts, because the same
    data may be in another folder.
    """
    if isinstance(batches, Sequence):
        return {"the list of batches": _summarise(batches)}
    described: dict[str, str] = {}
    for name, owner in _walk("loader", batches):
        if ".dataset" not in name:
            continue
        described[f"the type of {name}"] = type(owner).__name__
        held = getattr(owner, "__dict__", {})
        for key, value in held.items():
            if isinstance(value, (Tensor, np.ndarray, list, tuple)) and (text := _summarise(value)):
                described[f"{name}.{key}"] = text
        if isinstance(own := held.get("_fingerprint"), str):  # of Hugging Face's data sets
            described[f"{name}._fingerprint"] = own
    return described


def _summarise(value: Any, depth: int = 3) -> str:
    """Return a text for an array, or for the first and last entries of a sequence; empty if it holds other things."""
    if isinstance(value, str):
        return PurePath(value).name
    if isinstance(value, (int, float, np.number)):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            return ""
        ends = [np.ascontiguousarray(end) for end in _take_ends(value)]
        return f"{value.dtype} {value.shape} {zlib.crc32(b''.join(end.tobytes() for end in ends)):08x}"
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
            return kind  # reading its numbers would wait for the device
        return f"{kind} {zlib.crc32(b''.join(map(view_bytes, _take_ends(value)))):08x}"
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)) or not value or not depth:
        return ""
    first, last = _summarise(value[0], depth - 1), _summarise(value[-1], depth - 1)
    return f"{len(value)} entries from {first} to {last}" if first and last else ""


def _take_ends(array: Any) -> list[Any]:
    """Return some of the first and of the last numbers of an array or tensor, without copying all of it."""
    rows = array.reshape(1, -1) if array.ndim < 2 else array
    if 0 in rows.shape:
        return []
    return [rows[0].reshape(-1)[:64], rows[-1].reshape(-1)[-64:]]


# --- the loader ---


def _refer_weakly(batches: Any) -> Callable[[], Any]:
    """Return a function that returns the loader as long as the loop has it.

    Loss functions often close over what holds the step. Through that cycle the step would leave the loader to the
    garbage collector, in which torch takes 5 s to end each persistent worker.
    """
    try:
        return weakref.ref(batches)
    except TypeError:  # such as a list
        return lambda: batches


def _count_batches(batches: Any) -> int | None:
    # Of an iterable data set the length is a guess, and torch warns later if it was asked for and was wrong.
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None
    try:
        return len(batches)
    except TypeError:  # a generator
        return None


def _make_too_short(number: int, num: int) -> CheckpointError:
    return CheckpointError(
        f"the data ends after {format_count(number, 'batch', 'batches')}, but {num} are to be skipped",
        why="there are fewer batches than when the state was stored",
        fix="resume with the same data, or call step.end_pass() first to begin a new pass",
    )
