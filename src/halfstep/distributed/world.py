"""The processes of a run, this one among them: how they talk host to host, who is gone, and who says so.

What cannot be agreed any more, a rank that is gone or stuck, ends the others with `RankLost`: gloo says so at once or
after the limit, NCCL after the limit, when the wait for a step's facts gives up. Who met an error shows it; those who
lost that rank because of it are silent.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
RESUME_RUN = "go on from the last checkpoint with --resume RUN; torchrun --max-restarts does so by itself"
"""What to do when a rank is lost."""
GRACE_S = 3.0  # how long who lost a rank waits for that one's own words, and for others that lost it
SEEN_S = 1.0  # how long a rank stays where there is no store, so that the others see that it is not the one they miss
LOOK_S = 0.5  # how often who waits for a step looks whether another rank has ended
TIMED_OUT = ("timed out", "timeout")
CLOSED = "connection closed by peer"
LOST = ("connection", *TIMED_OUT, "broken pipe", "peer", "nccl", "gloo", "socket")
"""Words in the errors of a collective whose other side is gone."""

Made = TypeVar("Made")


@dataclass
class Share:
    """One process of several, and what it has of a batch that all of them train on."""

    rank: int
    size: int

    def count_rows(self, num: int, rank: int | None = None) -> int:
        """How many of a global batch's samples are this rank's; the first ranks have one more where they must."""
        rank = self.rank if rank is None else rank
        return num // self.size + (rank < num % self.size)

    def find_first_row(self, num: int) -> int:
        return self.rank * (num // self.size) + min(self.rank, num % self.size)


class World(Share):
    def __init__(self, *, limit_s: float = LIMIT_S, limit_name: str = LIMIT_NAME, go_on: str = RESUME_RUN) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self.limit_s, self.limit_name, self.go_on = limit_s, limit_name, go_on
        self._store = c10d.PrefixStore("halfstep", c10d._get_default_store())
        self._seen = self._others  # the ranks that were there when one was lost
        self.talking: list[DistributedDataParallel] = []  # what holds the connections to the others, besides torch
        self._where: dict[int, tuple[str, int]] = dict(enumerate(self.gather((socket.gethostname(), os.getpid()))))

    @property
    def is_first(self) -> bool:
        """Whether this one writes files and screen."""
        return self.rank == 0

    # --- talking, host to host ---

    def gather(self, own: Made) -> list[Made]:
        found: list[Any] = [None] * self.size
        with self.translate_losses():
            dist.all_gather_object(found, own)
        return found

    def broadcast_from_first(self, make: Callable[[], Made]) -> Made:
        """What the first rank makes, or the error it meets, on every rank."""
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
        """The sums over all ranks by name; a name that a rank lacks counts as zero there."""
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

    # --- what went wrong elsewhere ---

    @contextmanager
    def translate_losses(self) -> Iterator[None]:
        """A collective inside whose other side is gone becomes an error that names it."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise self.explain_loss(error) from error

    def explain_loss(self, error: BaseException | None = None) -> RankLost:
        """What is known of the ranks that do not answer; without an error the limit is over."""
        self._seen = [rank for rank in self._others if self._is_there(rank)]
        time.sleep(0.2)  # a process that was killed needs a moment to be gone
        gone = [rank for rank in self._others if not self._is_there(rank)]
        silent = gone or self._find_silent()
        if gone:
            what = f"{self._name_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone"
            why = "killed, or out of host memory: it ended without a word"
        elif isinstance(error, dist.DistNetworkError):  # of the store; collectives raise others
            what, why = "the place where the ranks meet is gone", "torchrun, which keeps it, was killed"
        elif error is None or any(word in str(error).lower() for word in TIMED_OUT):
            what = f"{self._name_ranks(silent)} did not answer for {self.limit_s:g} s{self.limit_name}"
            why = "it runs and takes no part in the step: stuck in its own code, its data or its device"
        else:
            what = f"{self._name_ranks(silent)} takes no part any more"
            first_line = next(iter(str(error).strip().splitlines()), "")
            is_closed = CLOSED in first_line.lower()
            why = "it has ended: with an error, or after fewer steps than the others" if is_closed else first_line
        return RankLost(what, why=why, fix=self.go_on)

    def _find_silent(self) -> list[int]:
        """The ranks that do not say in time that they miss somebody, too."""
        until = time.monotonic() + GRACE_S
        silent = self._others
        try:
            self._store.set(f"misses/{self.rank}", "")
            while silent and time.monotonic() < until and not self._store.add("told", 0):
                time.sleep(0.05)
                silent = [rank for rank in silent if not self._store.check([f"misses/{rank}"])]
        except RuntimeError:  # the store went with the rank that held it
            pass
        return silent

    def _name_ranks(self, ranks: Sequence[int]) -> str:
        """With their processes, for whoever looks after them."""
        if not ranks:
            return "another rank"
        places = ", ".join(f"process {process} on {host}" for host, process in (self._where[r] for r in ranks))
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({places})"

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _is_there(self, rank: int) -> bool:
        """Of ranks on other machines only their silence is known."""
        host, process = self._where[rank]
        if host != socket.gethostname():
            return True
        return is_alive(process)

    def wait(self, event: torch.cuda.Event) -> None:
        """For a step's facts, with a limit: a captured step whose peers are gone would never end."""
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
        """Whether another rank has met an error: it will never come to this step."""
        try:
            return self._store.add("told", 0) > 0
        except RuntimeError:  # the store went with the rank that held it
            return True

    def is_first_to_show(self, error: BaseException) -> bool:
        """Whether this rank is the one to show an error: who met it, not those who lost that rank because of it."""
        try:
            if isinstance(error, RankLost):
                until = time.monotonic() + GRACE_S
                while time.monotonic() < until and not self._store.add("told", 0):
                    time.sleep(0.05)
            is_first = self._store.add("told", 1) == 1
            self._store.set(f"knows/{self.rank}", "")
        except RuntimeError:  # the store went with the first rank: of the others the lowest speaks
            is_first = not any(rank in self._seen for rank in range(1, self.rank))
            time.sleep(SEEN_S)
        return is_first

    def hang_up(self, leave: Callable[[], None]) -> None:
        """Let the others know at once that this rank is gone, whoever still holds its model and its error."""
        for wrapped in self.talking:
            vars(wrapped).update(reducer=None, logger=None, process_group=None)
        with suppress(RuntimeError):  # of a peer that is gone
            leave()
        if self.is_first:
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """The store may go with this rank: the others learn first who has told."""
        until = time.monotonic() + GRACE_S
        with suppress(RuntimeError):
            while time.monotonic() < until and any(
                self._is_there(rank) and not self._store.check([f"knows/{rank}"]) for rank in self._others
            ):
                time.sleep(0.05)

    # --- notices of other ranks ---

    def post(self, text: str) -> None:
        with self.translate_losses():
            number = self._store.add("posts", 1)
            self._store.set(f"post/{number}", f"{self.rank} {text}")

    def read_posts(self, seen: int) -> tuple[int, list[str]]:
        """How many lines there are of the others, and those after the first `seen`, the same of several as one."""
        by_text: dict[str, list[str]] = {}
        with self.translate_losses():
            num = self._store.add("posts", 0)
            for number in range(seen + 1, num + 1):
                rank, text = self._store.get(f"post/{number}").decode().split(" ", 1)
                by_text.setdefault(text, []).append(rank)
        return num, [f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items()]


Kind = TypeVar("Kind", bound=HalfstepError)


def mark_agreed(error: Kind) -> Kind:
    """An error that every rank has: no rank's name belongs to it."""
    error.is_agreed = True
    return error


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether a collective failed because of its other side."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in LOST)
