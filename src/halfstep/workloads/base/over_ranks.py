"""Gather samples of all ranks inside a loss, with gradients, for losses that compare samples with each other.

    with gather_over_ranks(rows, rank):     the run enters it around forward and loss of a distributed step
        everyone, begin = gather_rows(own)

Outside of the context (one rank, trials, validation) the functions return the rank's own samples.
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
    """How many samples of the batch each rank holds."""

    rows: tuple[int, ...]
    rank: int
    talks: Callable[[], None]
    """Called when something is gathered: then every rank has to run its backward pass."""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def begin(self) -> int:
        return sum(self.rows[: self.rank])


_together: list[RankRows] = []


@contextmanager
def gather_over_ranks(rows: Sequence[int], rank: int, talks: Callable[[], None]) -> Iterator[None]:
    """Gather over ranks inside this context."""
    _together.append(RankRows(tuple(rows), rank, talks))
    try:
        yield
    finally:
        _together.pop()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_rows(own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks in batch order, and the index of this rank's first row."""
    if not _together:
        return own, 0
    _together[-1].talks()
    gathered: Tensor = _Gathered.apply(own, _together[-1])  # type: ignore[no-untyped-call]
    return gathered, _together[-1].begin


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sum_over_ranks(own: Tensor) -> Tensor:
    """Return the sum over all ranks, without gradients; a rank without samples adds nothing."""
    if not _together:
        return own
    summed = own.detach() * (_together[-1].own > 0)
    dist.all_reduce(summed)
    return summed


def average_over_ranks(own: Tensor) -> Tensor:
    """Return the mean over the samples of all ranks of a value that is a mean over each rank's own. No gradients."""
    return sum_over_ranks(own * _together[-1].own) / sum(_together[-1].rows) if _together else own


class _Gathered(torch.autograd.Function):
    """All-gather as an all-reduce of zero-padded blocks: every backend supports it, for uneven blocks too."""

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
