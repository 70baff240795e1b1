"""A model's weights cast together, and their gradients back: autocast casts one by one, two kernels per layer and step.

The kernels are short, so it is their number that costs: ResNet-50 has 52 convolutions behind its stem, so 104 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def cast_together(weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """These weights in `dtype`, laid out as they are; their gradients come all at once, behind the last of them."""
    if all(weight.dtype == dtype for weight in weights):
        return weights
    cast: tuple[Tensor, ...] = CastTogether.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return cast


class CastTogether(torch.autograd.Function):
    """Weights in one dtype to the same in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        ctx.set_materialize_grads(False)
        cast, wanted = _cast(weights, dtype), ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(weight for weight, wants in zip(cast, wanted, strict=True) if not wants))
        return tuple(cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast([gradient for gradient in gradients if gradient is not None], ctx.dtype))
        return (None, *(None if gradient is None else next(cast) for gradient in gradients))


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(cast, list(tensors))
    return cast
