"""A transformer's blocks as matmuls, attention, and our kernels between them.

Tokens travel as two tensors: x, in fp32, and the last branch's raw output, in a half format and without its bias. The
next LayerNorm adds them. So one kernel computes a sum and its LayerNorm; in backward, one kernel computes the gradient
of x, that of the branch in its format, and partial sums over rows for three gradients: LayerNorm's weight and bias, and
the branch's bias. In the same way GELU adds the bias of the linear layer before it.

Weights are fp32, and so are their gradients, as the matmul accumulates them. If `keep` is false, outputs of LayerNorm
and GELU are not saved for backward: kernels there, which read all inputs anyway, write them again.

Attention is cuDNN's or another of torch's. Over few tokens its backward is our kernel, which works on the packed rows
that the adjacent matmuls write and read; over more tokens it is torch's, and three gradients are packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional as F

from halfstep_train.kernels.fast_forms import has_room_for_tiles

MOST_TOKENS = 256  # keys whose gradients one program of our attention kernel holds


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerBlock:
    """The layers of a pre-norm block: attention with one joint projection of q, k and v, then two linear layers with
    GELU."""

    num_heads: int
    norm_1: nn.LayerNorm
    in_weight: Tensor
    in_bias: Tensor
    out: nn.Linear
    norm_2: nn.LayerNorm
    first: nn.Linear
    second: nn.Linear
    is_causal: bool = False  # each token attends to itself and to earlier ones
    by_tanh: bool = False  # GELU's tanh approximation, as in GPT-2


class Rounded(NamedTuple):
    """A block's parameters cast to the format of its matmuls."""

    in_weight: Tensor
    in_bias: Tensor
    out: Tensor
    first: Tensor
    second: Tensor


class Stream(NamedTuple):
    """Tokens [batch, tokens, dim]: the sum of x, of a branch's raw output and of its bias."""

    x: Tensor
    branch: Tensor | None
    branch_bias: Tensor | None


def run_blocks(blocks: Sequence[TransformerBlock], tokens: Tensor, dtype: torch.dtype, *, keep: bool) -> Stream:
    """Run fp32 tokens through all blocks, whose matmuls and attention compute in `dtype`."""
    stream = Stream(tokens.contiguous(), None, None)
    for block, rounded in zip(blocks, round_weights(blocks, dtype), strict=True):
        stream = run_attention(block, rounded, stream, keep=keep)
        stream = run_perceptron(block, rounded, stream, keep=keep)
    return stream


def round_weights(blocks: Sequence[TransformerBlock], dtype: torch.dtype) -> Iterator[Rounded]:
    """Cast all weights at once: a kernel for each would take longer to launch than to run."""
    weights = [Rounded(b.in_weight, b.in_bias, b.out.weight, b.first.weight, b.second.weight) for b in blocks]
    # Detached: the Functions below return gradients for the fp32 weights themselves, past this cast.
    flat = [weight.detach() for of_block in weights for weight in of_block]
    copies = [torch.empty_like(weight, dtype=dtype) for weight in flat]
    torch._foreach_copy_(copies, flat)
    return (Rounded(*copies[i : i + 5]) for i in range(0, len(copies), 5))


def run_attention(block: TransformerBlock, rounded: Rounded, stream: Stream, *, keep: bool) -> Stream:
    """Return the stream with attention as its new branch."""
    norm, form = block.norm_1, BlockSettings(eps=block.norm_1.eps, num_heads=block.num_heads, keep=keep)
    given = *stream, norm.weight, norm.bias, block.in_weight, block.in_bias, rounded.in_weight, rounded.in_bias, form
    if not block.is_causal and is_short(stream.x, rounded.in_weight.dtype, block.num_heads):
        x, attended = ShortAttention.apply(*given)  # type: ignore[no-untyped-call]
    else:
        x, q, k, v = AttentionInput.apply(*given)  # type: ignore[no-untyped-call]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=block.is_causal).transpose(1, 2).flatten(2)
    branch = LinearProduct.apply(attended, block.out.weight, rounded.out)  # type: ignore[no-untyped-call]
    return Stream(x, branch, block.out.bias)


def is_short(x: Tensor, dtype: torch.dtype, num_heads: int) -> bool:
    """True if the sequence fits our short-attention backward kernel and cuDNN can run the forward."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    is_ours = is_half and x.shape[1] <= MOST_TOKENS and x.shape[2] in (32 * num_heads, 64 * num_heads)
    if not (x.is_cuda and is_ours and has_room_for_tiles(x.device)):
        return False
    q, k, v = split_heads(x.new_empty(*x.shape[:2], 3 * x.shape[2], dtype=dtype), num_heads)
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, False))


def split_heads(qkv: Tensor, num_heads: int) -> Tensor:
    """Split packed [batch, tokens, 3 · dim] into queries, keys and values, [3, batch, heads, tokens, channels]."""
    split: Tensor = qkv.unflatten(2, (3, num_heads, -1))
    return split.permute(2, 0, 3, 1, 4)


def run_cudnn_attention(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return cuDNN's output, [batch, tokens, dim], and the log-sum-exp of each row, [batch, heads, tokens]."""
    q, k, v = split_heads(qkv, num_heads)
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, compute_log_sumexp=True)
    # The output has the memory layout of the queries, token by token, so this is not a copy. log_sum may end in a 1.
    return out.transpose(1, 2).flatten(2), log_sum.reshape(q.shape[:3])


def run_perceptron(block: TransformerBlock, rounded: Rounded, stream: Stream, *, keep: bool) -> Stream:
    """Return the stream with the two linear layers as its new branch."""
    norm = block.norm_2
    form = BlockSettings(eps=norm.eps, num_heads=block.num_heads, keep=keep, by_tanh=block.by_tanh)
    parameters = norm.weight, norm.bias, block.first.weight, block.first.bias, block.second.weight
    x, branch = Perceptron.apply(*stream, *parameters, rounded.first, rounded.second, form)  # type: ignore[no-untyped-call]
    return Stream(x, branch, block.second.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSettings:
    """Settings of half a block besides its tensors."""

    eps: float
    num_heads: int
    keep: bool
    by_tanh: bool = False


class ShortAttention(torch.autograd.Function):
    """Map a stream to x with the branch added, and to attention's output before its projection."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor,
        in_weight: Tensor, in_bias: Tensor, half_weight: Tensor, half_bias: Tensor, form: BlockSettings,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        normed = add_norm(Stream(x, branch, branch_bias), norm_weight, norm_bias, form.eps, half_weight.dtype)
        qkv = F.linear(normed.out, half_weight, half_bias)
        out, log_sum = run_cudnn_attention(qkv, form.num_heads)
        save(ctx, form, normed, branch, norm_weight, norm_bias, half_weight, qkv, out, log_sum)
        return normed.x, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, d_attended: Tensor) -> tuple[Tensor | None, ...]:
        from halfstep_train.kernels import attention_triton as kernels

        normed, (norm_weight, norm_bias, half_weight, *attended) = restore_saved(ctx)
        d_qkv, partials = kernels.attention_backward(d_attended, *attended)
        return compute_projection_gradients(
            ctx, d_qkv, sum_partials(partials), dx, normed, norm_weight, norm_bias, half_weight
        )


class AttentionInput(torch.autograd.Function):
    """Map a stream to x with the branch added, and to queries, keys and values, [batch, heads, tokens, channels]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, branch_bias: Tensor | None, norm_weight: Tensor, norm_bias: Tensor,
        in_weight: Tensor, in_bias: Tensor, half_weight: Tensor, half_bias: Tensor, form: BlockSettings,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        normed = add_norm(Stream(x, branch, branch_bias), norm_weight, norm_bias, form.eps, half_weight.dtype)
        qkv = F.linear(normed.out, half_weight, half_bias)
        save(ctx, form, normed, branch, norm_weight, norm_bias, half_weight)
        return normed.x, *split_heads(qkv, form.num_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        from halfstep_train.kernels import transformer_triton as kernels

        normed, parameters = restore_saved(ctx)
        d_qkv = dq.new_empty(*dx.shape[:2], 3 * dx.shape[2])
        partials = kernels.pack((dq, dk, dv), d_qkv)
        return compute_projection_gradients(ctx, d_qkv, sum_partials(partials), dx, normed, *parameters)


def compute_projection_gradients(
    ctx: Any, d_qkv: Tensor, d_bias: Tensor, dx: Tensor,
    normed: Normed, norm_weight: Tensor, norm_bias: Tensor, half_weight: Tensor,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of the projection's inputs from those of packed queries, keys and values, and of their
    bias."""
    d_qkv = d_qkv.flatten(0, 1)
    d_out = d_qkv @ half_weight
    dx, d_branch, out, sums = add_norm_backward(ctx, d_out, dx, normed, norm_weight, norm_bias)
    d_norm_weight, d_norm_bias, d_branch_bias = sums
    return (
        dx, d_branch, d_branch_bias if ctx.has_branch else None, d_norm_weight, d_norm_bias,
        compute_weight_gradient(d_qkv, out), d_bias, None, None, None,
    )  # fmt: skip


class Perceptron(torch.autograd.Function):
    """Map a stream to x with the branch added, and to the second linear layer's output without bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, branch_bias: Tensor, norm_weight: Tensor, norm_bias: Tensor,
        first: Tensor, first_bias: Tensor, second: Tensor, half_first: Tensor, half_second: Tensor, form: BlockSettings,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from halfstep_train.kernels import transformer_triton as kernels

        normed = add_norm(Stream(x, branch, branch_bias), norm_weight, norm_bias, form.eps, half_first.dtype)
        raw = F.linear(normed.out, half_first)
        active = torch.empty_like(raw)
        kernels.gelu(raw, first_bias, active, by_tanh=form.by_tanh)
        ctx.by_tanh = form.by_tanh
        kept = active if form.keep else None
        save(ctx, form, normed, branch, norm_weight, norm_bias, half_first, half_second, first_bias, raw, kept)
        return normed.x, F.linear(active, half_second)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, d_second: Tensor) -> tuple[Tensor | None, ...]:
        from halfstep_train.kernels import transformer_triton as kernels

        normed, (norm_weight, norm_bias, half_first, half_second, first_bias, raw, active) = restore_saved(ctx)
        d_second = d_second.reshape(-1, dx.shape[2])
        d_raw = d_second @ half_second  # gradient of GELU's output until the kernel, which works in place, has run
        remade = None if ctx.keep else torch.empty_like(raw)
        d_bias = sum_partials(kernels.gelu_backward(d_raw, raw, first_bias, d_raw, remade, by_tanh=ctx.by_tanh))
        d_second_weight = compute_weight_gradient(d_second, active if remade is None else remade)
        d_out = d_raw @ half_first
        dx, d_branch, out, sums = add_norm_backward(ctx, d_out, dx, normed, norm_weight, norm_bias)
        d_first_weight = compute_weight_gradient(d_raw, out)
        d_norm_weight, d_norm_bias, d_branch_bias = sums
        return (
            dx, d_branch, d_branch_bias, d_norm_weight, d_norm_bias,
            d_first_weight, d_bias, d_second_weight, None, None, None,
        )  # fmt: skip


class LinearProduct(torch.autograd.Function):
    """Apply a linear layer without bias to rows, with its weight rounded to the compute format."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, half_weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, half_weight)
        return F.linear(rows, half_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, half_weight = ctx.saved_tensors
        return d_out @ half_weight, compute_weight_gradient(d_out.flatten(0, 1), rows), None


class Normed(NamedTuple):
    """A sum, its LayerNorm, and the statistics of its rows."""

    x: Tensor
    out: Tensor
    mean: Tensor
    inverse: Tensor


def add_norm(stream: Stream, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Normed:
    """Return the sum of the stream's tensors, normalised into `dtype`."""
    from halfstep_train.kernels import transformer_triton as kernels

    out = torch.empty_like(stream.x, dtype=dtype)
    x, mean, inverse = kernels.add_norm(*stream, weight, bias, eps, out)
    return Normed(x, out, mean, inverse)


def add_norm_backward(
    ctx: Any, d_out: Tensor, dx: Tensor, normed: Normed, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Sequence[Tensor]]:
    """Return the gradients of x and of the branch, LayerNorm's output (saved or recomputed), and the gradients of
    weight, bias and branch_bias."""
    from halfstep_train.kernels import transformer_triton as kernels

    remade = None if ctx.keep else torch.empty_like(normed.x, dtype=d_out.dtype)
    d_branch = torch.empty_like(normed.x, dtype=d_out.dtype) if ctx.has_branch else None
    dx_in = torch.empty_like(normed.x)
    partials = kernels.add_norm_backward(
        d_out, dx.contiguous(), normed.x, (normed.mean, normed.inverse), weight, bias, dx_in, d_branch, remade
    )
    return dx_in, d_branch, normed.out if remade is None else remade, sum_partials(partials).chunk(3)


def save(ctx: Any, form: BlockSettings, normed: Normed, branch: Tensor | None, *others: Tensor | None) -> None:
    """Save the sum for backward, with its LayerNorm if that is kept, and the other tensors."""
    ctx.has_branch, ctx.keep = branch is not None, form.keep
    ctx.save_for_backward(normed.x, normed.out if form.keep else None, normed.mean, normed.inverse, *others)


def restore_saved(ctx: Any) -> tuple[Normed, Sequence[Any]]:
    """Return what `save` stored; without `keep` the LayerNorm is missing."""
    x, out, mean, inverse, *others = ctx.saved_tensors
    return Normed(x, out, mean, inverse), others


def compute_weight_gradient(d_out: Tensor, rows: Tensor) -> Tensor:
    """Return d_outᵀ·rows in fp32. On CUDA the matmul writes fp32 itself: nothing is rounded, and no cast runs."""
    rows = rows.reshape(-1, rows.shape[-1])
    if d_out.is_cuda and d_out.dtype != torch.float32:
        return torch.mm(d_out.t(), rows, out_dtype=torch.float32)
    return torch.mm(d_out.t(), rows).float()


def sum_partials(partials: Tensor) -> Tensor:
    """Return sums over rows from the programs' partial sums."""
    from halfstep_train.kernels.normalise_triton import combine_partials

    return combine_partials(partials[:, None]).flatten()
