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
    y, mean, variance = BatchNormTraining.apply(x, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    unbiased = variance * (num_values / (num_values - 1))
    norm.num_batches_tracked.add_(1)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    assert isinstance(y, Tensor)
    return y


class BatchNormTraining(torch.autograd.Function):
    """x, weight, bias, eps to the normalised x, and the mean and variance (biased) of each channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = shifted_statistics(x)
        inverse = (variance + eps).rsqrt()
        y = (x - _over_channels(mean)) * _over_channels(inverse * weight) + _over_channels(bias)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        ctx.eps = eps
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        found = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, None, None, mean, inverse, True, ctx.eps, [True, True, True]
        )
        return (*found, None)


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
