"""A linear layer and its cross-entropy in chunks of rows, so that logits are never kept.

The logits of 16 × 1024 tokens over 50,304 words are 1.6 GB in bf16 and twice that in fp32, more than all activations of
GPT-2 124M. Here a chunk's logits are computed, read and overwritten by their own gradient p - y, from which both
matmuls of backward run at once. Only the two gradients are kept, for a loss that is a sum over rows; backward
multiplies them by the incoming gradient. This costs three matmuls, the same as the plain way.

Logits and p - y are in the matmul's format, as under autocast. Their maximum, sum and logarithm are fp32, and so are
the loss and the weight's gradient over all chunks. p - y is in -1 … 1 whatever the loss is divided by, so fp16 loses
none of it; the factor is applied later, in fp32.

Columns from `num_classes` on pad the weight to a size for which matmuls are fast: they have no probability and no
gradient. Rows with a negative target are ignored. On CUDA a Triton kernel processes the logits
(cross_entropy_triton.py); its twin, `replace_logits_by_gradients_`, runs everywhere else.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep_train.kernels.fast_forms import has_triton, is_pretending

CHUNK_BYTES = 2**29
"""The most bytes of a chunk's logits: 5248 rows of 50,304 in bf16. Fewer rows cost passes over the weight's
gradient."""
ROWS_MULTIPLE = 128


def linear_cross_entropy(
    rows: Tensor, weight: Tensor, targets: Tensor, *, num_classes: int, dtype: torch.dtype, chunk_rows: int = 0
) -> Tensor:
    """Return the sum over rows of the cross-entropy of rows · weightᵀ, in fp32; matmuls compute in `dtype`.

    Call it with autocast off: a chunk's matmuls run in the formats they are given.
    """
    wants_gradients = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    chunk_rows = chunk_rows or choose_chunk_rows(len(rows), len(weight), dtype)
    return _LinearCrossEntropy.apply(rows, weight, targets, num_classes, dtype, chunk_rows, wants_gradients)  # type: ignore[no-untyped-call]


def choose_chunk_rows(num_rows: int, num_columns: int, dtype: torch.dtype) -> int:
    """Return the rows of even chunks of at most CHUNK_BYTES, in whole matmul tiles: a short last chunk costs a full
    pass."""
    most = max(ROWS_MULTIPLE, CHUNK_BYTES // (num_columns * dtype.itemsize) // ROWS_MULTIPLE * ROWS_MULTIPLE)
    num_chunks = max(1, math.ceil(num_rows / most))
    return max(1, math.ceil(num_rows / num_chunks / ROWS_MULTIPLE)) * ROWS_MULTIPLE


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, targets: Tensor,
        num_classes: int, dtype: torch.dtype, chunk_rows: int, wants_gradients: bool,
    ) -> Tensor:  # fmt: skip
        # Cast once, before the loop over chunks.
        half_rows, half_weight = rows.to(dtype), weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        d_rows = torch.empty_like(half_rows) if wants_gradients else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradients else None
        for start in range(0, len(rows), chunk_rows):
            chunk, wanted = half_rows[start : start + chunk_rows], targets[start : start + chunk_rows]
            logits = chunk @ half_weight.t()
            total += _choose_kernel(logits)(logits, wanted, num_classes, wants_gradients)
            if d_rows is not None and d_weight is not None:
                # By now the logits were replaced by their gradient.
                torch.mm(logits, half_weight, out=d_rows[start : start + chunk_rows])
                _add_product_(d_weight, logits.t(), chunk)
            del logits  # otherwise two chunks of logits would be alive at once
        if d_rows is not None and d_weight is not None:
            # Gradients are saved instead of inputs: backward only multiplies them by d_total.
            ctx.save_for_backward(d_rows, d_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_rows, d_weight = ctx.saved_tensors
        rows_dtype, weight_dtype = ctx.dtypes
        # Into fp32 before the factor, which may be as small as 1 / tokens and as large as a loss scale.
        d_rows = (d_rows.float() * d_total).to(rows_dtype) if ctx.needs_input_grad[0] else None
        d_weight = (d_weight * d_total).to(weight_dtype) if ctx.needs_input_grad[1] else None
        return d_rows, d_weight, None, None, None, None, None


def _choose_kernel(logits: Tensor) -> Any:
    if is_pretending():
        return lambda logits, *_: logits.new_empty(len(logits), dtype=torch.float32).sum()
    if not (logits.is_cuda and has_triton()):
        return replace_logits_by_gradients_
    from halfstep_train.kernels import cross_entropy_triton

    return cross_entropy_triton.replace_logits_by_gradients_


def replace_logits_by_gradients_(logits: Tensor, targets: Tensor, num_classes: int, wants_gradients: bool) -> Tensor:
    """Return the sum of a chunk's losses, and replace its logits by their gradient p - y if that is needed."""
    exact = logits[:, :num_classes].float()
    is_counted = targets >= 0
    at = targets.clamp(min=0).unsqueeze(1)
    log_sum = exact.logsumexp(dim=1, keepdim=True)
    losses = (log_sum - exact.gather(1, at)).squeeze(1)
    if wants_gradients:
        probabilities = (exact - log_sum).exp_()
        probabilities.scatter_add_(1, at, torch.full_like(log_sum, -1.0))
        # By selection, not by a product with 0: infinite logits of an ignored row would become NaN.
        logits[:, :num_classes] = torch.where(is_counted[:, None], probabilities, 0.0).to(logits.dtype)
        logits[:, num_classes:] = 0.0
    return torch.where(is_counted, losses, 0.0).sum()


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left · right to `total` in fp32: rounding after every chunk would add up."""
    if is_pretending():
        return  # takes no memory on a GPU
    if left.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())
