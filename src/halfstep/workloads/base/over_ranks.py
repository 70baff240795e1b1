"""Samples of all processes inside a loss, with gradients: what compares samples with each other needs the others' too.

    with gather_over_ranks(rows, rank):     the run, around forward and loss of a step that several processes make
        everyone, begin = gather_rows(own)

Outside of it, in one process, in trials and in validation, everyone is the process itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankRows:
    """The samples that each process has of a batch."""

    rows: tuple[int, ...]
    rank: int
    talks: Callable[[], None]
    """Told where something was gathered: then every process has to run its backward pass."""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def begin(self) -> int:
        return sum(self.rows[: self.rank])


_together: list[RankRows] = []


@contextmanager
def gather_over_ranks(rows: Sequence[int], rank: int, talks: Callable[[], None]) -> Iterator[None]:
    """Samples are gathered inside."""
    _together.append(RankRows(tuple(rows), rank, talks))
    try:
        yield
    finally:
        _together.pop()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_rows(own: Tensor) -> tuple[Tensor, int]:
    """The rows of all processes in the order of the batch, and where this one's begin."""
    if not _together:
        return own, 0
    _together[-1].talks()
    gathered: Tensor = _Gathered.apply(own, _together[-1])  # type: ignore[no-untyped-call]
    return gathered, _together[-1].begin


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sum_over_ranks(own: Tensor) -> Tensor:
    """The sum over all processes; a process without samples adds nothing. No gradients."""
    if not _together:
        return own
    summed = own.detach() * (_together[-1].own > 0)
    dist.all_reduce(summed)
    return summed


def average_over_ranks(own: Tensor) -> Tensor:
    """Over the samples of all processes, of what is a mean over each one's own. No gradients."""
    return sum_over_ranks(own * _together[-1].own) / sum(_together[-1].rows) if _together else own


class _Gathered(torch.autograd.Function):
    """A sum of blocks: every backend has that, for uneven ones as well."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, together: RankRows) -> Tensor:
        ctx.together, ctx.shape = together, own.shape
        found = own.new_zeros(sum(together.rows), *own.shape[1:])
        found[together.begin : together.begin + together.own] = own[: together.own]
        dist.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        together: RankRows = ctx.together
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        own = summed.new_zeros(ctx.shape)
        own[: together.own] = summed[together.begin : together.begin + together.own]
        return own, None
