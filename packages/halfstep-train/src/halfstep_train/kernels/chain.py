"""Convolutions between normalised maps: autograd sees only the raw outputs of convolutions.

BatchNorm and ReLU of a raw map belong to the layer that reads it, so their forward and backward are whole kernels of
`kernels.normalise_triton`, with no intermediate map that autograd would have to track.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep_train.kernels.normalise_triton import (
    GradientSums,
    Norm,
    compute_norm,
    compute_raw_gradient,
    normalise,
    sum_gradients,
)


def convolve(z: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve z with w in z's dtype, channels_last."""
    w = cast_weight(z, w)
    y: Tensor = torch.ops.aten.convolution(z, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1)
    return y.contiguous(memory_format=torch.channels_last)


def cast_weight(z: Tensor, w: Tensor) -> Tensor:
    """Return w in z's dtype and channels_last, as tensor-core convolutions read it."""
    return w.to(z.dtype, memory_format=torch.channels_last)


def convolve_backward(
    side: SideStream,
    dy: Tensor,
    z: Tensor,
    w: Tensor,
    stride: int,
    padding: int,
    wants: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of z, channels_last, and of w, in z's dtype (autograd casts it to w's); None if not needed.

    The gradient of w is computed on the side stream, after that of z: it is ready at the end of `side`.
    """
    w, dy = cast_weight(z, w), dy.contiguous(memory_format=torch.channels_last)
    dz, dw = None, None
    if wants[0]:
        dz = _call_library_backward(dy, z, w, stride, padding, (True, False))[0]
        assert dz is not None
        dz = dz.contiguous(memory_format=torch.channels_last)
    if wants[1]:
        side.keep(dy)  # may be a contiguous copy that no one else references
        with side.work_aside():
            dw = _call_library_backward(dy, z, w, stride, padding, (False, True))[1]
    return dz, dw


def convolve_backward_with_sums(
    side: SideStream, dy: Tensor, z: Tensor, w: Tensor, stride: int, padding: int, wants_w: bool, y: Tensor, norm: Norm
) -> tuple[Tensor, Tensor | None, GradientSums]:
    """Run `convolve_backward` for z = relu(y·scale + offset), and return the sums that the gradient of y needs."""
    dz, dw = convolve_backward(side, dy, z, w, stride, padding, (True, wants_w))
    assert dz is not None
    return dz, dw, sum_gradients(dz, y, norm)


def _call_library_backward(
    dy: Tensor, z: Tensor, w: Tensor, stride: int, padding: int, wants: tuple[bool, bool]
) -> tuple[Tensor | None, ...]:
    return torch.ops.aten.convolution_backward(
        dy, z, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [*wants, False]
    )


class NormReluConv(torch.autograd.Function):
    """Normalise a raw map y, apply ReLU and convolve to the next raw map.

    `norm` also holds BatchNorm's weight and bias, and its running statistics are updated. If `keep`, the normalised map
    is saved for backward; otherwise backward recomputes it.
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
        how, w = compute_norm(y, norm), cast_weight(y, w_conv)
        z = normalise(y, how)
        ctx.save_for_backward(y, w, z if keep else None, *how)
        ctx.stride, ctx.padding = stride, padding
        return convolve(z, w, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, w, z, *vectors = ctx.saved_tensors
        norm = Norm(*vectors)
        z = normalise(y, norm) if z is None else z
        with SideStream(y.device) as side:
            dz, dw, sums = convolve_backward_with_sums(
                side, gradients[0], z, w, ctx.stride, ctx.padding, ctx.needs_input_grad[3], y, norm
            )
            dy = compute_raw_gradient(dz, y, norm, sums, masked=True)
        return dy, sums.weight, sums.g, dw, None, None, None, None


def cast_together(weights: Sequence[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return these weights in `dtype` with the same layout; their gradients are cast together, after the last of
    them."""
    if all(weight.dtype == dtype for weight in weights):
        return weights
    return CastTogether.apply(dtype, *weights)  # type: ignore[no-untyped-call]


class CastTogether(torch.autograd.Function):
    """Cast weights to another dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = weights[0].dtype
        # Weights without a gradient get None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        cast, wanted = _cast_all(weights, dtype), ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(weight for weight, wants in zip(cast, wanted, strict=True) if not wants))
        return tuple(cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cast = iter(_cast_all([gradient for gradient in gradients if gradient is not None], ctx.dtype))
        return (None, *(None if gradient is None else next(cast) for gradient in gradients))


def _cast_all(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(cast, list(tensors))
    return cast


class SideStream:
    """A context whose `work_aside()` blocks run on a second stream, after all work queued before them.

    At its end the device, not the host, waits for them. On the CPU everything runs in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = _get_second_stream(device) if device.type == "cuda" else None
        self._is_used = False
        self._kept: list[Tensor] = []

    def __enter__(self) -> Self:
        return self

    @contextlib.contextmanager
    def work_aside(self) -> Iterator[None]:
        """Run the block on the side stream."""
        if self.stream is None:
            yield
            return
        self._is_used = True
        # The block reads what is queued on the current stream so far.
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the context ends: work on the side stream still reads it when its creator may free
        it."""
        self._kept.append(tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A capture breaks if it waits for a stream that is not part of it yet.
        if self.stream is not None and self._is_used:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        self._kept.clear()


@functools.cache
def _get_second_stream(device: torch.device) -> torch.cuda.Stream:
    # torch reuses 32 streams per priority. The loader's stream has the default one and must differ from this: a copy
    # on this stream, while a step is captured, would be captured with it.
    return torch.cuda.Stream(device, priority=-1)
