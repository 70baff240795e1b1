"""AdamW, and Adam without decay, over a group's parameters in one launch, bit-identical to torch's fused CUDA kernel.

torch's kernel writes every scaled gradient back; this one does not, and so moves 28 bytes per parameter instead of 32.
Each expression is rounded where torch's is: multiply-adds are fused where torch's source or compiler fuses them (as in
the machine code of torch 2.11 for sm_90) and nowhere else (`enable_fp_fusion`), and division and square root are
correctly rounded. torch computes the powers of the betas: Triton's library has a different algorithm for them.

A tile is [BLOCK] values of one parameter. A program processes TILES adjacent ones, since looking up addresses and the
rate costs as much as some of the values. Weight, gradient and both moments are loaded before anything is stored, and
each is stored once.

Parameters are found through a table with one column each: addresses of weight, gradient, both moments and counter, the
number of values (0 if there is nothing to do), and the address of a bf16 weight's low half (half_weights.py). Every
address is a multiple of 16 bytes. Moments are fp32; weights and gradients are fp32 or bf16, the same for a whole group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfstep.step.optim.half_weights_triton import NEAREST, load_weight, store_weight

BLOCK, TILES, WARPS = 1024, 4, 4
"""Eight values per thread at a time, in accesses of 16 bytes; tiles of a program, which looks its addresses up once."""

COUNTED = 256  # counters per program

GRADIENT, FIRST, SECOND, COUNTER, LENGTH, LOW, FIELDS = 1, 2, 3, 4, 5, 6, 7  # rows of the table; the weight's is 0


@triton.jit
def _address(table, field, column, columns, dtype: tl.constexpr):
    pointer = tl.load(table + field * columns + column).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16)


@triton.jit(do_not_specialize_on_alignment=["bad"])
def _count(table, counts, bad, columns, COUNTER: tl.constexpr, LENGTH: tl.constexpr, COUNTED: tl.constexpr):
    """Count a good step of each parameter, in its own counter and in one vector for all."""
    if tl.load(bad) == 0:
        column = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
        is_updated = tl.load(table + LENGTH * columns + column, column < columns, 0) > 0
        counter = tl.load(table + COUNTER * columns + column, is_updated, 0).to(tl.pointer_type(tl.float32))
        count = tl.load(counter, is_updated, 0.0) + 1.0
        tl.store(counter, count, is_updated)
        tl.store(counts + column, count, is_updated)


@triton.jit
def _update_tile(
    weight, low, gradient, first, second, at, inside, key, scale, lr, size, root, beta1, beta2, eps, decay,
    DECAYS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    theta = load_weight(weight, low, inside, HOW)
    g = tl.div_rn(tl.load(gradient, inside).to(tl.float32), scale)
    if DECAYS:
        theta = tl.fma(-(lr * decay), theta, theta)
    m = tl.fma(beta1, tl.load(first, inside), tl.fma(-beta1, g, g))
    square = g * g
    v = tl.fma(beta2, tl.load(second, inside), tl.fma(-beta2, square, square))
    theta -= tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    store_weight(weight, low, theta, at, key, inside, HOW)
    tl.store(first, m, inside)
    tl.store(second, v, inside)


@triton.jit(do_not_specialize_on_alignment=["rate", "factor", "bad"])
def _update(
    table, chunks, powers, keys, rate, factor, bad, beta1, beta2, eps, decay, columns,
    DECAYS: tl.constexpr, HOW: tl.constexpr, WEIGHT_TYPE: tl.constexpr, GRADIENT_TYPE: tl.constexpr,
    GRADIENT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, LENGTH: tl.constexpr, LOW: tl.constexpr,
    BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update the values of one program's tiles; does nothing in a bad step.

    Reads weight, gradient and moments (16 bytes per value; 14 if split), writes weight and moments (12).
    """
    column = tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (BLOCK * TILES)
    length = tl.load(table + LENGTH * columns + column)
    if (tl.load(bad) == 0) & (start < length):
        weight = _address(table, 0, column, columns, WEIGHT_TYPE)
        low = _address(table, LOW, column, columns, tl.int16)
        gradient = _address(table, GRADIENT, column, columns, GRADIENT_TYPE)
        first = _address(table, FIRST, column, columns, tl.float32)
        second = _address(table, SECOND, column, columns, tl.float32)
        lr, scale = tl.load(rate), tl.div_rn(1.0, tl.load(factor))
        size = tl.div_rn(lr, 1.0 - tl.load(powers + column))
        root = tl.sqrt_rn(1.0 - tl.load(powers + columns + column))
        # A mask that may end anywhere would make every access one of 4 bytes, so only a parameter's end has one.
        if start + BLOCK * TILES <= length:
            for tile in range(TILES):
                at = start + tile * BLOCK + tl.arange(0, BLOCK)
                _update_tile(
                    weight + at, low + at, gradient + at, first + at, second + at, at, None, keys + column,
                    scale, lr, size, root, beta1, beta2, eps, decay, DECAYS, HOW,
                )  # fmt: skip
        else:
            for tile in range(TILES):
                at = start + tile * BLOCK + tl.arange(0, BLOCK)
                _update_tile(
                    weight + at, low + at, gradient + at, first + at, second + at, at, at < length, keys + column,
                    scale, lr, size, root, beta1, beta2, eps, decay, DECAYS, HOW,
                )  # fmt: skip


def count(table: Tensor, counts: Tensor, bad: Tensor) -> None:
    """Count a good step of all parameters in `table`."""
    columns = table.shape[1]
    _count[(triton.cdiv(columns, COUNTED),)](
        table, counts, bad, columns, COUNTER=COUNTER, LENGTH=LENGTH, COUNTED=COUNTED
    )


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def update(
    table: Tensor, chunks: Tensor, powers: Tensor, rate: Tensor, factor: Tensor, bad: Tensor, *,
    betas: tuple[float, float], eps: float, weight_decay: float,
    how: int = NEAREST, keys: Tensor | None = None,
    weight_type: torch.dtype = torch.float32, gradient_type: torch.dtype = torch.float32,
    block: int = BLOCK, tiles: int = TILES, warps: int = WARPS,
) -> None:  # fmt: skip
    """Make one step of all parameters in `table`, with gradients times `factor`.

    `chunks` assigns slices of parameters to programs, `powers` are both betas to the power of each parameter's step
    count, and `keys` seed the stochastic rounding of weights.
    """
    _update[(len(chunks),)](
        table, chunks, powers, table if keys is None else keys, rate, factor, bad, *betas, eps, weight_decay,
        table.shape[1],
        DECAYS=weight_decay != 0, HOW=how, WEIGHT_TYPE=TYPES[weight_type], GRADIENT_TYPE=TYPES[gradient_type],
        GRADIENT=GRADIENT, FIRST=FIRST, SECOND=SECOND, LENGTH=LENGTH, LOW=LOW,
        BLOCK=block, TILES=tiles, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
