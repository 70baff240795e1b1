"""Attention over few tokens in Triton, from packed queries, keys and values to rows of heads side by side, and back.

qkv is [batch, tokens, 3 · dim], out [batch, tokens, dim] with dim = heads · HEAD. With S the scaled scores of a head:

    P = softmax(S), out = P·V, delta = Σ d_out·out over channels, dS = P·(d_out·Vᵀ - delta)
    dV = Pᵀ·d_out, dQ = dS·K·scale, dK = dSᵀ·Q·scale

P is made again from the logarithm of each row's sum. All keys of a head are few, so forward has whole rows at hand and
backward needs no atomic additions: a run gives the same bits every time. Gradients are written where the matmul behind
reads them, with parts of their sums over tokens, the gradient of the projection's bias: Σ dV is Σ d_out, as each row
of P sums to 1, and whichever is at hand is summed up; Σ dK is 0, as each row of dS sums to 0 (the same number added to
all scores of a row changes no softmax).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

FORWARD_QUERIES, FORWARD_WARPS, FORWARD_PROGRAMS = 64, 4, 2
"""Tile, and programs for a head."""
BACKWARD_AT_ONCE = True
"""Whether one program makes all gradients of a head, in 5 matmuls; or two kernels make those of queries, then those of
keys and values, in 7 matmuls, by smaller programs."""
AT_ONCE_QUERIES, AT_ONCE_WARPS, AT_ONCE_STAGES = 32, 8, 2
QUERIES_TILE, QUERIES_WARPS, QUERIES_STAGES = (64, 64), 4, 2
"""Queries and keys of a tile, for the gradient of queries."""
KEYS_TILE, KEYS_WARPS, KEYS_STAGES = (64, 32), 4, 2
"""Keys and queries of a tile, for the gradients of keys and values."""
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def _rows(first, row_stride, num_tokens, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Where channels of some tokens are, and which tokens exist, [ROWS, 1]."""
    tokens = (first + tl.arange(0, ROWS))[:, None]
    return tokens * row_stride + tl.arange(0, HEAD)[None, :], tokens < num_tokens


@triton.jit
def _attention(
    qkv, out, log_sum, num_tokens, dim, scale, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr
):
    """A head by a row of programs, each with every n-th tile of queries: reads three values, writes one."""
    num_heads = dim // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    qkv += batch * num_tokens * 3 * dim + head * HEAD
    out += batch * num_tokens * dim + head * HEAD
    log_sum += tl.program_id(0) * num_tokens
    key_places, key_exists = _rows(0, 3 * dim, num_tokens, KEYS, HEAD)
    k = tl.load(qkv + dim + key_places, key_exists, 0.0)
    v = tl.load(qkv + 2 * dim + key_places, key_exists, 0.0)
    is_key = (tl.arange(0, KEYS) < num_tokens)[None, :]
    for tile in tl.range(tl.program_id(1), tl.cdiv(num_tokens, QUERIES), tl.num_programs(1)):
        places, exists = _rows(tile * QUERIES, 3 * dim, num_tokens, QUERIES, HEAD)
        q = tl.load(qkv + places, exists, 0.0)
        scores = tl.where(is_key, tl.dot(q, tl.trans(k)) * (scale * LOG2_E), float("-inf"))
        highest = tl.max(scores, 1)
        p = tl.exp2(scores - highest[:, None])
        total = tl.sum(p, 1)
        result = tl.dot(p.to(v.dtype), v) / total[:, None]
        out_places, _ = _rows(tile * QUERIES, dim, num_tokens, QUERIES, HEAD)
        tl.store(out + out_places, result.to(out.dtype.element_ty), exists)
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        tl.store(log_sum + queries, (highest + tl.log2(total)) / LOG2_E, queries < num_tokens)


@triton.jit
def _weights(scores, dp, factor, log_sum, delta, is_key, dtype: tl.constexpr):
    """P = exp2(scores·factor - log_sum) and dS = P·(dP - delta), where keys exist."""
    p = tl.where(is_key, tl.exp2(scores * factor - log_sum), 0.0)
    return p.to(dtype), (p * (dp - delta)).to(dtype)


@triton.jit
def _attention_gradients(
    qkv, out, log_sum, d_out, d_qkv, partials, num_tokens, dim, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TWICE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A head by one program, which holds gradients of KEYS keys, or TWICE as many: reads five values, writes three."""
    num_heads = dim // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    qkv += batch * num_tokens * 3 * dim + head * HEAD
    d_qkv += batch * num_tokens * 3 * dim + head * HEAD
    out += batch * num_tokens * dim + head * HEAD
    d_out += batch * num_tokens * dim + head * HEAD
    log_sum += tl.program_id(0) * num_tokens
    dtype = qkv.dtype.element_ty
    key_places, is_key = _rows(0, 3 * dim, num_tokens, KEYS, HEAD)
    k = tl.load(qkv + dim + key_places, is_key, 0.0)
    v = tl.load(qkv + 2 * dim + key_places, is_key, 0.0)
    dk = tl.zeros([KEYS, HEAD], tl.float32)
    dv = tl.zeros([KEYS, HEAD], tl.float32)
    if TWICE:
        more_places, is_more = _rows(KEYS, 3 * dim, num_tokens, KEYS, HEAD)
        more_k = tl.load(qkv + dim + more_places, is_more, 0.0)
        more_v = tl.load(qkv + 2 * dim + more_places, is_more, 0.0)
        more_dk = tl.zeros([KEYS, HEAD], tl.float32)
        more_dv = tl.zeros([KEYS, HEAD], tl.float32)
    sum_dq = tl.zeros([HEAD, QUERIES], tl.float32)
    for tile in tl.range(0, tl.cdiv(num_tokens, QUERIES), num_stages=STAGES):
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        places, exists = _rows(tile * QUERIES, 3 * dim, num_tokens, QUERIES, HEAD)
        out_places, _ = _rows(tile * QUERIES, dim, num_tokens, QUERIES, HEAD)
        q = tl.load(qkv + places, exists, 0.0)
        do = tl.load(d_out + out_places, exists, 0.0)
        o = tl.load(out + out_places, exists, 0.0)
        scores = tl.dot(k, tl.trans(q))
        dp = tl.dot(v, tl.trans(do))
        # Where there is no query P becomes 0.
        ls = tl.load(log_sum + queries, queries < num_tokens, float("inf"))[None, :] * LOG2_E
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)[None, :]
        p, ds = _weights(scores, dp, scale * LOG2_E, ls, delta, is_key, dtype)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
        # Transposed: a tile of a matmul has 64 rows at least, and these are fewer queries.
        dq = tl.dot(tl.trans(k), ds) * scale
        if TWICE:
            scores = tl.dot(more_k, tl.trans(q))
            dp = tl.dot(more_v, tl.trans(do))
            p, ds = _weights(scores, dp, scale * LOG2_E, ls, delta, is_more, dtype)
            more_dv = tl.dot(p, do, more_dv)
            more_dk = tl.dot(ds, q, more_dk)
            # Not added by the matmul itself: of two in a row the compiler has one done by each half of the warps.
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
    place += tl.arange(0, HEAD)
    tl.store(place, of_queries)
    tl.store(place + dim, tl.zeros([HEAD], tl.float32))
    tl.store(place + 2 * dim, of_values)


@triton.jit
def _attention_query_gradient(
    qkv, out, log_sum, d_out, d_qkv, delta, partials, num_tokens, dim, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries, delta, and the sums: reads five values, writes one."""
    num_heads = dim // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    qkv += batch * num_tokens * 3 * dim + head * HEAD
    first = tl.program_id(1) * QUERIES
    queries = first + tl.arange(0, QUERIES)
    statistics = tl.program_id(0) * num_tokens + queries
    places, exists = _rows(first, 3 * dim, num_tokens, QUERIES, HEAD)
    out_places, _ = _rows(first, dim, num_tokens, QUERIES, HEAD)
    out_places += batch * num_tokens * dim + head * HEAD
    q = tl.load(qkv + places, exists, 0.0)
    do = tl.load(d_out + out_places, exists, 0.0)
    o = tl.load(out + out_places, exists, 0.0)
    ls = tl.load(log_sum + statistics, queries < num_tokens, float("inf"))[:, None] * LOG2_E
    along = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + statistics, along, queries < num_tokens)
    dq = tl.zeros([QUERIES, HEAD], tl.float32)
    for tile in tl.range(0, tl.cdiv(num_tokens, KEYS), num_stages=STAGES):
        key_places, key_exists = _rows(tile * KEYS, 3 * dim, num_tokens, KEYS, HEAD)
        k = tl.load(qkv + dim + key_places, key_exists, 0.0)
        v = tl.load(qkv + 2 * dim + key_places, key_exists, 0.0)
        is_key = (tile * KEYS + tl.arange(0, KEYS) < num_tokens)[None, :]
        scores = tl.dot(q, tl.trans(k))
        dp = tl.dot(do, tl.trans(v))
        p, ds = _weights(scores, dp, scale * LOG2_E, ls, along[:, None], is_key, k.dtype)
        dq = tl.dot(ds, k, dq)
    dq *= scale
    tl.store(d_qkv + batch * num_tokens * 3 * dim + head * HEAD + places, dq.to(d_qkv.dtype.element_ty), exists)
    part = batch * tl.num_programs(1) + tl.program_id(1)
    sum_d_out = tl.sum(do.to(tl.float32), 0)
    _store_sums(partials + part * 3 * dim + head * HEAD, dim, tl.sum(dq, 0), sum_d_out, HEAD)


@triton.jit
def _attention_key_gradients(
    qkv, log_sum, d_out, delta, d_qkv, num_tokens, dim, scale,
    HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys: reads four values, writes two."""
    num_heads = dim // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    qkv += batch * num_tokens * 3 * dim + head * HEAD
    d_qkv += batch * num_tokens * 3 * dim + head * HEAD
    d_out += batch * num_tokens * dim + head * HEAD
    log_sum += tl.program_id(0) * num_tokens
    delta += tl.program_id(0) * num_tokens
    dtype = qkv.dtype.element_ty
    key_places, is_key = _rows(tl.program_id(1) * KEYS, 3 * dim, num_tokens, KEYS, HEAD)
    k = tl.load(qkv + dim + key_places, is_key, 0.0)
    v = tl.load(qkv + 2 * dim + key_places, is_key, 0.0)
    dk = tl.zeros([KEYS, HEAD], tl.float32)
    dv = tl.zeros([KEYS, HEAD], tl.float32)
    for tile in tl.range(0, tl.cdiv(num_tokens, QUERIES), num_stages=STAGES):
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        places, exists = _rows(tile * QUERIES, 3 * dim, num_tokens, QUERIES, HEAD)
        out_places, _ = _rows(tile * QUERIES, dim, num_tokens, QUERIES, HEAD)
        q = tl.load(qkv + places, exists, 0.0)
        do = tl.load(d_out + out_places, exists, 0.0)
        scores = tl.dot(k, tl.trans(q))
        dp = tl.dot(v, tl.trans(do))
        ls = tl.load(log_sum + queries, queries < num_tokens, float("inf"))[None, :] * LOG2_E
        along = tl.load(delta + queries, queries < num_tokens, 0.0)[None, :]
        p, ds = _weights(scores, dp, scale * LOG2_E, ls, along, is_key, dtype)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
    tl.store(d_qkv + dim + key_places, (dk * scale).to(dtype), is_key)
    tl.store(d_qkv + 2 * dim + key_places, dv.to(dtype), is_key)


def attention(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Attention's output [batch, tokens, dim], and the logarithm of each row's sum, [batch, heads, tokens]."""
    batch, num_tokens, dim = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = qkv.new_empty(batch, num_tokens, dim)
    log_sum = qkv.new_empty(batch, num_heads, num_tokens, dtype=torch.float32)
    head, keys = dim // num_heads, max(16, triton.next_power_of_2(num_tokens))
    _attention[(batch * num_heads, min(FORWARD_PROGRAMS, triton.cdiv(num_tokens, FORWARD_QUERIES)))](
        qkv, out, log_sum, num_tokens, dim, head**-0.5,
        HEAD=head, QUERIES=FORWARD_QUERIES, KEYS=keys, num_warps=FORWARD_WARPS,
    )  # fmt: skip
    return out, log_sum


def attention_backward(d_out: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and parts of its sum over tokens, [parts, 3 · dim]."""
    backward = _backward_at_once if BACKWARD_AT_ONCE else _backward_by_two
    return backward(d_out.contiguous(), qkv, out, log_sum)


def _backward_at_once(d_out: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    (batch, num_heads, num_tokens), dim = log_sum.shape, out.shape[2]
    d_qkv, partials = torch.empty_like(qkv), log_sum.new_empty(batch, 3 * dim)
    keys, head = max(16, min(128, triton.next_power_of_2(num_tokens))), dim // num_heads
    _attention_gradients[(batch * num_heads,)](
        qkv, out, log_sum, d_out, d_qkv, partials, num_tokens, dim, head**-0.5,
        HEAD=head, QUERIES=AT_ONCE_QUERIES, KEYS=keys, TWICE=num_tokens > keys,
        STAGES=AT_ONCE_STAGES, num_warps=AT_ONCE_WARPS,
    )  # fmt: skip
    return d_qkv, partials


def _backward_by_two(d_out: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    (batch, num_heads, num_tokens), dim = log_sum.shape, out.shape[2]
    head, delta, d_qkv = dim // num_heads, torch.empty_like(log_sum), torch.empty_like(qkv)
    queries, keys = QUERIES_TILE
    num_tiles = triton.cdiv(num_tokens, queries)
    partials = log_sum.new_empty(batch * num_tiles, 3 * dim)
    _attention_query_gradient[(batch * num_heads, num_tiles)](
        qkv, out, log_sum, d_out, d_qkv, delta, partials, num_tokens, dim, head**-0.5,
        HEAD=head, QUERIES=queries, KEYS=keys, STAGES=QUERIES_STAGES, num_warps=QUERIES_WARPS,
    )  # fmt: skip
    keys, queries = KEYS_TILE
    _attention_key_gradients[(batch * num_heads, triton.cdiv(num_tokens, keys))](
        qkv, log_sum, d_out, delta, d_qkv, num_tokens, dim, head**-0.5,
        HEAD=head, QUERIES=queries, KEYS=keys, STAGES=KEYS_STAGES, num_warps=KEYS_WARPS,
    )  # fmt: skip
    return d_qkv, partials
