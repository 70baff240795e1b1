"""A U-Net's training forward as a chain of raw maps: the functions of `kernels.unet_chain`, in order.

The same function as the layers one by one, whose parameters and running statistics it uses; nobody calls the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep.kernels.chain import NormReluConv
from halfstep.kernels.normalise import normalisation
from halfstep.kernels.stem import stem_fits
from halfstep.kernels.unet_chain import (
    MOST_CLASSES,
    MOST_HEAD_CHANNELS,
    Head,
    PoolConv,
    StemNormReluConv,
    UpConcatConv,
)
from halfstep.models.layers import BatchNorm2d, CentredConv2d, DoublingConvTranspose2d, HalvingMaxPool2d

KNOWN_LAYERS = (CentredConv2d, BatchNorm2d, nn.ReLU, HalvingMaxPool2d, DoublingConvTranspose2d, nn.Conv2d)


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


def suits_chain(model: nn.Module, *, head: nn.Conv2d) -> bool:
    """Whether the layers are those the chain has kernels for, and nobody would notice that they are not called."""
    return (
        head.out_channels <= MOST_CLASSES
        and head.in_channels <= MOST_HEAD_CHANNELS
        and all(is_plain(layer) for layer in model.modules() if not next(layer.children(), None))
        and all(not has_hooks(module) for module in model.modules() if module is not model)
    )


def is_plain(layer: nn.Module) -> bool:
    """Whether its forward is the one we know, in training and with fp32 parameters."""
    if isinstance(layer, nn.BatchNorm2d) and not (layer.track_running_stats and layer.affine and layer.momentum):
        return False
    is_known = type(layer) in KNOWN_LAYERS  # a part that computes in another format has a class of its own
    return is_known and layer.training and all(weight.dtype == torch.float32 for weight in layer.parameters())


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be told of its calls."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def chained_logits(
    image: Tensor,
    downs: Sequence[Level],
    ups: Sequence[tuple[nn.ConvTranspose2d, Level]],
    head: nn.Conv2d,
    *,
    keep: bool,
) -> Tensor:
    """Logits of a channels_last image that needs no gradient; `keep` less is slower and needs half the memory."""
    level, skips = downs[0], []
    y = first_raw_map(image, level, keep=keep)
    for below in downs[1:]:
        norm, how = level.last_norm, normalisation(y.detach(), level.last_norm)
        affine = (norm.weight, norm.bias)
        u, promise = PoolConv.apply(y, *affine, below.convolution.weight, how, keep)  # type: ignore[no-untyped-call]
        skips.append((promise, y.detach(), how))
        level, y = below, second_raw_map(u, below, keep=keep)
    for up, above in ups:
        norm, how = level.last_norm, normalisation(y.detach(), level.last_norm)
        deep = (y, norm.weight, norm.bias, up.weight, up.bias)
        w_conv = above.convolution.weight
        u = UpConcatConv.apply(*skips.pop(), *deep, w_conv, how, keep)  # type: ignore[no-untyped-call]
        level, y = above, second_raw_map(u, above, keep=keep)
    norm, how = level.last_norm, normalisation(y.detach(), level.last_norm)
    weights = (norm.weight, norm.bias, head.weight, head.bias)
    logits: Tensor = Head.apply(y, *weights, how)  # type: ignore[no-untyped-call]
    return logits


def first_raw_map(image: Tensor, level: Level, *, keep: bool) -> Tensor:
    """What the first level's second convolution gives."""
    convolution, norm, next_convolution, _ = level
    if not stem_fits(image, convolution.weight, 1, 1):
        u: Tensor = convolution(image)
        return second_raw_map(u.contiguous(memory_format=torch.channels_last), level, keep=keep)
    weights = (convolution.weight, norm.weight, norm.bias, next_convolution.weight)
    dtype = compute_dtype(image)
    y: Tensor = StemNormReluConv.apply(image, *weights, norm, dtype, keep)  # type: ignore[no-untyped-call]
    return y


def second_raw_map(u: Tensor, level: Level, *, keep: bool) -> Tensor:
    """What a level's second convolution gives, from the first one's raw map."""
    _, norm, convolution, _ = level
    weights = (norm.weight, norm.bias, convolution.weight)
    y: Tensor = NormReluConv.apply(u, *weights, norm, 1, 1, keep)  # type: ignore[no-untyped-call]
    return y


def compute_dtype(image: Tensor) -> torch.dtype:
    """What autocast would cast the image to for a convolution."""
    device = image.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else image.dtype
