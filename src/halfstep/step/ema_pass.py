"""The average of a model's weights on a GPU, moved by one kernel of our own (ema_triton.py)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfstep.step.flat import is_dense
from halfstep.step.single_pass import ALIGNMENT, chunks_of

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Weights and their averages, which lie in memory in the same order."""


def takes(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel can read these."""
    has_kernel = weights[0].is_cuda and _has_triton()
    is_known = all(weight.dtype in (torch.float32, torch.bfloat16) for weight in weights)
    return has_kernel and is_known and all(is_dense(weight) and weight.numel() > 0 for weight in weights)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class EmaPass:
    """One launch for each kind of weight there is: mostly one.

    Graphs read the tables at every replay, so a table stays when weights were moved and another takes its place.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.places: list[tuple[int, int]] = []
        self.old: list[Launch] = []

    def move(self, pairs: Pairs, decay: Tensor, bad: Tensor) -> None:
        """Move the averages. A capture finds the table made: steps come before it, and it moves no weights."""
        places = [(weight.data_ptr(), average.data_ptr()) for weight, average in pairs]
        if places != self.places:
            self.old += self.launches
            self.launches, self.places = [*_launches(pairs)], places
        for launch in self.launches:
            launch(decay, bad)


class Launch:
    """The table of weights of one type, all at multiples of 16 bytes or not."""

    def __init__(self, pairs: Pairs, *, aligned: bool) -> None:
        from halfstep.step import ema_triton

        self.dtype, self.aligned = pairs[0][0].dtype, aligned
        columns = [[weight.data_ptr(), average.data_ptr(), weight.numel()] for weight, average in pairs]
        device, size = pairs[0][0].device, ema_triton.BLOCK * ema_triton.TILES
        self.table = torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device)
        self.chunks = chunks_of([weight.numel() for weight, _ in pairs], size).to(device)

    def __call__(self, decay: Tensor, bad: Tensor) -> None:
        from halfstep.step import ema_triton

        ema_triton.move(self.table, self.chunks, decay, bad, dtype=self.dtype, aligned=self.aligned)


def _launches(pairs: Pairs) -> Iterator[Launch]:
    kinds: dict[tuple[torch.dtype, bool], list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in pair)
        kinds.setdefault((pair[0].dtype, aligned), []).append(pair)
    yield from (Launch(found, aligned=aligned) for (_, aligned), found in kinds.items())
