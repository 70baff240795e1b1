"""BatchNorm in training, its statistics from two plain sums: compiled, they read memory faster than Welford's update.

    s1 = Σ (x - shift), s2 = Σ (x - shift)²; mean = shift + s1/n; variance = s2/n - (s1/n)²

With shift 0 the difference cancels where |mean| ≫ deviation. So the shift is one value of the channel, which is as near
to the mean as a value is: the relative error of the variance is about 2⁻²³ (1 + r²) times the summation's own, with
r = |shift - mean| / deviation, seldom above 3 however large the mean is. (The running mean would do too, except at the
start; but recomputing in backward would find it changed.) A NaN or infinity anywhere in a channel makes its variance
NaN, as with Welford. Backward is torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def batch_norm_training(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """What `norm` gives in training; its running statistics are updated."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    assert norm.momentum is not None
    num_values = x.numel() // x.shape[1]
    with torch.no_grad():
        mean, variance = shifted_statistics(x)
        inverse = (variance + norm.eps).rsqrt()
    y = BatchNormTraining.apply(x, norm.weight, norm.bias, mean, inverse, norm.eps)  # type: ignore[no-untyped-call]
    unbiased = variance * (num_values / (num_values - 1))
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    assert isinstance(y, Tensor)
    return y


class BatchNormTraining(torch.autograd.Function):
    """x, weight, bias and the statistics of x to the normalised x; the gradient of x counts them as functions of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.eps = eps
        y = (x - _over_channels(mean)) * _over_channels(inverse * weight) + _over_channels(bias)
        # A cast that casts nothing returns y itself, and torch 2.11 compiles that into a function without gradients.
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        found = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        return (*found, None, None, None)


def shifted_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, summed in fp32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    over, num_values, shift = (0, 2, 3), x.numel() // x.shape[1], x[0, :, 0, 0]
    deviation = x - _over_channels(shift)
    first = deviation.sum(over) / num_values
    second = deviation.square().sum(over) / num_values
    return shift + first, (second - first.square()).clamp(min=0)


def _over_channels(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)
