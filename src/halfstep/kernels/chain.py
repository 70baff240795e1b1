"""Convolutions between normalised maps: what autograd sees are the raw outputs of convolutions.

BatchNorm and ReLU of a raw map belong to its consumer, so their forward and backward are whole kernels of
`kernels.normalise`, with no map in between that autograd would have to know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.kernels.beside import Beside
from halfstep.kernels.normalise import Norm, gradient_of_raw, gradient_sums, normalisation, normalised


def convolved(z: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """The convolution of z with w in z's dtype, channels_last."""
    w = weights_for(z, w)
    y: Tensor = torch.ops.aten.convolution(z, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return y.contiguous(memory_format=torch.channels_last)


def weights_for(z: Tensor, w: Tensor) -> Tensor:
    """w in z's dtype and channels_last, as tensor-core convolutions read it."""
    return w.to(z.dtype, memory_format=torch.channels_last)


def convolution_gradients(
    beside: Beside,
    dy: Tensor,
    z: Tensor,
    w: Tensor,
    stride: int,
    padding: int,
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of z, channels_last, and of w, in z's dtype, which autograd casts to w's; None where not wanted.

    That of w comes aside, behind that of z: who needs it waits for the end of `beside`.
    """
    w, dy = weights_for(z, w), dy.contiguous(memory_format=torch.channels_last)

    def gradients(*wants: bool) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = torch.ops.aten.convolution_backward(
            dy, z, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [*wants, False]
        )
        return found

    dz = gradients(True, False)[0] if wants[0] else None
    beside.keep(dy)  # which may be a copy of our own
    with beside.aside():
        dw = gradients(False, True)[1] if wants[1] else None
    return None if dz is None else dz.contiguous(memory_format=torch.channels_last), dw


class NormReluConv(torch.autograd.Function):
    """A raw map y, BatchNorm's weight and bias, the convolution's weight to the next raw map.

    `norm` holds that weight and bias too, and its running statistics are updated. `keep`: whether the normalised map
    stays in memory for backward, or is computed there again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        weight: Tensor,
        bias: Tensor,
        w_conv: Tensor,
        norm: nn.BatchNorm2d,
        stride: int,
        padding: int,
        keep: bool,
    ) -> Tensor:
        how, w = normalisation(y, norm), weights_for(y, w_conv)
        z = normalised(y, how)
        ctx.save_for_backward(y, w, z if keep else None, *how)
        ctx.stride, ctx.padding = stride, padding
        return convolved(z, w, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, w, z, *vectors = ctx.saved_tensors
        norm = Norm(*vectors)
        z = normalised(y, norm) if z is None else z
        wants = (True, ctx.needs_input_grad[3])
        with Beside(y.device) as beside:
            dz, dw = convolution_gradients(beside, gradients[0], z, w, ctx.stride, ctx.padding, wants)
            assert dz is not None
            sums = gradient_sums(dz, y, norm)
            dy = gradient_of_raw(dz, y, norm, sums, masked=True)
        return dy, sums.weight, sums.g, dw, None, None, None, None
