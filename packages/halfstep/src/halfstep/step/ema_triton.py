"""Move the average of all weights in one launch: 12 bytes per weight, where separate operators move 40.

Tensors are found through a table with one column each: addresses of weight and average, and the number of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, TILES, WARPS = 1024, 4, 4
"""Eight values per thread at a time; tiles of a program, which looks its addresses up once."""

AVERAGE, LENGTH = 1, 2  # rows of the table; the weight's is 0

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@triton.jit
def _address(table, field, column, columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + field * columns + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _move_tile(weight, average, keep, inside):
    now, before = tl.load(weight, inside).to(tl.float32), tl.load(average, inside)
    # torch.lerp's two forms: each is exact at its own end.
    near_now, near_before = now + keep * (before - now), before - (before - now) * (1.0 - keep)
    tl.store(average, tl.where(keep < 0.5, near_now, near_before), inside)


@triton.jit(do_not_specialize_on_alignment=["decay", "bad"])
def _average(
    table, chunks, decay, bad, columns,
    WEIGHT_TYPE: tl.constexpr, ALIGNED: tl.constexpr, AVERAGE: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Move the averages of one program's values; does nothing in a bad step."""
    column = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (BLOCK * TILES)
    length = tl.load(table + LENGTH * columns + column)
    if tl.load(bad) == 0:
        weight = _address(table, 0, column, columns, WEIGHT_TYPE, ALIGNED)
        average = _address(table, AVERAGE, column, columns, tl.float32, ALIGNED)
        keep = tl.load(decay)
        # A mask that may end anywhere would make every access one of 4 bytes, so only a tensor's end has one.
        if start + BLOCK * TILES <= length:
            for tile in range(TILES):
                at = start + tile * BLOCK + tl.arange(0, BLOCK)
                _move_tile(weight + at, average + at, keep, None)
        else:
            for tile in range(TILES):
                at = start + tile * BLOCK + tl.arange(0, BLOCK)
                _move_tile(weight + at, average + at, keep, at < length)


def move(table: Tensor, chunks: Tensor, decay: Tensor, bad: Tensor, *, dtype: torch.dtype, aligned: bool) -> None:
    """Move all averages in `table` towards their weights: average = decay · average + (1 - decay) · weight. `chunks`
    assigns slices of tensors to programs."""
    _average[(len(chunks),)](
        table, chunks, decay, bad, table.shape[1],
        WEIGHT_TYPE=TYPES[dtype], ALIGNED=aligned, AVERAGE=AVERAGE, LENGTH=LENGTH,
        BLOCK=BLOCK, TILES=TILES, num_warps=WARPS,
    )  # fmt: skip
