"""BatchNorm in training and the ReLU after it, in kernels that read a map as few times as possible.

    z = relu(y·scale + offset), scale = weight·inverse, offset = bias - mean·scale, inverse = 1/√(variance + eps)
    dy = scale·(g - Σg/n - (y - mean)·inverse²·Σg(y - mean)/n), g = dz where z > 0

Statistics need one pass over y, and z one more. In backward the sums need one pass over dz and y, and dy a second. The
variance comes from two plain sums, which read memory faster than Welford's update:

    s1 = Σ (y - shift), s2 = Σ (y - shift)²; mean = shift + s1/n; variance = s2/n - (s1/n)²

With shift 0 the difference cancels if |mean| ≫ deviation. So the shift is one value of the channel, which is near the
mean. The relative error of the variance is then about 2⁻²³ (1 + r²) times that of the summation, with r = |shift -
mean| / deviation, rarely above 3 however large the mean is. A NaN or infinity anywhere in a channel makes its variance
NaN, as with Welford. Maps are channels_last; vectors of channels and all sums are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Norm(NamedTuple):
    """The normalisation y·scale + offset of a raw map y; each field is [channels]."""

    mean: Tensor
    inverse: Tensor
    scale: Tensor
    offset: Tensor


class GradientSums(NamedTuple):
    """Sums over rows, each [channels], with g the gradient of y·scale + offset."""

    g: Tensor  # Σ g, the gradient of the bias
    gx: Tensor  # Σ g·(y - mean)
    weight: Tensor  # inverse·Σ g·(y - mean), the gradient of the weight


def compute_norm(y: Tensor, norm: nn.BatchNorm2d) -> Norm:
    """Return the normalisation by this batch's statistics, and update the running ones."""
    from halfstep_train.kernels import normalise_triton as kernels

    if y.numel() == y.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {y.shape}")
    result = torch.empty(4, y.shape[1], dtype=torch.float32, device=y.device)
    kernels.finish_statistics(kernels.sum_statistics(y), y, norm, result)
    return Norm(*result)


def normalise(y: Tensor, norm: Norm, *, out: Tensor | None = None) -> Tensor:
    """Return relu(y·scale + offset); `out` may be a slice of the channels of a wider map."""
    from halfstep_train.kernels import normalise_triton as kernels

    result = allocate_like(y) if out is None else out
    kernels.normalise(y, norm.scale, norm.offset, result)
    return result


def sum_gradients(dz: Tensor, y: Tensor, norm: Norm) -> GradientSums:
    """Return the sums for z = relu(y·scale + offset) with gradient dz, which may be a slice of a wider map's
    channels."""
    from halfstep_train.kernels import normalise_triton as kernels

    return finish_sums(kernels.sum_gradient_parts(dz, y, norm.mean, norm.scale, norm.offset), norm)


def finish_sums(partials: Tensor, norm: Norm) -> GradientSums:
    """Return the sums from partial Σ g and Σ g·(y - mean), [parts, 2, channels], of another kernel that had g."""
    from halfstep_train.kernels import normalise_triton as kernels

    sums = torch.empty(3, partials.shape[2], dtype=torch.float32, device=partials.device)
    kernels.finish_gradient(partials, norm.inverse, sums)
    return GradientSums(*sums)


def combine_partials(partials: Tensor) -> Tensor:
    """Sum [parts, kinds, channels] over parts, always in the same order."""
    from halfstep_train.kernels import normalise_triton as kernels

    totals = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    kernels.finish_plain(partials, totals)
    return totals


def compute_raw_gradient(g: Tensor, y: Tensor, norm: Norm, sums: GradientSums, *, masked: bool) -> Tensor:
    """Return dy; `masked` first zeroes g where y·scale + offset <= 0, as ReLU does. g may be a slice of a wider map."""
    from halfstep_train.kernels import normalise_triton as kernels

    dy = allocate_like(y)
    kernels.compute_raw_gradient(g, y, norm, (sums.g, sums.gx), dy, is_masked=masked)
    return dy


def allocate_like(y: Tensor) -> Tensor:
    """Allocate a map of y's shape and dtype, channels_last, and dense even if y is a slice."""
    return torch.empty(y.shape, dtype=y.dtype, device=y.device, memory_format=torch.channels_last)
