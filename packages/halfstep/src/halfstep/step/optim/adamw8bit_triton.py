"""AdamW on one-byte moments in one pass, bit-identical to `adamw8bit.update`.

The twin rounds after every operation, so the kernel does too: division and square root are correctly rounded, and
nothing is contracted into fused multiply-adds (`enable_fp_fusion`).

A tile is [ROWS, COLUMNS]: a row is one block of 256 values that share a scale, so one program finds the new scale, the
largest magnitude of a row. Moments are decoded, updated and applied to the weight before they are encoded again: the
weight sees them unrounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from halfstep.step.optim.adamw_bf16 import LOW, MOMENTS, Setting
from halfstep.step.optim.codes import BLOCK, SIGNED, SMALLEST_SCALE, UNSIGNED
from halfstep.step.optim.half_weights_triton import NEAREST, SPLIT, STOCHASTIC, load_weight, store_weight

ROWS, WARPS = 8, 4
"""Blocks of 256 of a program: sixteen values per thread, so that codes, too, are read in sixteen bytes."""


@triton.jit
def _decode(codes, scale, table, inside):
    """Decode blocks of a moment from one-byte codes and one scale per block."""
    return tl.load(table + tl.load(codes, inside, 0).to(tl.int32)) * scale[:, None]


@triton.jit
def _rank_magnitudes(magnitudes, LEVELS: tl.constexpr):
    """Return the rank of the nearest value in the table's upper half, as `codes.rank_magnitudes` does."""
    slope = tl.zeros_like(magnitudes)
    offset = tl.zeros_like(magnitudes)
    last = tl.zeros_like(magnitudes)
    for k in tl.static_range(len(LEVELS)):
        reached = magnitudes >= LEVELS[k][0]
        slope = tl.where(reached, LEVELS[k][1], slope)
        offset = tl.where(reached, LEVELS[k][2], offset)
        last = tl.where(reached, LEVELS[k][3], last)
    return tl.minimum(magnitudes * slope + offset, last).to(tl.int32)


@triton.jit
def _encode(moment, SMALLEST: tl.constexpr, LEVELS: tl.constexpr, IS_SIGNED: tl.constexpr):
    """Encode blocks of a moment; return codes and one scale per block."""
    largest = tl.maximum(tl.max(tl.abs(moment), 1), SMALLEST)
    values = moment * tl.div_rn(1.0, largest)[:, None]
    if IS_SIGNED:
        ranks = _rank_magnitudes(tl.abs(values), LEVELS)
        ranks = tl.where(values < 0, tl.maximum(127 - ranks, 0), 127 + ranks)
    else:
        ranks = _rank_magnitudes(values, LEVELS)
    return ranks.to(tl.uint8), largest


@triton.jit
def _update(
    weights, low, key, gradients, grad_scale,
    first_codes, first_scale, first_table, second_codes, second_scale, second_table,
    rate, found_inf, first_correction, second_correction,
    first_share, second_share, eps, weight_decay, num_blocks,
    IS_SCALED: tl.constexpr, LEVELS: tl.constexpr, UNSIGNED_LEVELS: tl.constexpr, SMALLEST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HOW: tl.constexpr,
):  # fmt: skip
    """Update one tile of weights; does nothing if the step is bad.

    Reads weight, gradient and two codes (10 bytes per value in fp32, 8 with split bf16), writes weight and codes (6
    bytes), and the gradient if it is scaled.
    """
    if tl.load(found_inf) == 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        is_row = row < num_blocks
        at = tl.cast(row, tl.int64)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = is_row[:, None]
        theta = load_weight(weights + at, low + at, inside, HOW)
        g = tl.load(gradients + at, inside, 0.0).to(tl.float32)
        if IS_SCALED:
            g = tl.div_rn(g, tl.load(grad_scale))
            tl.store(gradients + at, g.to(gradients.dtype.element_ty), inside)
        first = _decode(first_codes + at, tl.load(first_scale + row, is_row, 0.0), first_table, inside)
        first += (g - first) * first_share
        second = _decode(second_codes + at, tl.load(second_scale + row, is_row, 0.0), second_table, inside)
        second += (g * g - second) * second_share
        lr = tl.load(rate)
        theta -= lr * weight_decay * theta
        size = tl.div_rn(lr, tl.load(first_correction))
        root = tl.sqrt_rn(tl.load(second_correction))
        denominator = tl.sqrt_rn(second) * tl.div_rn(1.0, root) + eps
        theta -= tl.div_rn(size * first, denominator)
        store_weight(weights + at, low + at, theta, at, key, inside, HOW)
        codes, largest = _encode(first, SMALLEST, LEVELS, True)
        tl.store(first_codes + at, codes, inside)
        tl.store(first_scale + row, largest, is_row)
        codes, largest = _encode(second, SMALLEST, UNSIGNED_LEVELS, False)
        tl.store(second_codes + at, codes, inside)
        tl.store(second_scale + row, largest, is_row)


def update(
    weights: Tensor,
    gradients: Tensor,
    state: dict[str, Tensor],
    corrections: Sequence[Tensor],
    setting: Setting,
    key: Tensor | None = None,
) -> None:
    """Update one vector in one launch; `key` seeds the stochastic rounding of weights."""
    num_blocks = weights.numel() // BLOCK
    moments = [state[f"{name}_{part}"] for name in MOMENTS for part in ("codes", "scale", "table")]
    _update[(triton.cdiv(num_blocks, ROWS),)](
        weights, state.get(LOW, weights), weights if key is None else key, gradients, setting.grad_scale,
        *moments, setting.lr, setting.found_inf, *corrections,
        1 - setting.betas[0], 1 - setting.betas[1], setting.eps, setting.weight_decay, num_blocks,
        IS_SCALED=setting.grad_scale is not None, LEVELS=SIGNED, UNSIGNED_LEVELS=UNSIGNED, SMALLEST=SMALLEST_SCALE,
        ROWS=ROWS, COLUMNS=BLOCK, HOW=SPLIT if LOW in state else NEAREST if key is None else STOCHASTIC,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
