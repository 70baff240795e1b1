"""Cross-entropy over rows of logits in Triton, which replaces the logits by their gradient.

One program reads a row twice: for its maximum and sum, and for p - y. The second read hits the cache if rows are short,
and memory if many rows are in flight: three passes over the logits in all, where the twin makes about ten. All
arithmetic between load and store is fp32.

A tile is [BLOCK] logits of one row. Maximum and sum are kept for each of the tile's BLOCK lanes and combined once at
the end: a reduction across threads in each tile would cost more than the exponentials. Gradients overwrite the logits,
so the target's logit is read for the loss before the second pass begins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 4096, 8


@triton.jit
def _rows_to_gradients(
    logits, targets, losses, num_classes, num_columns, row_stride,
    WANTS_GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of one row, and replace its logits by softmax minus one-hot if WANTS_GRADIENTS."""
    row = tl.program_id(0)
    # int64: rows times columns can exceed 32 bits.
    logits += row.to(tl.int64) * row_stride
    target = tl.load(targets + row)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_classes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + at, at < num_classes, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, value)
        # For lanes without a value yet, -inf minus -inf would be NaN.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        # Online softmax: rescale the sum so far to the new maximum.
        total = total * tl.exp(top - shift) + tl.exp(value - shift)
        top = higher
    # Combine the lanes: rescale each sum to the maximum of the row. A lane without values has the sum 0.
    row_top = tl.max(top, 0)
    log_sum = row_top + tl.log(tl.sum(total * tl.exp(top - row_top), 0))
    # The loss needs the target's logit, which the second pass overwrites.
    if target >= 0:
        tl.store(losses + row, log_sum - tl.load(logits + target).to(tl.float32))
    else:
        tl.store(losses + row, 0.0)
    if WANTS_GRADIENTS:
        # Up to num_columns, not num_classes: padding columns are written too.
        for start in range(0, num_columns, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(logits + at, at < num_classes, float("-inf")).to(tl.float32)
            gradient = tl.exp(value - log_sum) - tl.where(at == target, 1.0, 0.0)
            # Ignored rows and padding columns get a gradient of 0.
            gradient = tl.where((target >= 0) & (at < num_classes), gradient, 0.0)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), at < num_columns)


def replace_logits_by_gradients_(logits: Tensor, targets: Tensor, num_classes: int, wants_gradients: bool) -> Tensor:
    """Run `cross_entropy.replace_logits_by_gradients_` with one kernel and a sum."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _rows_to_gradients[(len(logits),)](
        logits, targets, losses, num_classes, logits.shape[1], logits.stride(0),
        WANTS_GRADIENTS=wants_gradients, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
    return losses.sum()
