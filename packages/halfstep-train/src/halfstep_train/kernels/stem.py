"""A model's first convolution, of an image with few channels that needs no gradient, in our kernels.

Libraries pad three channels to eight and then multiply mostly zeros, or do not use matrix units. Here the copy that
casts the image also pads it with zeros and a fourth channel, after which the convolution and its weight's gradient are
matmuls that gather their operand from the cache. The map is written once and its gradient read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halfstep_train.kernels.layout import PIXEL, PaddedImage
from halfstep_train.kernels.stem_triton import compute_stem_gradient, convolve_image, pad_image

OUT_CHANNELS_AT_ONCE = 16  # the least that matrix units take


def can_run_stem(image: Tensor, weight: Tensor, stride: int, padding: int) -> bool:
    """True if the kernels of this module support the image and the convolution."""
    out, channels, kernel, kernel_width = weight.shape
    return (
        image.dim() == 4
        and not image.requires_grad
        and image.is_floating_point()
        and image.element_size() <= 4
        and image.shape[1] == channels <= PIXEL
        and kernel == kernel_width <= 7
        and kernel % 2 == 1
        and stride in (1, 2)
        and out % OUT_CHANNELS_AT_ONCE == 0
        and min(image.shape[2:]) + 2 * padding >= kernel
        and image.numel() > 0
    )


class StemConv(torch.autograd.Function):
    """Convolve an image without a gradient to the raw map, channels_last, in `dtype`.

    `dtype` defaults to the image's own: the copy that pads an image also casts it.
    """

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, stride: int, padding: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        assert not ctx.needs_input_grad[0], "the image's gradient is not computed here"
        padded = pad_image(image, weight.shape[2], stride, padding, dtype or image.dtype)
        ctx.save_for_backward(padded.values, weight)
        ctx.channels, ctx.windows = padded.channels, padded.windows
        return convolve_image(padded, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        padded = PaddedImage(values=values, channels=ctx.channels, windows=ctx.windows)
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        return None, compute_stem_gradient(padded, weight, dy).to(weight.dtype), None, None, None
