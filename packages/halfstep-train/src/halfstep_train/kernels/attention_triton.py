"""Gradients of attention over few tokens in Triton, read and written in the packed layout of the matmuls around it.

qkv is [batch, tokens, 3 · dim], out [batch, tokens, dim] with dim = heads · HEAD. With S the scaled scores of a head:

    P = softmax(S), out = P·V, delta = Σ d_out·out over channels, dS = P·(d_out·Vᵀ - delta)
    dV = Pᵀ·d_out, dQ = dS·K·scale, dK = dSᵀ·Q·scale

Tiles: k, v, dk and dv are [KEYS, HEAD] and stay in registers for the whole program. q, out and d_out are loaded as
[QUERIES, HEAD], one tile after the other. Scores, P, dP and dS are [KEYS, QUERIES], so that dV and dK are products
without a transposed operand. Queries are the inner loop because gradients of keys and values are sums over all queries:
they are stored once, at the end, while a query's gradient is complete after its tile and is stored at once.

P is recomputed from the log-sum-exp of each row. One program holds the gradients of all (few) keys of a head, so no
atomic additions are needed, and results are bit-identical in every run. Gradients are written where the next matmul
reads them, together with partial sums over tokens for the gradient of the projection's bias. Σ dK is 0, because each
row of dS sums to 0 (adding a constant to a row of scores does not change its softmax).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_KEYS, QUERIES, WARPS, STAGES = 128, 32, 8, 2
"""A program holds one or two tiles of keys, and goes through tiles of queries."""
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def _locate_rows(first, row_stride, num_tokens, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Return addresses of the channels of some tokens, and a mask of tokens that exist, [ROWS, 1]."""
    tokens = (first + tl.arange(0, ROWS))[:, None]
    return tokens * row_stride + tl.arange(0, HEAD)[None, :], tokens < num_tokens


@triton.jit
def _compute_weights(scores, dp, factor, log_sum, delta, is_key, dtype: tl.constexpr):
    """Return P = exp2(scores·factor - log_sum) and dS = P·(dP - delta), masked to keys that exist."""
    # Missing keys were loaded as 0. Their score is 0, of which exp2 is not 0, so they are masked here.
    p = tl.where(is_key, tl.exp2(scores * factor - log_sum), 0.0)
    # Both are operands of matmuls next: rounded to the format of qkv only after the fp32 arithmetic.
    return p.to(dtype), (p * (dp - delta)).to(dtype)


@triton.jit
def _attention_gradients(
    qkv, out, log_sum, d_out, d_qkv, partials, num_tokens, dim, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TWICE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one head's gradients in one program, which holds KEYS keys, or twice as many if TWICE.

    Reads five values per element and writes three.
    """
    # Program p computes head p % num_heads of sequence p // num_heads. The sequence index is int64, since offsets of
    # qkv can exceed 32 bits.
    num_heads = dim // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    qkv += batch * num_tokens * 3 * dim + head * HEAD
    d_qkv += batch * num_tokens * 3 * dim + head * HEAD
    out += batch * num_tokens * dim + head * HEAD
    d_out += batch * num_tokens * dim + head * HEAD
    log_sum += tl.program_id(0) * num_tokens
    dtype = qkv.dtype.element_ty
    # Loaded once and kept: all keys and values of the head, and their gradients as sums.
    key_places, is_key = _locate_rows(0, 3 * dim, num_tokens, KEYS, HEAD)
    k = tl.load(qkv + dim + key_places, is_key, 0.0)
    v = tl.load(qkv + 2 * dim + key_places, is_key, 0.0)
    dk = tl.zeros([KEYS, HEAD], tl.float32)
    dv = tl.zeros([KEYS, HEAD], tl.float32)
    # A tile has at most MOST_KEYS keys: with more tokens the program holds a second one.
    if TWICE:
        more_places, is_more = _locate_rows(KEYS, 3 * dim, num_tokens, KEYS, HEAD)
        more_k = tl.load(qkv + dim + more_places, is_more, 0.0)
        more_v = tl.load(qkv + 2 * dim + more_places, is_more, 0.0)
        more_dk = tl.zeros([KEYS, HEAD], tl.float32)
        more_dv = tl.zeros([KEYS, HEAD], tl.float32)
    # The gradient of the bias needs Σ dQ over tokens. It is kept as a tile, whose columns are summed once at the end.
    sum_dq = tl.zeros([HEAD, QUERIES], tl.float32)
    for tile in tl.range(0, tl.cdiv(num_tokens, QUERIES), num_stages=STAGES):
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        places, exists = _locate_rows(tile * QUERIES, 3 * dim, num_tokens, QUERIES, HEAD)
        out_places, _ = _locate_rows(tile * QUERIES, dim, num_tokens, QUERIES, HEAD)
        q = tl.load(qkv + places, exists, 0.0)
        do = tl.load(d_out + out_places, exists, 0.0)
        o = tl.load(out + out_places, exists, 0.0)
        # Both products before the softmax: they depend on loads alone, and run while log_sum and delta arrive.
        scores = tl.dot(k, tl.trans(q))
        dp = tl.dot(v, tl.trans(do))
        # exp2(-inf) = 0: P is 0 for queries past the end.
        ls = tl.load(log_sum + queries, queries < num_tokens, float("inf"))[None, :] * LOG2_E
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)[None, :]
        # exp(x) = exp2(x·log2(e)): the factor is folded into the scale here and into `ls` above.
        p, ds = _compute_weights(scores, dp, scale * LOG2_E, ls, delta, is_key, dtype)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
        # Transposed: a matmul tile has at least 64 rows, and there are fewer queries than that.
        dq = tl.dot(tl.trans(k), ds) * scale
        if TWICE:
            scores = tl.dot(more_k, tl.trans(q))
            dp = tl.dot(more_v, tl.trans(do))
            p, ds = _compute_weights(scores, dp, scale * LOG2_E, ls, delta, is_more, dtype)
            more_dv = tl.dot(p, do, more_dv)
            more_dk = tl.dot(ds, q, more_dk)
            # Not accumulated by the matmul: the compiler splits two consecutive ones between halves of the warps.
            dq += tl.dot(tl.trans(more_k), ds) * scale
        sum_dq += dq
        tl.store(d_qkv + places, tl.trans(dq).to(dtype), exists)
    tl.store(d_qkv + dim + key_places, (dk * scale).to(dtype), is_key)
    tl.store(d_qkv + 2 * dim + key_places, dv.to(dtype), is_key)
    sum_dv = tl.sum(dv, 0)
    if TWICE:
        tl.store(d_qkv + dim + more_places, (more_dk * scale).to(dtype), is_more)
        tl.store(d_qkv + 2 * dim + more_places, more_dv.to(dtype), is_more)
        sum_dv += tl.sum(more_dv, 0)
    _store_sums(partials + batch * 3 * dim + head * HEAD, dim, tl.sum(sum_dq, 1), sum_dv, HEAD)


@triton.jit
def _store_sums(place, dim, of_queries, of_values, HEAD: tl.constexpr):
    """Store one head's part of the gradient of the bias: Σ dQ, 0 for keys, Σ dV."""
    place += tl.arange(0, HEAD)
    tl.store(place, of_queries)
    # Σ dK is 0 in exact arithmetic (see the module docstring), so it is not computed.
    tl.store(place + dim, tl.zeros([HEAD], tl.float32))
    tl.store(place + 2 * dim, of_values)


def attention_backward(d_out: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of qkv, and partial sums of it over tokens, [batch, 3 · dim].

    out and d_out are [batch, tokens, dim]; log_sum is the natural log-sum-exp of each row, [batch, heads, tokens].
    """
    (batch, num_heads, num_tokens), dim = log_sum.shape, out.shape[2]
    d_qkv, partials = torch.empty_like(qkv), log_sum.new_empty(batch, 3 * dim)
    # tl.arange needs a power of two, tl.dot at least 16 rows.
    head, keys = dim // num_heads, max(16, min(MOST_KEYS, triton.next_power_of_2(num_tokens)))
    _attention_gradients[(batch * num_heads,)](
        qkv, out, log_sum, d_out.contiguous(), d_qkv, partials, num_tokens, dim, head**-0.5,
        HEAD=head, QUERIES=QUERIES, KEYS=keys, TWICE=num_tokens > keys, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return d_qkv, partials
