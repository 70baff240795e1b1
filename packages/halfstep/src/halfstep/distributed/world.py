"""The ranks of a run: collectives between hosts, lost ranks, and which rank shows an error.

A rank that is gone or stuck ends the others with `RankLost`. gloo reports it at once or after the time limit, NCCL
after the limit, when the wait for a step's facts gives up. The rank that met an error shows it; ranks that lost it
because of that stay silent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from halfstep.disk import is_alive
from halfstep.errors import HalfstepError, RankLost

LIMIT_S = 600.0  # how long a rank is waited for
LIMIT_NAME = " (train.rank_timeout_s)"
RESUME_RUN = "continue from the last checkpoint with --resume RUN; torchrun --max-restarts does this itself"
"""The fix that RankLost gives in runs."""
GRACE_S = 3.0  # how long a rank waits for the lost one's own error, and for others that lost it
SEEN_S = 1.0  # without a store: how long a rank stays alive, so that others do not report it as the lost one
LOOK_S = 0.5  # how often a waiting rank checks whether another has ended
TIMED_OUT = ("timed out", "timeout")
CLOSED = "connection closed by peer"
LOST = ("connection", *TIMED_OUT, "broken pipe", "peer", "nccl", "gloo", "socket")
"""Words in the errors of a collective whose other side is gone: torch has no exception class for all of them."""

Made = TypeVar("Made")


@dataclass
class Share:
    """One rank of several, and its rows of a global batch."""

    rank: int
    size: int

    def count_rows(self, num: int, rank: int | None = None) -> int:
        """Return how many samples of a global batch this rank has; the first ranks take one more where it is uneven."""
        rank = self.rank if rank is None else rank
        return num // self.size + (rank < num % self.size)

    def find_first_row(self, num: int) -> int:
        return self.rank * (num // self.size) + min(self.rank, num % self.size)


class World(Share):
    """All ranks of a run: collectives between hosts, and detection of lost ranks."""

    def __init__(self, *, limit_s: float = LIMIT_S, limit_name: str = LIMIT_NAME, go_on: str = RESUME_RUN) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.limit_s, self.limit_name, self.go_on = limit_s, limit_name, go_on
        self._store = c10d.PrefixStore("halfstep", c10d._get_default_store())
        self._seen = self._others  # the ranks that were there when one was lost
        self.connected_models: list[DistributedDataParallel] = []
        """Wrapped models, which hold connections to the other ranks as torch itself does."""
        self._where: dict[int, tuple[str, int]] = dict(enumerate(self.gather((socket.gethostname(), os.getpid()))))

    @property
    def is_on_one_host(self) -> bool:
        return len({host for host, _ in self._where.values()}) == 1

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files and screen."""
        return self.rank == 0

    # --- collectives between hosts ---

    def gather(self, own: Made) -> list[Made]:
        found: list[Any] = [None] * self.size
        with self.translate_losses():
            dist.all_gather_object(found, own)
        return found

    def broadcast_from_first(self, make: Callable[[], Made]) -> Made:
        """Run `make` on rank 0 and return its result, or raise its error, on every rank."""
        answer: list[Any] = [None]
        if self.is_first:
            try:
                answer = [make()]
            except HalfstepError as error:
                answer = [mark_agreed(error)]
        with self.translate_losses():
            dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], HalfstepError):
            raise mark_agreed(answer[0])
        made: Made = answer[0]
        return made

    def sum_over_ranks(self, tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the sums over all ranks by name; a name that a rank lacks counts as zero there."""
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for theirs in self.gather({name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}):
            shapes |= theirs
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in sorted(shapes.items()):
            own = tensors.get(name)
            found[name] = torch.zeros(shape, dtype=dtype, device=device) if own is None else own.to(device, copy=True)
            with self.translate_losses():
                dist.all_reduce(found[name])
        return found

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        with self.translate_losses(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    # --- errors of other ranks ---

    @contextmanager
    def translate_losses(self) -> Iterator[None]:
        """Turn errors of collectives whose other side is gone into RankLost, which names the rank."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise self.explain_loss(error) from error

    def explain_loss(self, error: BaseException | None = None) -> RankLost:
        """Return the RankLost error for ranks that do not answer; without an error the time limit has passed."""
        self._seen = [rank for rank in self._others if self._is_there(rank)]
        time.sleep(0.2)  # a process that was killed needs a moment to be gone
        gone = [rank for rank in self._others if not self._is_there(rank)]
        silent = gone or self._find_silent()
        if gone:
            what = f"{self._name_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"
            why = "it was killed, or ran out of host memory"
        elif isinstance(error, dist.DistNetworkError):  # of the store; collectives raise others
            what, why = "the rendezvous store of the ranks is gone", "torchrun, which hosts it, was killed"
        elif error is None or any(word in str(error).lower() for word in TIMED_OUT):
            what = f"{self._name_ranks(silent)} did not answer for {self.limit_s:g} s{self.limit_name}"
            why = "it is running but does not reach the collective: stuck in user code, data loading or on its device"
        else:
            what = f"{self._name_ranks(silent)} no longer takes part"
            first_line = next(iter(str(error).strip().splitlines()), "")
            is_closed = CLOSED in first_line.lower()
            why = "it has ended: with an error, or after fewer steps than the others" if is_closed else first_line
        return RankLost(what, why=why, fix=self.go_on)

    def _find_silent(self) -> list[int]:
        """Return the ranks that do not report in time that they lost a rank as well."""
        until = time.monotonic() + GRACE_S
        silent = self._others
        try:
            self._store.set(f"misses/{self.rank}", "")
            while silent and time.monotonic() < until and not self._store.add("shown", 0):
                time.sleep(0.05)
                silent = [rank for rank in silent if not self._store.check([f"misses/{rank}"])]
        except RuntimeError:  # the store went with the rank that held it
            pass
        return silent

    def _name_ranks(self, ranks: Sequence[int]) -> str:
        """Return the ranks with their process ids and hosts."""
        if not ranks:
            return "another rank"
        places = ", ".join(f"process {process} on {host}" for host, process in (self._where[r] for r in ranks))
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({places})"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _is_there(self, rank: int) -> bool:
        """True if the rank's process exists; ranks on other machines cannot be checked and count as there."""
        host, process = self._where[rank]
        if host != socket.gethostname():
            return True
        return is_alive(process)

    def wait(self, event: torch.cuda.Event) -> None:
        """Wait for a step's facts, with a time limit: a captured step whose peers are gone would never end."""
        start = time.monotonic()
        pause_s, next_look_s = 1e-5, LOOK_S
        while not event.query():
            waited_s = time.monotonic() - start
            if waited_s > self.limit_s:
                raise self.explain_loss()
            if waited_s > next_look_s:
                next_look_s = waited_s + LOOK_S
                if self._has_ended():
                    raise self.explain_loss()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def _has_ended(self) -> bool:
        """True if another rank has met an error: it will not reach this step."""
        with suppress(RuntimeError):  # the store went with the rank that held it
            return self._store.add("shown", 0) > 0
        return True

    def is_first_to_show(self, error: BaseException) -> bool:
        """True if this rank shows the error: the one that met it, not those that lost that rank because of it."""
        try:
            if isinstance(error, RankLost):
                until = time.monotonic() + GRACE_S
                while time.monotonic() < until and not self._store.add("shown", 0):
                    time.sleep(0.05)
            is_first = self._store.add("shown", 1) == 1
            self._store.set(f"knows/{self.rank}", "")
        except RuntimeError:  # the store went with the first rank: of the others the lowest speaks
            is_first = not any(rank in self._seen for rank in range(1, self.rank))
            time.sleep(SEEN_S)
        return is_first

    def hang_up(self, leave: Callable[[], None]) -> None:
        """Close all connections, so that the others notice at once, even if the model is still referenced."""
        for wrapped in self.connected_models:
            vars(wrapped).update(reducer=None, logger=None, process_group=None)
        with suppress(RuntimeError):  # of a peer that is gone
            leave()
        # The first rank waits until the others have read who showed the error: the store may end with it.
        until, waiting = time.monotonic() + GRACE_S, self._others if self.is_first else []
        with suppress(RuntimeError):
            while waiting and time.monotonic() < until:
                waiting = [r for r in waiting if self._is_there(r) and not self._store.check([f"knows/{r}"])]
                time.sleep(0.05)

    # --- texts for other ranks, without collectives: also from threads while the ranks train ---

    def post_text(self, key: str, text: str) -> None:
        with self.translate_losses():
            self._store.set(key, text)

    def await_text(self, key: str, rank: int) -> str:
        """Return what a rank posts under a key; raise RankLost if it ends before or the time limit passes."""
        until, pause_s = time.monotonic() + self.limit_s, 1e-3
        with self.translate_losses():
            while not self._store.check([key]):
                # The rank may have posted and ended after the first look.
                if not self._is_there(rank) and not self._store.check([key]) or time.monotonic() > until:
                    raise self.explain_loss()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
            return self._store.get(key).decode()

    def drop_texts(self, keys: Iterable[str]) -> None:
        with self.translate_losses():
            for key in keys:
                self._store.delete_key(key)

    # --- notices of other ranks ---

    def post(self, text: str) -> None:
        with self.translate_losses():
            number = self._store.add("posts", 1)
            self._store.set(f"post/{number}", f"{self.rank} {text}")

    def read_posts(self, seen: int) -> tuple[int, list[str]]:
        """Return the number of posts, and those after the first `seen`; equal posts of several ranks are merged."""
        by_text: dict[str, list[str]] = {}
        with self.translate_losses():
            num = self._store.add("posts", 0)
            for number in range(seen + 1, num + 1):
                rank, text = self._store.get(f"post/{number}").decode().split(" ", 1)
                by_text.setdefault(text, []).append(rank)
        return num, [f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items()]


Kind = TypeVar("Kind", bound=HalfstepError)


def mark_agreed(error: Kind) -> Kind:
    """Mark an error that every rank raises alike, so that it is shown without a rank number."""
    error.is_agreed = True
    return error


def is_lost_rank(error: RuntimeError) -> bool:
    """True if a collective failed because its other side is gone."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)
