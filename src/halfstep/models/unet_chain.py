"""A U-Net's training forward as a chain of raw maps: the functions of `kernels.unet_chain`, in order.

The same function as the layers one by one, whose parameters and running statistics it uses; nobody calls the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep.kernels.chain import NormReluConv
from halfstep.kernels.normalise import normalisation
from halfstep.kernels.stem import stem_fits
from halfstep.kernels.unet_chain import Head, PoolConv, StemNormReluConv, UpConcatConv
from halfstep.kernels.weights import cast_together


class Level(NamedTuple):
    """The layers of two convolutions in a row."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    next_convolution: nn.Conv2d
    last_norm: nn.BatchNorm2d

    @classmethod
    def of(cls, layers: nn.Sequential) -> Level:
        """Of convolution, BatchNorm and ReLU, twice."""
        convolution, norm, _, next_convolution, last_norm, _ = layers
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        assert isinstance(next_convolution, nn.Conv2d)
        assert isinstance(last_norm, nn.BatchNorm2d)
        return cls(convolution, norm, next_convolution, last_norm)


def chained_logits(
    image: Tensor,
    downs: Sequence[Level],
    ups: Sequence[tuple[nn.ConvTranspose2d, Level]],
    head: nn.Conv2d,
    *,
    keep: bool,
) -> Tensor:
    """Logits of a channels_last image that needs no gradient; `keep` less is slower and needs half the memory."""
    levels = [*downs, *(level for _, level in ups)]
    convolutions = [convolution for level in levels for convolution in (level.convolution, level.next_convolution)][1:]
    cast = cast_together([convolution.weight for convolution in convolutions], compute_dtype(image))
    weights = dict(zip(convolutions, cast, strict=True))  # all but the stem's
    level, skips = downs[0], []
    y, parts = first_raw_map(image, level, weights, keep=keep)
    for below in downs[1:]:
        norm, how = level.last_norm, normalisation(y.detach(), level.last_norm, parts)
        affine = (norm.weight, norm.bias)
        u, promise = PoolConv.apply(y, *affine, weights[below.convolution], how)  # type: ignore[no-untyped-call]
        skips.append((promise, y.detach(), how))
        level, (y, parts) = below, second_raw_map(u, below, weights, keep=keep)
    for up, above in ups:
        norm, how = level.last_norm, normalisation(y.detach(), level.last_norm, parts)
        deep = (y, norm.weight, norm.bias, up.weight, up.bias)
        u = UpConcatConv.apply(*skips.pop(), *deep, weights[above.convolution], how, keep)  # type: ignore[no-untyped-call]
        # Memory is highest in the last concatenation's backward. What is let go of before may stay until then.
        level, (y, parts) = above, second_raw_map(u, above, weights, keep=keep or not skips)
    norm, how = level.last_norm, normalisation(y.detach(), level.last_norm, parts)
    logits: Tensor = Head.apply(y, norm.weight, norm.bias, head.weight, head.bias, how)  # type: ignore[no-untyped-call]
    return logits


Weights = Mapping[nn.Conv2d, Tensor]
"""Of convolutions, in the format they compute in."""
RawMap = tuple[Tensor, Tensor | None]
"""And parts of its statistics, where the convolution has summed them."""


def first_raw_map(image: Tensor, level: Level, weights: Weights, *, keep: bool) -> RawMap:
    """What the first level's second convolution gives."""
    convolution, norm, next_convolution, _ = level
    if not stem_fits(image, convolution.weight, 1, 1):
        u: Tensor = convolution(image)
        return second_raw_map(u.contiguous(memory_format=torch.channels_last), level, weights, keep=keep)
    parameters = (convolution.weight, norm.weight, norm.bias, weights[next_convolution])
    found: RawMap = StemNormReluConv.apply(  # type: ignore[no-untyped-call]
        image, *parameters, norm, compute_dtype(image), keep
    )
    return found


def second_raw_map(u: Tensor, level: Level, weights: Weights, *, keep: bool) -> RawMap:
    """What a level's second convolution gives, from the first one's raw map."""
    _, norm, convolution, _ = level
    parameters = (norm.weight, norm.bias, weights[convolution])
    found: RawMap = NormReluConv.apply(u, *parameters, norm, 1, 1, keep)  # type: ignore[no-untyped-call]
    return found


def compute_dtype(image: Tensor) -> torch.dtype:
    """What autocast would cast the image to for a convolution."""
    device = image.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else image.dtype
