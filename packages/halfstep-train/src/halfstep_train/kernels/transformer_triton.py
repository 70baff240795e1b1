"""The Triton kernels between a transformer's matmuls, on rows of channels, [num_rows, dim], with sums in fp32.

LayerNorm's tiles are [ROWS, DIM], whole rows, since a row is normalised by its own mean: they are read once and stay in
registers between the two sums and the result. The tiles of GELU and packing are [ROWS, COLUMNS], parts of rows, since
channels are independent there. If sums over rows are needed, a program takes every n-th tile of rows and keeps its sums
in registers until the end, when it writes one row of `partials`, which another kernel finishes. Offsets of a whole map
can exceed 32 bits; those within a tile cannot. Tile sizes and numbers of programs were measured on an H200 with ViT-L's
shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

MULTIPROCESSORS = 132
NORM_VALUES, NORM_WARPS = 4096, 4
NORM_BACKWARD_VALUES, NORM_BACKWARD_STAGES, NORM_BACKWARD_PARTS = 1024, 3, 4 * MULTIPROCESSORS
"""Values of a tile of whole rows; backward holds more of each row in registers."""
MAP_ROWS, MAP_COLUMNS, MAP_WARPS, MAP_STAGES = 16, 256, 4, 2  # tile for kernels that need no whole rows
GELU_PARTS, GELU_BACKWARD_PARTS = 3 * MULTIPROCESSORS, MULTIPROCESSORS
"""Programs for the rows of some columns; there are as many columns of programs as a row has tiles."""
PACKED_ROWS, PACKED_COLUMNS, PACKED_STAGES, PACKED_PARTS = 8, 512, 1, 2 * MULTIPROCESSORS


@triton.jit
def _add_norm(
    x, branch, branch_bias, weight, bias, x_out, out, mean, inverse,
    num_rows, dim, eps,
    HAS_BRANCH: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write x_out = x + branch + branch_bias and out = LayerNorm(x_out).

    Reads 4 + 2 bytes per value and writes 4 + 2; without a branch 4 and 2.
    """
    columns = tl.arange(0, DIM)
    is_column = columns < dim
    gain, shift = tl.load(weight + columns, is_column, 0.0), tl.load(bias + columns, is_column, 0.0)
    tile = tl.program_id(0)
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = rows < num_rows
    inside = is_row[:, None] & is_column[None, :]
    places = tl.cast(tile * ROWS, tl.int64) * dim + (tl.arange(0, ROWS)[:, None] * dim + columns[None, :])
    value = tl.load(x + places, inside, 0.0)
    if HAS_BRANCH:
        added = tl.load(branch_bias + columns, is_column, 0.0)
        value += tl.load(branch + places, inside, 0.0).to(tl.float32) + added[None, :]
        tl.store(x_out + places, value, inside)
    # The mean first, then deviations from it: E[x²] - E[x]² would cancel.
    middle = tl.sum(value, 1) / dim
    # Masked: columns past dim, loaded as 0, would deviate by -mean.
    deviation = tl.where(inside, value - middle[:, None], 0.0)
    narrow = 1 / tl.sqrt(tl.sum(deviation * deviation, 1) / dim + eps)
    tl.store(mean + rows, middle, is_row)
    tl.store(inverse + rows, narrow, is_row)
    result = deviation * narrow[:, None] * gain[None, :] + shift[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), inside)


@triton.jit
def _add_norm_backward(
    d_out, dx_out, x_out, mean, inverse, weight, bias, dx, d_branch, out, partials,
    num_rows, dim, partials_stride,
    HAS_BRANCH: tl.constexpr, REMAKES_OUT: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write dx, also rounded for the branch, and partial gradients of weight, bias and branch_bias.

    Reads 2 + 4 + 4 bytes per value and writes 4 + 2; 2 more if `out` is recomputed.
    """
    columns = tl.arange(0, DIM)
    is_column = columns < dim
    gain = tl.load(weight + columns, is_column, 0.0)
    if REMAKES_OUT:
        shift = tl.load(bias + columns, is_column, 0.0)
    d_weight = tl.zeros([DIM], tl.float32)
    d_bias = tl.zeros([DIM], tl.float32)
    d_branch_bias = tl.zeros([DIM], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_rows
        inside = is_row[:, None] & is_column[None, :]
        places = tl.cast(tile * ROWS, tl.int64) * dim + (tl.arange(0, ROWS)[:, None] * dim + columns[None, :])
        gradient = tl.load(d_out + places, inside, 0.0).to(tl.float32)
        value = tl.load(x_out + places, inside, 0.0)
        direct = tl.load(dx_out + places, inside, 0.0)
        middle, narrow = tl.load(mean + rows, is_row, 0.0), tl.load(inverse + rows, is_row, 0.0)
        normal = (value - middle[:, None]) * narrow[:, None]
        if REMAKES_OUT:
            # The output of forward, for the weight gradient of the matmul that read it: costs a write and no read.
            again = normal * gain[None, :] + shift[None, :]
            tl.store(out + places, again.to(out.dtype.element_ty), inside)
        # Missing rows were loaded with a gradient of 0 and add nothing to these sums.
        d_weight += tl.sum(gradient * normal, 0)
        d_bias += tl.sum(gradient, 0)
        gained = gradient * gain[None, :]
        # LayerNorm's gradient: remove the components along x̂ and along the constant vector.
        along_normal = tl.sum(gained * normal, 1) / dim
        along_one = tl.sum(gained, 1) / dim
        result = direct + (gained - normal * along_normal[:, None] - along_one[:, None]) * narrow[:, None]
        # x_out = x + branch + branch_bias: all three have this gradient, the bias summed over rows.
        d_branch_bias += tl.sum(result, 0)
        tl.store(dx + places, result, inside)
        if HAS_BRANCH:
            tl.store(d_branch + places, result.to(d_branch.dtype.element_ty), inside)
    part = partials + tl.program_id(0) * partials_stride + columns
    tl.store(part, d_weight, is_column)
    tl.store(part + dim, d_bias, is_column)
    tl.store(part + 2 * dim, d_branch_bias, is_column)


@triton.jit
def _gelu(
    raw, bias, out, num_rows, dim,
    BY_TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write out = GELU(raw + bias): reads a value, writes a value."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < dim
    added = tl.load(bias + columns, is_column, 0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.arange(0, ROWS)[:, None]
        inside = (tile * ROWS + row < num_rows) & is_column[None, :]
        places = tl.cast(tile * ROWS, tl.int64) * dim + (row * dim + columns[None, :])
        value = tl.load(raw + places, inside, 0.0).to(tl.float32) + added[None, :]
        share = compute_share_by_tanh(value) if BY_TANH else compute_normal_distribution(value)
        tl.store(out + places, (value * share).to(out.dtype.element_ty), inside)


@triton.jit
def _gelu_backward(
    d_out, raw, bias, d_raw, out, partials,
    num_rows, dim, partials_stride,
    REMAKES_OUT: tl.constexpr, BY_TANH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write d_raw and its partial sums over rows, the gradient of bias: reads two values, writes one (two with
    `out`)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < dim
    added = tl.load(bias + columns, is_column, 0.0)
    d_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tl.arange(0, ROWS)[:, None]
        inside = (tile * ROWS + row < num_rows) & is_column[None, :]
        places = tl.cast(tile * ROWS, tl.int64) * dim + (row * dim + columns[None, :])
        value = tl.load(raw + places, inside, 0.0).to(tl.float32) + added[None, :]
        gradient = tl.load(d_out + places, inside, 0.0).to(tl.float32)
        below = compute_share_by_tanh(value) if BY_TANH else compute_normal_distribution(value)
        if REMAKES_OUT:
            tl.store(out + places, (value * below).to(out.dtype.element_ty), inside)
        # d GELU(x) / dx = Φ(x) + x·φ(x). d_raw may be d_out: each value is loaded before it is overwritten.
        result = gradient * (
            below + value * (compute_density_by_tanh(value, below) if BY_TANH else compute_normal_density(value))
        )
        tl.store(d_raw + places, result.to(d_raw.dtype.element_ty), inside)
        d_bias += result
    tl.store(partials + tl.program_id(0) * partials_stride + columns, tl.sum(d_bias, 0), is_column)


@triton.jit
def _packed_third(
    part, part_batch, part_head, part_token, packed, partials, first_column,
    num_rows, num_tokens, dim,
    HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Copy queries, keys or values, [batch, head, token, HEAD] by their strides, to rows of 3 * dim channels."""
    columns = first_column + tl.arange(0, COLUMNS)
    is_column = columns < dim
    # Channel c of a packed row is channel c % HEAD of head c // HEAD.
    within = columns // HEAD * part_head + columns % HEAD
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & is_column[None, :]
        sources = (rows // num_tokens).to(tl.int64) * part_batch + rows % num_tokens * part_token
        value = tl.load(part + sources[:, None] + within[None, :], inside, 0.0)
        places = tl.cast(tile * ROWS, tl.int64) * 3 * dim + (tl.arange(0, ROWS)[:, None] * 3 * dim + columns[None, :])
        tl.store(packed + places, value, inside)
        total += value.to(tl.float32)
    tl.store(partials + columns, tl.sum(total, 0), is_column)


@triton.jit
def _packed(
    q, q_batch, q_head, q_token, k, k_batch, k_head, k_token, v, v_batch, v_head, v_token, packed, partials,
    num_rows, num_tokens, dim, partials_stride,
    HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pack gradients of queries, keys and values into rows, with partial sums: reads a value, writes a value."""
    sums = partials + tl.program_id(0) * partials_stride
    third, first = tl.program_id(2), tl.program_id(1) * COLUMNS
    # Three copies, not a selected pointer: the compiler does not know a selected pointer's alignment.
    if third == 0:
        _packed_third(
            q, q_batch, q_head, q_token, packed, sums, first, num_rows, num_tokens, dim, HEAD, ROWS, COLUMNS, STAGES
        )
    elif third == 1:
        _packed_third(k, k_batch, k_head, k_token, packed + dim, sums + dim, first,
                      num_rows, num_tokens, dim, HEAD, ROWS, COLUMNS, STAGES)  # fmt: skip
    else:
        _packed_third(v, v_batch, v_head, v_token, packed + 2 * dim, sums + 2 * dim, first,
                      num_rows, num_tokens, dim, HEAD, ROWS, COLUMNS, STAGES)  # fmt: skip


def add_norm(
    x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, weight: Tensor, bias: Tensor, eps: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + branch + branch_bias, and the mean and inverse deviation of its rows; write its LayerNorm to `out`."""
    dim, num_rows = x.shape[-1], x.numel() // x.shape[-1]
    x_out = x if branch is None else torch.empty_like(x)
    mean, inverse = x.new_empty(2, num_rows)
    blocks = _choose_norm_blocks(dim, NORM_VALUES)
    _add_norm[(triton.cdiv(num_rows, blocks["ROWS"]),)](
        x, branch, branch_bias, weight, bias, x_out, out, mean, inverse,
        num_rows, dim, eps, HAS_BRANCH=branch is not None, **blocks,
    )  # fmt: skip
    return x_out, mean, inverse


def add_norm_backward(
    d_out: Tensor, dx_out: Tensor, x_out: Tensor, statistics: tuple[Tensor, Tensor], weight: Tensor, bias: Tensor,
    dx: Tensor, d_branch: Tensor | None, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write dx and d_branch, and `out` again if given; return partial gradients of weight, bias and branch_bias."""
    dim, num_rows = x_out.shape[-1], x_out.numel() // x_out.shape[-1]
    blocks = _choose_norm_blocks(dim, NORM_BACKWARD_VALUES)
    partials = _allocate_partials(min(NORM_BACKWARD_PARTS, triton.cdiv(num_rows, blocks["ROWS"])), 3 * dim, dx)
    _add_norm_backward[(len(partials),)](
        d_out, dx_out, x_out, *statistics, weight, bias, dx, d_branch, out, partials,
        num_rows, dim, partials.stride(0), HAS_BRANCH=d_branch is not None, REMAKES_OUT=out is not None,
        STAGES=NORM_BACKWARD_STAGES, **blocks,
    )  # fmt: skip
    return partials


def gelu(raw: Tensor, bias: Tensor, out: Tensor, *, by_tanh: bool = False) -> None:
    """Write out = GELU(raw + bias), exact or with GPT-2's tanh approximation."""
    dim, num_rows = raw.shape[-1], raw.numel() // raw.shape[-1]
    blocks = _choose_map_blocks(dim, MAP_ROWS, MAP_COLUMNS, MAP_STAGES)
    _gelu[_choose_map_grid(num_rows, dim, blocks, GELU_PARTS)](
        raw, bias, out, num_rows, dim, BY_TANH=by_tanh, **blocks
    )  # fmt: skip


def gelu_backward(
    d_out: Tensor, raw: Tensor, bias: Tensor, d_raw: Tensor, out: Tensor | None, *, by_tanh: bool = False
) -> Tensor:
    """Write d_raw, and `out` again if given; return partial gradients of bias. d_raw may be d_out."""
    dim, num_rows = raw.shape[-1], raw.numel() // raw.shape[-1]
    blocks = _choose_map_blocks(dim, MAP_ROWS, MAP_COLUMNS, MAP_STAGES)
    grid = _choose_map_grid(num_rows, dim, blocks, GELU_BACKWARD_PARTS)
    partials = _allocate_partials(grid[0], dim, bias)
    _gelu_backward[grid](
        d_out, raw, bias, d_raw, out, partials, num_rows, dim, partials.stride(0),
        REMAKES_OUT=out is not None, BY_TANH=by_tanh, **blocks,
    )  # fmt: skip
    return partials


def pack(thirds: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write out [batch, tokens, 3 * dim] from three [batch, heads, tokens, channels of a head]; return partial sums."""
    _, num_heads, num_tokens, head = thirds[0].shape
    # The kernel takes any strides but that of the channels of a head, which must be adjacent.
    thirds = [third if third.stride(3) == 1 else third.contiguous() for third in thirds]
    strided = [part for third in thirds for part in (third, *third.stride()[:3])]
    dim, num_rows = num_heads * head, out.numel() // out.shape[-1]
    blocks = _choose_map_blocks(dim, PACKED_ROWS, PACKED_COLUMNS, PACKED_STAGES)
    grid = _choose_map_grid(num_rows, dim, blocks, PACKED_PARTS)
    partials = _allocate_partials(grid[0], 3 * dim, out)
    _packed[(*grid, 3)](*strided, out, partials, num_rows, num_tokens, dim, partials.stride(0), HEAD=head, **blocks)
    return partials


def _allocate_partials(num_parts: int, num_sums: int, like: Tensor) -> Tensor:
    return torch.empty(num_parts, num_sums, dtype=torch.float32, device=like.device)


def _choose_norm_blocks(dim: int, num_values: int) -> dict[str, int]:
    columns = triton.next_power_of_2(dim)
    rows = max(1, min(MAP_ROWS, num_values // columns))
    return {"ROWS": rows, "DIM": columns, "num_warps": NORM_WARPS}


def _choose_map_blocks(dim: int, rows: int, columns: int, stages: int) -> dict[str, int]:
    columns = min(columns, triton.next_power_of_2(dim))
    return {"ROWS": rows, "COLUMNS": columns, "STAGES": stages, "num_warps": MAP_WARPS}


def _choose_map_grid(num_rows: int, dim: int, blocks: dict[str, int], most_parts: int) -> tuple[int, int]:
    return min(most_parts, triton.cdiv(num_rows, blocks["ROWS"])), triton.cdiv(dim, blocks["COLUMNS"])


@triton.jit
def compute_normal_distribution(x):
    """Return Φ(x), the standard normal distribution function."""
    y = tl.abs(x)
    # 1 - Φ(|x|) = 2^p with a polynomial p of degree 7 in |x|: one exp2 in place of erf.
    p = 6.0194663e-05 - 1.7557884e-06 * y
    p = p * y - 9.2105829e-04
    p = p * y + 8.4772892e-03
    p = p * y - 5.3911068e-02
    p = p * y - 4.5850033e-01
    p = p * y - 1.1512417e00
    p = p * y - 9.9999565e-01
    tail = tl.exp2(p)
    return tl.where(x > 0, 1 - tail, tail)


@triton.jit
def compute_share_by_tanh(x):
    """Return the tanh approximation of Φ(x): (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), u = √(2/π)·(x + 0.044715 x³)."""
    # 2.3022... = 2·√(2/π)·log2(e): exp2 in place of exp.
    return 1.0 / (1.0 + tl.exp2(-2.3022081985 * (x + 0.044715 * x * x * x)))


@triton.jit
def compute_density_by_tanh(x, share):
    """Return the derivative of `compute_share_by_tanh`."""
    # The derivative of the logistic function times that of 2u, 2·√(2/π)·(1 + 3·0.044715 x²).
    return share * (1.0 - share) * (1.5957691216 + 0.2140644489 * x * x)


@triton.jit
def compute_normal_density(x):
    """Return φ(x) = exp(-x²/2) / √(2π), the derivative of Φ."""
    # 0.3989... = 1 / √(2π), 0.7213... = log2(e) / 2.
    return 0.3989422804 * tl.exp2(-0.7213475204 * x * x)
