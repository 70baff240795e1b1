"""Attention's gradients over few tokens in Triton, from rows of heads side by side to packed queries, keys and values.

qkv is [batch, tokens, 3 · dim], out [batch, tokens, dim] with dim = heads · HEAD. With S the scaled scores of a head:

    P = softmax(S), out = P·V, delta = Σ d_out·out over channels, dS = P·(d_out·Vᵀ - delta)
    dV = Pᵀ·d_out, dQ = dS·K·scale, dK = dSᵀ·Q·scale

P is made again from the logarithm of each row's sum. The keys of a head are few, so that no atomic additions are
needed: a run gives the same bits every time. Gradients are written where the matmul behind reads them, with parts of
their sums over tokens, the gradient of the projection's bias: Σ dK is 0, as each row of dS sums to 0 (the same number
added to all scores of a row changes no softmax).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

VARIANT = "whole"
"""Who makes the gradients of a head: one program with all keys at once ("whole"), one with a block of keys after the
other, whose gradient of queries waits in memory, in fp32, for the next block ("blocks"), or a program for each block of
keys, and a kernel that adds up their gradients of queries ("apart")."""
WHOLE_QUERIES, WHOLE_WARPS, WHOLE_STAGES = 32, 8, 2
BLOCK_KEYS, BLOCK_QUERIES, BLOCK_WARPS, BLOCK_STAGES, BLOCK_REGISTERS = 64, 32, 4, 2, 168
"""168 registers a thread are few enough for three programs of 4 warps on a multiprocessor."""
SUM_VALUES = 2048
LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def _rows(first, row_stride, num_tokens, ROWS: tl.constexpr, HEAD: tl.constexpr):
    """Where channels of some tokens are, and which tokens exist, [ROWS, 1]."""
    tokens = (first + tl.arange(0, ROWS))[:, None]
    return tokens * row_stride + tl.arange(0, HEAD)[None, :], tokens < num_tokens


@triton.jit
def _weights(scores, dp, factor, log_sum, delta, is_key):
    """P = exp2(scores·factor - log_sum) and dS = P·(dP - delta), where keys exist."""
    p = tl.where(is_key, tl.exp2(scores * factor - log_sum), 0.0)
    return p, p * (dp - delta)


@triton.jit
def _attention_gradients_by_blocks(
    q_tiles, kv_tiles, out_tiles, d_out_tiles, d_kv_tiles, log_sum, d_qkv, delta, dq_parts, partials, scale,
    TOKENS: tl.constexpr, DIM: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    APART: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A head by one program, a block of keys after the other; or by a program for each block, if they are APART."""
    num_heads = DIM // HEAD
    batch, head = (tl.program_id(0) // num_heads).to(tl.int64), tl.program_id(0) % num_heads
    num_batches = tl.num_programs(0) // num_heads
    last = tl.cdiv(TOKENS, KEYS) - 1
    place_in_tile = tl.arange(0, HEAD)[:, None] * QUERIES + tl.arange(0, QUERIES)[None, :]
    at, channel = batch.to(tl.int32), head * HEAD
    d_qkv += batch * TOKENS * 3 * DIM + channel
    log_sum += tl.program_id(0) * TOKENS
    dtype = d_qkv.dtype.element_ty
    delta += tl.program_id(0) * TOKENS
    for tile in tl.range(0, tl.cdiv(TOKENS, QUERIES), num_stages=3):
        do = d_out_tiles.load([at, tile * QUERIES, channel]).reshape(QUERIES, HEAD).to(tl.float32)
        o = out_tiles.load([at, tile * QUERIES, channel]).reshape(QUERIES, HEAD).to(tl.float32)
        queries = tile * QUERIES + tl.arange(0, QUERIES)
        tl.store(delta + queries, tl.sum(do * o, 1), queries < TOKENS)
    tl.debug_barrier()  # what some warps wrote others read
    for block in tl.range(tl.program_id(1), tl.cdiv(TOKENS, KEYS), tl.num_programs(1)):
        is_key = (block * KEYS + tl.arange(0, KEYS) < TOKENS)[:, None]
        k = kv_tiles.load([at, block * KEYS, DIM + channel]).reshape(KEYS, HEAD)
        v = kv_tiles.load([at, block * KEYS, 2 * DIM + channel]).reshape(KEYS, HEAD)
        dk = tl.zeros([KEYS, HEAD], tl.float32)
        dv = tl.zeros([KEYS, HEAD], tl.float32)
        sum_ds = tl.zeros([KEYS], tl.float32)
        if APART:
            dq_part = dq_parts + (block * num_batches + batch) * TOKENS * DIM + channel
        else:
            tl.debug_barrier()  # the gradient of queries written in the last round is read in this one
        for tile in tl.range(0, tl.cdiv(TOKENS, QUERIES), num_stages=STAGES):
            queries = tile * QUERIES + tl.arange(0, QUERIES)
            places, exists = _rows(tile * QUERIES, 3 * DIM, TOKENS, QUERIES, HEAD)
            out_places, _ = _rows(tile * QUERIES, DIM, TOKENS, QUERIES, HEAD)
            q = q_tiles.load([at, tile * QUERIES, channel]).reshape(QUERIES, HEAD)
            do = d_out_tiles.load([at, tile * QUERIES, channel]).reshape(QUERIES, HEAD)
            scores = tl.dot(k, tl.trans(q))
            dp = tl.dot(v, tl.trans(do))
            # Where there is no query P becomes 0.
            ls = tl.load(log_sum + queries, queries < TOKENS, float("inf"))[None, :] * LOG2_E
            along = tl.load(delta + queries, queries < TOKENS, 0.0)[None, :]
            p, ds = _weights(scores, dp, scale * LOG2_E, ls, along, is_key)
            sum_ds += tl.sum(ds, 1)
            ds = ds.to(dtype)
            dv = tl.dot(p.to(dtype), do, dv)
            dk = tl.dot(ds, q, dk)
            # Transposed: a tile of a matmul has 64 rows at least, and these can be fewer queries.
            dq = tl.dot(tl.trans(k), ds) * scale
            if APART:
                tl.store(dq_part + out_places, tl.trans(dq).to(dtype), exists)
            else:
                so_far = dq_parts + (tl.program_id(0) * tl.cdiv(TOKENS, QUERIES) + tile).to(tl.int64) * QUERIES * HEAD
                if block > 0:
                    dq += tl.load(so_far + place_in_tile)
                if block < last:
                    tl.store(so_far + place_in_tile, dq)
                else:
                    tl.store(d_qkv + places, tl.trans(dq).to(dtype), exists)
        d_kv_tiles.store([at, block * KEYS, DIM + channel], (dk * scale).to(dtype).reshape(1, KEYS, HEAD))
        d_kv_tiles.store([at, block * KEYS, 2 * DIM + channel], dv.to(dtype).reshape(1, KEYS, HEAD))
        # Once more, as registers are few in the loop.
        k = kv_tiles.load([at, block * KEYS, DIM + channel]).reshape(KEYS, HEAD)
        sum_dq = tl.sum(k.to(tl.float32) * sum_ds[:, None], 0) * scale
        part = batch * tl.cdiv(TOKENS, KEYS) + block
        _store_sums(partials + part * 3 * DIM + channel, DIM, sum_dq, tl.sum(dv, 0), HEAD)


@triton.jit
def _attention_sum_of_parts(parts, d_qkv, num_rows, dim, num_parts, VALUES: tl.constexpr):
    """The gradient of queries from what programs for blocks of keys left: reads a value a part, writes one."""
    places = tl.cast(tl.program_id(0), tl.int64) * VALUES + tl.arange(0, VALUES)
    num_values = tl.cast(num_rows, tl.int64) * dim
    result = tl.zeros([VALUES], tl.float32)
    for _ in tl.range(0, num_parts):
        result += tl.load(parts + places, places < num_values, 0.0).to(tl.float32)
        parts += num_values
    # A row of d_qkv is three rows of a part.
    tl.store(d_qkv + places + places // dim * 2 * dim, result.to(d_qkv.dtype.element_ty), places < num_values)


@triton.jit
def _attention_gradients_whole(
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
        p, ds = _weights(scores, dp, scale * LOG2_E, ls, delta, is_key)
        p, ds = p.to(dtype), ds.to(dtype)
        dv = tl.dot(p, do, dv)
        dk = tl.dot(ds, q, dk)
        # Transposed: a tile of a matmul has 64 rows at least, and these are fewer queries.
        dq = tl.dot(tl.trans(k), ds) * scale
        if TWICE:
            scores = tl.dot(more_k, tl.trans(q))
            dp = tl.dot(more_v, tl.trans(do))
            p, ds = _weights(scores, dp, scale * LOG2_E, ls, delta, is_more)
            p, ds = p.to(dtype), ds.to(dtype)
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


def attention_backward(d_out: Tensor, qkv: Tensor, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of qkv, and parts of its sum over tokens, [parts, 3 · dim].

    out and d_out are [batch, tokens, dim], log_sum is the natural logarithm of each row's sum, [batch, heads, tokens].
    """
    (batch, num_heads, num_tokens), dim = log_sum.shape, out.shape[2]
    head, d_out, d_qkv = dim // num_heads, d_out.contiguous(), torch.empty_like(qkv)
    if VARIANT == "whole":
        partials = log_sum.new_empty(batch, 3 * dim)
        keys = _block(128, num_tokens)
        _attention_gradients_whole[(batch * num_heads,)](
            qkv, out, log_sum, d_out, d_qkv, partials, num_tokens, dim, head**-0.5,
            HEAD=head, QUERIES=WHOLE_QUERIES, KEYS=keys, TWICE=num_tokens > keys,
            STAGES=WHOLE_STAGES, num_warps=WHOLE_WARPS,
        )  # fmt: skip
        return d_qkv, partials
    is_apart, keys, tile = VARIANT == "apart", _block(BLOCK_KEYS, num_tokens), BLOCK_QUERIES
    num_blocks = triton.cdiv(num_tokens, keys)
    partials = log_sum.new_empty(batch * num_blocks, 3 * dim)
    if is_apart:
        dq_parts = out.new_empty(num_blocks, *out.shape)
    else:
        dq_parts = log_sum.new_empty(batch, num_heads, triton.cdiv(num_tokens, tile), head, tile)
    of_queries, of_keys = [1, tile, head], [1, keys, head]
    _attention_gradients_by_blocks[(batch * num_heads, num_blocks if is_apart else 1)](
        TensorDescriptor.from_tensor(qkv, of_queries), TensorDescriptor.from_tensor(qkv, of_keys),
        TensorDescriptor.from_tensor(out, of_queries), TensorDescriptor.from_tensor(d_out, of_queries),
        TensorDescriptor.from_tensor(d_qkv, of_keys),
        log_sum, d_qkv, torch.empty_like(log_sum), dq_parts, partials, head**-0.5,
        TOKENS=num_tokens, DIM=dim, HEAD=head, QUERIES=tile, KEYS=keys,
        APART=is_apart, STAGES=BLOCK_STAGES, num_warps=BLOCK_WARPS, maxnreg=BLOCK_REGISTERS,
    )  # fmt: skip
    if is_apart:
        _attention_sum_of_parts[(triton.cdiv(out.numel(), SUM_VALUES),)](
            dq_parts, d_qkv, batch * num_tokens, dim, num_blocks, VALUES=SUM_VALUES
        )
    return d_qkv, partials


def _block(most: int, num_tokens: int) -> int:
    return int(max(16, min(most, triton.next_power_of_2(num_tokens))))
