"""bf16 weights inside a Triton kernel, bit-identical to half_weights.py.

Works on tiles of any shape, element-wise: `weights` and `low` are tiles of addresses, `positions` the indices of the
values in their parameter, from which the random bits of stochastic rounding are hashed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfstep.step.optim import half_weights

NEAREST, SPLIT, STOCHASTIC = 0, 1, 2  # how a kernel stores a weight; the first is also used for fp32
IS_SPLIT: tl.constexpr = tl.constexpr(SPLIT)
IS_STOCHASTIC: tl.constexpr = tl.constexpr(STOCHASTIC)
HALF: tl.constexpr = tl.constexpr(half_weights.HALF)
FIRST: tl.constexpr = tl.constexpr(half_weights.FIRST)
SECOND: tl.constexpr = tl.constexpr(half_weights.SECOND)


@triton.jit
def hash_bits(bits):
    """Return a 32-bit hash of uint32 numbers, whose products wrap around."""
    bits = (bits ^ (bits >> 16)) * tl.full([], FIRST, tl.uint32)
    bits = (bits ^ (bits >> 15)) * tl.full([], SECOND, tl.uint32)
    return bits ^ (bits >> 16)


@triton.jit
def load_weight(weights, low, inside, HOW: tl.constexpr):
    """Load fp32 values; `low` is read if weights are split."""
    if HOW == IS_SPLIT:
        high = tl.load(weights, inside).to(tl.int16, bitcast=True).to(tl.int32)
        return ((high << 16) + tl.load(low, inside).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        return tl.load(weights, inside).to(tl.float32)


@triton.jit
def store_weight(weights, low, values, positions, key, inside, HOW: tl.constexpr):
    """Store weights; `key` points to the result of `half_weights.make_key`."""
    if HOW == IS_SPLIT:
        bits = values.to(tl.int32, bitcast=True)
        high = (bits + HALF) >> 16
        tl.store(weights, high.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
        tl.store(low, (bits - (high << 16)).to(tl.int16), inside)
    elif HOW == IS_STOCHASTIC:
        noise = hash_bits(positions.to(tl.uint32) + tl.load(key).to(tl.uint32)) & 0xFFFF
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + noise.to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        is_finite = (bits & 0x7F800000) != 0x7F800000
        tl.store(weights, tl.where(is_finite, rounded, values.to(tl.bfloat16)), inside)
    else:
        tl.store(weights, values.to(weights.dtype.element_ty), inside)
