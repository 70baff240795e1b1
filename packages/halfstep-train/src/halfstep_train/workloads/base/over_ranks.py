"""Gather samples of all ranks inside a loss, with gradients, for losses that compare samples with each other.

    with gather_over_ranks(rows, rank, on_gather):  # entered around forward and loss of a distributed step
        all_rows, begin = gather_rows(own)

Outside the context (one rank, trials, validation) the functions return the rank's own samples.
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
    on_gather: Callable[[], None]
    """Called when rows are gathered: every rank must then run its backward pass, which is collective too."""

    @property
    def own(self) -> int:
        return self.rows[self.rank]

    @property
    def begin(self) -> int:
        return sum(self.rows[: self.rank])


_contexts: list[RankRows] = []


@contextmanager
def gather_over_ranks(rows: Sequence[int], rank: int, on_gather: Callable[[], None]) -> Iterator[None]:
    """Make `gather_rows` and the reductions below communicate inside this context.

    `rows` are the numbers of samples per rank; `on_gather` is called when rows are gathered."""
    _contexts.append(RankRows(tuple(rows), rank, on_gather))
    try:
        yield
    finally:
        _contexts.pop()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gather_rows(own: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all ranks in batch order, and the index of this rank's first row."""
    if not _contexts:
        return own, 0
    _contexts[-1].on_gather()
    gathered: Tensor = _GatherRows.apply(own, _contexts[-1])  # type: ignore[no-untyped-call]
    return gathered, _contexts[-1].begin


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sum_over_ranks(own: Tensor) -> Tensor:
    """Return the sum over all ranks, without gradients; a rank without samples adds nothing."""
    if not _contexts:
        return own
    summed = own.detach() * (_contexts[-1].own > 0)
    dist.all_reduce(summed)
    return summed


def average_over_ranks(own: Tensor) -> Tensor:
    """Turn each rank's mean over its samples into the mean over the samples of all ranks, without gradients."""
    return sum_over_ranks(own * _contexts[-1].own) / sum(_contexts[-1].rows) if _contexts else own


class _GatherRows(torch.autograd.Function):
    """All-gather as an all-reduce of zero-padded blocks, which every backend supports, also for blocks of unequal
    size."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, together: RankRows) -> Tensor:
        ctx.together, ctx.shape = together, own.shape
        gathered = own.new_zeros(sum(together.rows), *own.shape[1:])
        gathered[together.begin : together.begin + together.own] = own[: together.own]
        dist.all_reduce(gathered)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        together: RankRows = ctx.together
        # Every rank's loss depends on every row, so the gradient of a row is the sum over the ranks.
        summed = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed)
        own = summed.new_zeros(ctx.shape)
        own[: together.own] = summed[together.begin : together.begin + together.own]
        return own, None
