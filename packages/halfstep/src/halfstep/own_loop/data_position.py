"""The position of a custom loop in its data: a resumed loop continues with the very next batch.

Stored are the generators (Python's, NumPy's, torch's, CUDA's, and those that loader, samplers and data set hold) as
they are now and as they were before the pass began, and the number of batches yielded since. To resume, the pass begins
again with the generators of that time. torch then draws what it drew then: the seed of the workers, and the order. The
index sampler, for which `_Order` stands in, drops the batches of indices that were yielded, without loading a sample.
Last, the generators are set to how they were when the state was stored.

Samples need to be loaded again only where indices do not tell everything:
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from halfstep.own_loop.prefetch import Prefetcher
from halfstep.own_loop.seeded import SeededDataset
from halfstep.step.batches import Batch
from halfstep.step.randomness import read_generators, restore_generators
from halfstep.step.user_warnings import warn_user
from halfstep.tensor_files import view_bytes

DRAW_ONCE = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""torch's samplers: they draw from the global generators before their first index only."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MANY_BATCHES = 100  # from here on, loading them again is worth a warning when the state is stored
SEED_THE_ORDER = (
    "If the loop draws the order before step.windows, draw it from the epoch: torch.randperm(num, "
    "generator=torch.Generator().manual_seed(epoch))"
)
INEXACT = "training continues, but not bit-exactly"


@runtime_checkable
class Stateful(Protocol):
    """A loader that stores its own position, as torchdata's StatefulDataLoader does."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class DataPosition:
    """How many passes over the data have ended, and how far the present one is."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.epoch = 0
        self.ranks = [rank, num_ranks]
        self._pass: _Pass | None = None
        self._stored: Mapping[str, Any] | None = None
        """A loaded state, until the pass that continues it begins."""
        self._has_overlap = False
        self._has_warned_of_reload = False
        self._fingerprint: tuple[Callable[[], Any], dict[str, Any]] = lambda: None, {}
        """The data set, and what `_describe_data` returned when this process first read it."""

    @property
    def num_yielded(self) -> int:
        """Return how many batches of the present pass the loop was given; after loading, of the stored one."""
        if self._stored is not None:
            stored = self._stored["pass"]
            return 0 if stored is None or stored["is_over"] else int(stored["num_yielded"])
        return 0 if self._pass is None or self._pass.is_over else self._pass.num_yielded

    def follow(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches of a pass; after `load_state_dict`, those that the stored pass has not yielded yet."""
        if self._pass is not None and not self._pass.is_over and not self._pass.is_left:
            self._has_overlap = True
        if self._stored is None:
            self.end_pass()
        current = _Pass(batches)
        if self._fingerprint[0]() is not current.data or current.data is None:
            self._fingerprint = _refer_weakly(current.data), _describe_data(current.batches)
        current.fingerprint = self._fingerprint[1]
        loaded = current.follow(self.epoch, self._stored)
        current.prefetcher = None  # it holds the loader
        self._pass, self._stored = current, None
        try:
            for batch in loaded:
                current.count(batch)
                yield batch
                if current.is_replaced:
                    raise _make_replaced()
        except GeneratorExit:
            current.is_left = True
            raise
        if self._pass is current:
            self.end_pass()

    def warn_if_unread(self) -> None:
        """Warn of a batch that does not come from `step.windows` although a pass was loaded that goes on there."""
        if self._stored is not None and self._stored["pass"] is not None and not self._stored["pass"]["is_over"]:
            warn_user(
                "the loaded state stops in the middle of a pass over the data, and this batch does not come from "
                f"step.windows(loader), which would go on there: {INEXACT}"
            )
            self._stored = {**self._stored, "pass": None}

    def end_pass(self) -> None:
        """Count the present pass as ended, also one that was left by `break` or is still to be continued."""
        if self._stored is not None and self._stored["pass"] is not None:
            self.epoch += not self._stored["pass"]["is_over"]
            self._stored = {**self._stored, "pass": {**self._stored["pass"], "is_over": True}}
        elif self._pass is not None and not self._pass.is_over:
            self._pass.is_over = True
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        if self._has_overlap:
            warn_user(
                "step.windows was called again before the pass before it had ended: of passes that run at the same "
                "time only the newest is stored, so a resumed loop does not continue exactly"
            )
        current = self._pass
        if current is not None and current.is_opaque and not current.is_over and not self._has_warned_of_reload:
            self._has_warned_of_reload = current.num_yielded >= MANY_BATCHES
            if self._has_warned_of_reload:
                warn_user(
                    f"the data come from a {current.kind}: to resume this state, the {current.num_yielded:,} batches "
                    "that it has given until now are loaded again. Pass the DataLoader itself, in each epoch, as in "
                    "`while step.attempted < num_steps: for window in step.windows(loader): ...`"
                )
        if self._stored is not None:  # nothing was read since it was loaded
            return _make_plain({**self._stored, "epoch": self.epoch, "generators": read_generators()})
        return _make_plain(
            {
                "epoch": self.epoch,
                "ranks": self.ranks,
                "generators": read_generators(),
                "pass": None if self._pass is None else self._pass.state_dict(),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generators now, and the position when the next pass begins."""
        state = _make_plain(state)
        if list(state["ranks"]) != self.ranks:
            rank, num_ranks = self.ranks
            warn_user(
                f"this is rank {rank} of {num_ranks}, and the state is of rank {state['ranks'][0]} of "
                f"{state['ranks'][1]}: its generators are not used, {INEXACT}. Each rank has to load what it saved"
            )
            state = {**state, "generators": read_generators()}
        for note in restore_generators(state["generators"]):
            warn_user(f"{note}; {INEXACT}")
        if self._pass is not None:
            self._pass.is_replaced = True
        self.epoch, self._pass, self._stored, self._has_overlap = int(state["epoch"]), None, state, False


class _Pass:
    """One pass over the data."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.prefetcher = batches if isinstance(batches, Prefetcher) and not batches.has_begun else None
        batches = batches if self.prefetcher is None else self.prefetcher.source
        self._get_batches = _refer_weakly(batches)
        self.num_batches = _count_batches(batches)
        self.num_workers = self.loader.num_workers if self.loader is not None else 0
        self.is_iterable = self.loader is None or isinstance(self.loader.dataset, IterableDataset)
        self.is_persistent = self.num_workers > 0 and self.loader is not None and self.loader.persistent_workers
        self.num_yielded = 0
        self.kind = type(batches).__name__
        self.is_opaque = self.loader is None and not isinstance(batches, (Sequence, Stateful))
        """True for a generator or a wrapper, whose batches can only be skipped by loading them again."""
        self.is_over = self.is_left = False
        self.is_replaced = False
        """True once another position was loaded: this pass is not the loop's any more."""
        self.fingerprint: dict[str, Any] = {}
        self.is_reused = False
        """True if it uses the persistent workers of an earlier pass, so that torch draws no seed for them."""
        self.before: dict[str, Any] = {}
        # Generators of the data set are copied into workers, so they count like a worker's global ones.
        self.has_draws = self.num_workers > 0 and any(
            name.startswith("loader.dataset") and _find_generators(owner) for name, owner in self.owners.items()
        )
        self.late_draws: set[str] = set()
        """The global generators that the sampler draws from after its first item."""
        self._ahead: deque[dict[str, Any]] = deque()
        """The generators before each batch was loaded that hs.prefetch holds and the loop has not seen."""
        self._last = ""
        """A text for the last batch of an opaque pass: a resumed loop has to skip the same one."""
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
        self.num_yielded += 1
        if self.is_opaque:
            self._last = _summarise(batch)
        if self._ahead:
            self._ahead.popleft()

    # --- storing ---

    def state_dict(self) -> dict[str, Any]:
        is_stateful = isinstance(self.batches, Stateful) and not self.is_over
        return {
            "num_yielded": 0 if self.is_over else self.num_yielded,
            "num_batches": self.num_batches,
            "num_workers": self.num_workers,
            "is_over": self.is_over,
            "is_left": self.is_left,
            "is_reused": self.is_reused,
            "is_persistent": self.is_persistent,
            "has_draws": self._has_draws(),
            "late_draws": sorted(self.late_draws | (set() if self._order is None else self._order.late_draws)),
            "order": None if self.is_over else self._summarise_order(),
            "before": {} if self.is_over else self.before,
            "now": self._read_own(),
            "ahead": [] if self.is_over else list(self._ahead),
            "data": {} if self.is_over else self._describe_constant_data(),
            "last": "" if self.is_over else self._last,
            "loader": self.batches.state_dict() if is_stateful else None,
        }

    def _summarise_order(self) -> int | None:
        """Return a checksum of the yielded batches' indices; None for torch's samplers, which keep no state."""
        if self.is_iterable or self._order is None or not self.num_yielded:
            return None
        return self._order.summarise(self.num_yielded)

    def _describe_constant_data(self) -> dict[str, Any]:
        """Return what `_describe_data` says of attributes that have not changed since the process first read them."""
        now = _describe_data(self.batches)
        return {name: value for name, value in self.fingerprint.items() if now.get(name) == value}

    def _has_draws(self) -> bool:
        return self.has_draws or self._watch is not None and self._watch.has_draws

    def _read(self) -> dict[str, Any]:
        return {"global": _read_global(), "own": self._read_own()}

    def _restore(self, states: Mapping[str, Any]) -> None:
        """Restore what `_read` returned, in the middle of a pass."""
        _write_global(states["global"])
        self._write_own(states["own"], is_inside=True)

    def _read_own(self) -> dict[str, Any]:
        """Return the states of the generators that loader, samplers and data set hold, and their epochs."""
        generators = {
            f"{name}.{attribute}": _read_state(generator)
            for name, owner in self.owners.items()
            for attribute, generator in _find_generators(owner).items()
        }
        epochs = {name: owner.epoch for name, owner in self.owners.items() if isinstance(_get_epoch(owner), int)}
        return {"generators": generators, "epochs": epochs}

    def _write_own(self, states: Mapping[str, Any], *, is_inside: bool) -> None:
        """Restore what `_read_own` returned; `is_inside`: in the middle of a pass."""
        for name, owner in self.owners.items():
            for attribute, generator in _find_generators(owner).items():
                if (state := states["generators"].get(f"{name}.{attribute}")) is not None:
                    _write_state(generator, state)
            epoch, now = states["epochs"].get(name), _get_epoch(owner)
            # The loop itself calls set_epoch before each pass; only a pass that goes on has to keep its epoch.
            if epoch is None or epoch == now or hasattr(owner, "set_epoch") and not is_inside:
                continue
            if hasattr(owner, "set_epoch"):
                warn_user(
                    f"{type(owner).__name__} is at epoch {now}, and the stored pass was at epoch {epoch}, which it "
                    "goes on with: call set_epoch(step.epoch) before step.windows"
                )
            owner.epoch = epoch

    # --- beginning and continuing ---

    def follow(self, epoch: int, stored: Mapping[str, Any] | None) -> Iterator[Batch]:
        """Return the batches of the pass, or those that are left of the stored one."""
        for owner in self.owners.values():
            if isinstance(owner, SeededDataset):
                owner.set_epoch(epoch)
        found = stored["pass"] if stored is not None else None
        if stored is None or found is None:
            return self._prefetch(self._start(is_reused=self._has_workers()))
        if found["is_over"]:
            self._write_own(found["now"], is_inside=False)
            return self._prefetch(self._start(is_reused=found["is_persistent"] and self.is_persistent, found=found))
        return self._continue(found, stored["generators"])

    def _has_workers(self) -> bool:
        return self.is_persistent and self.loader is not None and self.loader._iterator is not None

    def _start(self, *, is_reused: bool, found: Mapping[str, Any] | None = None) -> Iterator[Batch]:
        self.before, self.is_reused = self._read(), is_reused
        if not is_reused or self._has_workers():
            return self._iterate()
        # A new process has to start the workers, for which torch draws a seed that it did not draw in the old one.
        if found is not None and (found["has_draws"] or self.is_iterable):
            self._warn_of_persistent()
        return self._iterate(restart=lambda: self._restore(self.before))

    def _continue(self, found: Mapping[str, Any], generators: Mapping[str, Any]) -> Iterator[Batch]:
        """Begin the stored pass again and skip what it has yielded."""
        self._refuse_different_loader(found)
        self._warn_of_other_data(found)
        num = self.num_yielded = int(found["num_yielded"])
        if found["is_left"]:
            warn_user(
                f"the stored pass was left by `break` after {format_count(num, 'batch', 'batches')} and goes on from "
                "there; to begin a new one instead, call step.end_pass() before you save"
            )
        self.before, self.is_reused = dict(found["before"]), bool(found["is_reused"])
        self.has_draws |= bool(found["has_draws"])
        self.late_draws |= set(found["late_draws"])
        self._restore(self.before)
        if found["loader"] is not None and isinstance(self.batches, Stateful):
            self.batches.load_state_dict(found["loader"])
            batches = self._iterate()
            if self.num_workers:
                warn_user(
                    f"{type(self.batches).__name__} restores the order of the samples, not the generators of its "
                    "workers: samples that draw random numbers differ; hs.seeded(dataset) makes them exact"
                )
        else:
            restart = (lambda: self._restore(self.before)) if self.is_reused else None
            reason = self._why_loaded(found)
            batches = self._iterate(skip=0 if reason else num, restart=restart)
            if self._order is not None and not reason:
                self._order.skip()
            if reason:
                self._load_and_drop(batches, num, reason, generators, last=found["last"])
            if self._summarise_order() != found["order"]:
                warn_user(
                    f"the sampler gives another order than in the stored pass: {INEXACT}. It keeps a state from pass "
                    "to pass, such as a counter or a shuffled list: let __iter__ draw the order anew from its generator"
                )
        batches = self._prefetch(batches)
        if found["ahead"] and self.prefetcher is not None:
            self._restore(found["ahead"][0])
            self.prefetcher.fetch(len(found["ahead"]))
            if not all(_is_equal(state, generators[name]) for name, state in _read_global().items()):
                warn_user(
                    "hs.prefetch had loaded batches ahead, and the model or the loop drew from the same generators "
                    f"since: {INEXACT}; hs.seeded(dataset) or workers make it exact"
                )
        restore_generators(generators)
        self._write_own(found["now"], is_inside=True)
        return batches

    def _prefetch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self.prefetcher is None:
            return batches
        self.prefetcher.begin(self._note_generators(batches) if self.prefetcher.depth > 1 else batches)
        return iter(self.prefetcher)

    def _note_generators(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            state = self._read()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._ahead.append(state)
            yield batch

    def _refuse_different_loader(self, found: Mapping[str, Any]) -> None:
        then, now = found["num_batches"], self.num_batches
        if then != now:
            raise CheckpointError(
                f"the state is in the middle of a pass over {then or 'an unknown number of'} batches, this loader has "
                f"{now or 'an unknown number'}",
                why=f"the {format_count(found['num_yielded'], 'batch', 'batches')} to skip would be other ones",
                fix="resume with the same data and batch size, or call step.end_pass() first to begin a new pass",
            )

    def _warn_of_other_data(self, found: Mapping[str, Any]) -> None:
        for name, then in found["data"].items():
            now = self.fingerprint.get(name, then)
            if now != then:
                warn_user(
                    f"the state is in the middle of a pass over other data: {name} was {then} and is {now}. The pass "
                    f"goes on after {format_count(found['num_yielded'], 'batch', 'batches')}; to begin a new one, call "
                    f"step.end_pass() before step.windows. {SEED_THE_ORDER if self.loader is None else ''}".rstrip()
                )
                return

    def _why_loaded(self, found: Mapping[str, Any]) -> str:
        """Return why the skipped batches have to be loaded again; empty if their indices are enough."""
        if self.loader is None:
            return f"a {self.kind} has no sampler (pass the DataLoader itself to step.windows)"
        if not getattr(self.loader, "in_order", True):
            warn_user(f"in_order=False lets the workers decide the order of batches: {INEXACT}")
        if self.is_iterable:
            if self.num_workers != found["num_workers"]:
                warn_user(
                    f"{self.num_workers} loader workers divide an iterable data set, but the state was saved with "
                    f"{found['num_workers']}: {INEXACT}"
                )
            elif self.is_reused:
                self._warn_of_persistent()
            return f"{type(self.loader.dataset).__name__} is an iterable data set"
        if self.late_draws:
            return "the sampler draws from the global generators during the pass (give it a generator of its own)"
        if not self.num_workers or not self.has_draws:
            return ""
        if self.is_reused:
            self._warn_of_persistent()
            return ""
        if self.num_workers != found["num_workers"]:
            warn_user(
                f"samples draw random numbers in {self.num_workers} loader workers, but the state was saved with "
                f"{found['num_workers']}: {INEXACT}; hs.seeded(dataset) makes samples independent of the workers"
            )
            return ""
        return "samples draw random numbers in workers (hs.seeded(dataset) makes this unnecessary)"

    def _warn_of_persistent(self) -> None:
        warn_user(
            "the generators of persistent workers cannot be restored after the first epoch, so samples that draw "
            f"random numbers differ: {INEXACT}; hs.seeded(dataset) or persistent_workers=False makes them exact"
        )

    def _load_and_drop(
        self, batches: Iterator[Batch], num: int, why: str, now: Mapping[str, Any], *, last: str
    ) -> None:
        """Load the skipped batches again; warn if their draws met others, so that what follows depends on both."""
        if not isinstance(self.batches, Sequence):
            warn_user(f"resuming loads {format_count(num, 'batch', 'batches')} again and drops them: {why}")
        first: dict[str, Any] = {}
        batch: Any = None
        for number in range(num):
            if (batch := next(batches, self)) is self:
                raise _make_too_short(number, num)
            if number == 0:
                first = _read_global()
        after = _read_global()
        # With a sampler only its own draws matter: samples that follow draw from the generators as they are restored.
        names = self.late_draws or set(after)
        if self.is_opaque and num and _summarise(batch) != last:
            warn_user(
                f"the last skipped batch is another one than the stored pass yielded there: {INEXACT}. {SEED_THE_ORDER}"
            )
        elif any(not _is_equal(first[name], after[name]) and not _is_equal(after[name], now[name]) for name in names):
            warn_user(
                "the data draw from a global generator that the model or the loop draws from, too, so the batches that "
                f"follow may be others: {INEXACT} then; give the data a generator of their own"
            )

    def _iterate(self, *, skip: int = 0, restart: Callable[[], None] | None = None) -> Iterator[Batch]:
        """Return an iterator over the batches, with stand-ins for the sampler and for what runs in workers."""
        loader = self.loader
        if loader is None or isinstance(self.batches, Stateful):
            return iterate_loader(self.batches)
        if self._has_workers():
            # They hold the stand-ins that they were started with.
            running: Any = loader._iterator
            self._order = running._index_sampler if isinstance(running._index_sampler, _Order) else None
            self._watch = running._collate_fn if isinstance(running._collate_fn, _WorkerWatch) else None
        attributes: dict[str, Any] = {}
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = getattr(loader, name)
        if self._order is None and (skip or restart or not self.is_iterable and not _draws_once(sampler)):
            self._order = attributes[name] = _Order(sampler)
        if self._watch is None and self.num_workers and not self.is_iterable and not self.has_draws:
            self._watch = _WorkerWatch(loader.worker_init_fn, loader.collate_fn)
            attributes |= {"worker_init_fn": self._watch.start, "collate_fn": self._watch}
        if self._order is not None:
            self._order.num_to_skip, self._order.restart = skip, restart
        try:
            with _swapped(loader, attributes):
                return iterate_loader(loader)
        finally:
            if self._order is not None:
                self._order.num_to_skip, self._order.restart = 0, None


@contextmanager
def _swapped(loader: DataLoader[Any], attributes: Mapping[str, Any]) -> Iterator[None]:
    """Replace attributes for the block. In its __dict__: DataLoader refuses to set them."""
    before = {name: loader.__dict__[name] for name in attributes}
    loader.__dict__.update(attributes)
    try:
        yield
    finally:
        loader.__dict__.update(before)


# --- stand-ins for the sampler and for collate_fn ---


class _Order:
    """A sampler that skips the first items, and notices draws from the global generators after the first one."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.is_watched = not _draws_once(sampler)
        self.num_to_skip = 0
        self.restart: Callable[[], None] | None = None
        self.late_draws: set[str] = set()
        self._newest: _Indices | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.restart is not None:
            self.restart()
        # With workers torch calls this twice and uses the second iterator.
        self._newest = _Indices(self, iter(self.sampler), self.num_to_skip)
        return self._newest

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def summarise(self, num: int) -> int | None:
        """Return a checksum of the first `num` items of the present pass, if the sampler is not one of torch's."""
        return self._newest.checksums[num - 1] if self.is_watched and self._newest is not None else None

    def skip(self) -> None:
        """Skip now: without workers torch asks for the first item only when the first batch is wanted."""
        if self._newest is not None:
            self._newest.skip()


class _Indices(Iterator[Any]):
    def __init__(self, order: _Order, indices: Iterator[Any], num_to_skip: int) -> None:
        self.order, self.indices, self.num_to_skip = order, indices, num_to_skip
        self.is_first = True
        self.checksums = array("L")
        """After each item, of all items until then: workers ask for items ahead of the loop."""

    def __next__(self) -> Any:
        self.skip()
        return self._take()

    def skip(self) -> None:
        num, self.num_to_skip = self.num_to_skip, 0
        for number in range(num):
            try:
                self._take()
            except StopIteration:
                raise _make_too_short(number, num) from None

    def _take(self) -> Any:
        if not self.order.is_watched:
            return next(self.indices)
        before = {} if self.is_first else _read_global()
        self.is_first = False
        try:
            item = next(self.indices)
        finally:
            after = _read_global() if before else {}
            self.order.late_draws |= {name for name in after if not _is_equal(before[name], after[name])}
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
        self._before = _read_global()

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        if not self._flag:
            now = _read_global()
            self._flag.fill_(any(not _is_equal(self._before[name], now[name]) for name in now))
        return batch


def _draws_once(sampler: Any) -> bool:
    """True for torch's own samplers, also in batches: they draw before their first index, and need no watch."""
    return type(sampler.sampler if type(sampler) is BatchSampler else sampler) in DRAW_ONCE


# --- generators ---


def _read_global() -> dict[str, Any]:
    """Return the states of the global generators on the CPU: those that data draw from."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy = [str(kind), np.asarray(keys), int(position), int(has_gauss), float(cached)]
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def _write_global(states: Mapping[str, Any]) -> None:
    restore_generators({**states, "cuda": ()})


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
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def _write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _get_epoch(owner: Any) -> Any:
    return getattr(owner, "__dict__", {}).get("epoch")


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


def _make_replaced() -> ConfigError:
    return ConfigError(
        "a state was loaded while step.windows was running",
        why="the loaded state has its own position in the data, and this pass is not at it",
        fix="leave the loop after loading, and call step.windows again: it continues there. To go on with this pass "
        'instead, load step.state_dict() without its "position"',
    )


def _make_too_short(number: int, num: int) -> CheckpointError:
    return CheckpointError(
        f"the data end after {format_count(number, 'batch', 'batches')}, and {num} are to be skipped",
        why="they have become fewer since the state was stored",
        fix="resume with the same data, or call step.end_pass() first to begin a new pass",
    )
