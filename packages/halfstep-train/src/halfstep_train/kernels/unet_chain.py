"""A U-Net between its convolutions: autograd sees only their raw outputs, as in `kernels.chain`.

The normalised skip connection has two consumers, pooling and concatenation. It is never stored as a tensor: pooling
normalises y as it reads it, and the concatenation does so again, straight into its half. So that both gradients meet in
one kernel, `PoolConv` also returns a *promise*: a tensor without memory in the shape of the concatenation.
`UpConcatConv` takes it as an input, and the gradient of the whole concatenation flows back through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep.islands import get_matmul_dtype
from halfstep_train.kernels.chain import (
    NormReluConv,
    SideStream,
    cast_together,
    cast_weight,
    convolve,
    convolve_backward,
    convolve_backward_with_sums,
)
from halfstep_train.kernels.head_triton import compute_head_gradient, compute_logits, sum_head_gradients
from halfstep_train.kernels.layout import PaddedImage
from halfstep_train.kernels.normalise_triton import Norm, compute_norm, compute_raw_gradient, normalise, sum_gradients
from halfstep_train.kernels.pool_triton import compute_pool_gradient, pool_map, sum_pool_gradients
from halfstep_train.kernels.stem import can_run_stem
from halfstep_train.kernels.stem_triton import ThroughNorm, compute_stem_gradient, convolve_image, pad_image
from halfstep_train.kernels.upsample_triton import compute_doubling_gradient, compute_tap_gradients, double_into


class StemNormReluConv(torch.autograd.Function):
    """Convolve an image without a gradient, normalise, apply ReLU, and convolve to the second raw map.

    The first raw map's gradient is used where it is computed and never written. `keep`: save the first raw map and the
    normalised one for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        w_stem: Tensor,
        _weight: Tensor,
        _bias: Tensor,
        w_conv: Tensor,
        norm: nn.BatchNorm2d,
        dtype: torch.dtype,
        keep: bool,
    ) -> Tensor:
        padded = pad_image(image, w_stem.shape[2], 1, w_stem.shape[2] // 2, dtype)
        y = convolve_image(padded, w_stem)
        how, w = compute_norm(y, norm), cast_weight(y, w_conv)
        z = normalise(y, how)
        ctx.save_for_backward(padded.values, w_stem, w, y if keep else None, z if keep else None, *how)
        ctx.channels, ctx.windows = padded.channels, padded.windows
        return convolve(z, w, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        values, w_stem, w, y, z, *vectors = ctx.saved_tensors
        padded, norm = PaddedImage(values=values, channels=ctx.channels, windows=ctx.windows), Norm(*vectors)
        y = convolve_image(padded, w_stem) if y is None else y
        z = normalise(y, norm) if z is None else z
        with SideStream(y.device) as side:
            wants_w = ctx.needs_input_grad[4]
            dz, dw, sums = convolve_backward_with_sums(side, gradients[0], z, w, 1, 1, wants_w, y, norm)
            dw_stem = compute_stem_gradient(padded, w_stem, dz, ThroughNorm(y, norm, sums, masked=True))
        return None, dw_stem, sums.weight, sums.g, dw, None, None, None


class PoolConv(torch.autograd.Function):
    """Normalise a raw map y, pool it and convolve it at the next level; return that raw map and the promise.

    `norm` normalises y, and `UpConcatConv` needs it too. There is no `keep`: a pooled map takes a quarter of the memory
    of its input, and recomputing it would cost a full pass over that input.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _weight: Tensor, _bias: Tensor, w_conv: Tensor, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        w, z = cast_weight(y, w_conv), pool_map(y, norm)
        ctx.save_for_backward(y, w, z, *norm)
        n, channels, height, width = y.shape
        # The shape of the whole concatenation, not of the skip's half: autograd would copy the gradient of a slice.
        promise = y.new_empty(1).expand(n, 2 * channels, height, width)
        return convolve(z, w, 1, 1), promise

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, w, z, *vectors = ctx.saved_tensors
        norm, dcat = Norm(*vectors), gradients[1].contiguous(memory_format=torch.channels_last)
        with SideStream(y.device) as side:
            dpooled, dw = convolve_backward(side, gradients[0], z, w, 1, 1, (True, ctx.needs_input_grad[3]))
            assert dpooled is not None
            # The skip's half is a view: the kernels take its row stride.
            dskip = dcat[:, : y.shape[1]]
            sums = sum_pool_gradients(y, dskip, dpooled, norm)
            dy = compute_pool_gradient(y, dskip, dpooled, norm, sums)
        return dy, sums.weight, sums.g, dw, None


class UpConcatConv(torch.autograd.Function):
    """Upsample a deeper raw map, concatenate it with the skip connection, and convolve to a raw map.

    `promise` and `skip`, a raw map without gradient, come from `PoolConv`; `deep` is followed by BatchNorm's weight and
    bias, then weight and bias of the transposed convolution. `keep`: save the concatenation and the upsampled input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        promise: Tensor,
        skip: Tensor,
        skip_norm: Norm,
        deep: Tensor,
        _weight: Tensor,
        _bias: Tensor,
        w_up: Tensor,
        b_up: Tensor,
        w_conv: Tensor,
        norm: Norm,
        keep: bool,
    ) -> Tensor:
        w, taps, b_up = cast_weight(deep, w_conv), arrange_taps(deep, w_up), b_up.to(deep.dtype)
        z = normalise(deep, norm)
        cat = concatenate(skip, skip_norm, z, taps, b_up)
        ctx.save_for_backward(skip, deep, w, taps, b_up, *((z, cat) if keep else (None, None)), *skip_norm, *norm)
        return convolve(cat, w, 1, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        skip, deep, w, taps, b_up, z, cat, *vectors = ctx.saved_tensors
        skip_norm, norm = Norm(*vectors[:4]), Norm(*vectors[4:])
        z = normalise(deep, norm) if z is None else z
        cat = concatenate(skip, skip_norm, z, taps, b_up) if cat is None else cat
        with SideStream(deep.device) as side:
            dcat, dw = convolve_backward(side, gradients[0], cat, w, 1, 1, (True, ctx.needs_input_grad[8]))
            assert dcat is not None
            dhalf = dcat[:, skip.shape[1] :]
            with side.work_aside():
                dtaps, db_up = compute_tap_gradients(dhalf, z)
            dz = compute_doubling_gradient(dhalf, z, taps)
            sums = sum_gradients(dz, deep, norm)
            ddeep = compute_raw_gradient(dz, deep, norm, sums, masked=True)
        # From [in, 2, 2, out] to the layout of ConvTranspose2d, [in, out, 2, 2].
        dw_up = dtaps.view(len(taps), 2, 2, -1).permute(0, 3, 1, 2)
        # dcat is the gradient of the promise: `PoolConv` takes the half of the skip from it.
        return dcat, None, None, ddeep, sums.weight, sums.g, dw_up, db_up, dw, None, None


def arrange_taps(deep: Tensor, w_up: Tensor) -> Tensor:
    """Return a transposed 2×2 convolution's weights as [channels in, 4 · channels out], their channels_last order."""
    return w_up.to(deep.dtype, memory_format=torch.channels_last).permute(0, 2, 3, 1).reshape(len(w_up), -1)


def concatenate(skip: Tensor, skip_norm: Norm, z: Tensor, taps: Tensor, b_up: Tensor) -> Tensor:
    """Return relu(skip normalised) concatenated with z, upsampled to twice its size and centred."""
    n, channels, height, width = skip.shape
    shape = (n, channels + len(b_up), height, width)
    cat = torch.empty(shape, dtype=skip.dtype, device=skip.device, memory_format=torch.channels_last)
    normalise(skip, skip_norm, out=cat[:, :channels])
    double_into(cat[:, channels:], z, taps, b_up)
    return cat


class Head(torch.autograd.Function):
    """Normalise a raw map y, apply ReLU and a 1×1 convolution to logits.

    There is no `keep`: the normalised map is never stored.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, _weight: Tensor, _bias: Tensor, w_out: Tensor, b_out: Tensor, norm: Norm
    ) -> Tensor:
        w = w_out.flatten(1).to(y.dtype).contiguous()
        ctx.save_for_backward(y, w, *norm)
        return compute_logits(y, norm, w, b_out.to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y, w, *vectors = ctx.saved_tensors
        norm, dlogits = Norm(*vectors), gradients[0]
        # The kernels need a constant stride between pixels.
        if dlogits.stride(2) != dlogits.shape[3] * dlogits.stride(3):
            dlogits = dlogits.contiguous()
        sums, dw, db = sum_head_gradients(y, dlogits, norm, w)
        dy = compute_head_gradient(y, dlogits, norm, w, sums)
        return dy, sums.weight, sums.g, dw[:, :, None, None], db, None


class Level(NamedTuple):
    """The convolutions and norms of one level, as the chain needs them."""

    convolution: nn.Conv2d
    norm: nn.BatchNorm2d
    next_convolution: nn.Conv2d
    last_norm: nn.BatchNorm2d

    @classmethod
    def from_layers(cls, layers: Iterable[Any]) -> Level:
        """Return the level of a sequence of convolution, BatchNorm and ReLU, twice."""
        convolution, norm, _, next_convolution, last_norm, _ = layers
        return cls(convolution, norm, next_convolution, last_norm)


def compute_chained_logits(
    image: Tensor,
    down_layers: Sequence[nn.Sequential],
    up_layers: Sequence[tuple[nn.ConvTranspose2d, nn.Sequential]],
    head: nn.Conv2d,
    *,
    keep: bool,
) -> Tensor:
    """Return the logits of a channels_last image that needs no gradient, with fused kernels.

    The layers of a level are convolution, BatchNorm and ReLU, twice.
    Without `keep`, some maps are recomputed in backward: slower, with half the memory. Each step works on raw maps, the
    outputs of convolutions before norm and ReLU, which the next kernel applies while reading.
    """
    downs = [Level.from_layers(layers) for layers in down_layers]
    ups = [(transposed, Level.from_layers(layers)) for transposed, layers in up_layers]
    levels = [*downs, *(level for _, level in ups)]
    convolutions = [convolution for level in levels for convolution in (level.convolution, level.next_convolution)][1:]
    cast = cast_together([convolution.weight for convolution in convolutions], get_matmul_dtype(image))
    weights = dict(zip(convolutions, cast, strict=True))  # all but the stem's
    level, skips = downs[0], []
    y = compute_first_raw_map(image, level, weights, keep=keep)
    # Down: normalise and pool the raw map while reading it; its skip connection stays raw until it is used.
    for below in downs[1:]:
        norm, how = level.last_norm, compute_norm(y.detach(), level.last_norm)
        affine = (norm.weight, norm.bias)
        u, promise = PoolConv.apply(y, *affine, weights[below.convolution], how)  # type: ignore[no-untyped-call]
        skips.append((promise, y.detach(), how))
        level, y = below, compute_second_raw_map(u, below, weights, keep=keep)
    # Up: transposed convolution, concatenation and the first convolution in one operation.
    for up, above in ups:
        norm, how = level.last_norm, compute_norm(y.detach(), level.last_norm)
        deep = (y, norm.weight, norm.bias, up.weight, up.bias)
        u = UpConcatConv.apply(*skips.pop(), *deep, weights[above.convolution], how, keep)  # type: ignore[no-untyped-call]
        # Memory peaks in the backward of the last concatenation, when maps of the last level may still be kept.
        level, y = above, compute_second_raw_map(u, above, weights, keep=keep or not skips)
    norm, how = level.last_norm, compute_norm(y.detach(), level.last_norm)
    return Head.apply(y, norm.weight, norm.bias, head.weight, head.bias, how)  # type: ignore[no-untyped-call]


Weights = Mapping[nn.Conv2d, Tensor]
"""Weights of convolutions, cast to the compute format."""


def compute_first_raw_map(image: Tensor, level: Level, weights: Weights, *, keep: bool) -> Tensor:
    """Return the raw output of the first level's second convolution."""
    convolution, norm, next_convolution, _ = level
    if not can_run_stem(image, convolution.weight, 1, 1):
        u: Tensor = convolution(image)
        return compute_second_raw_map(u.contiguous(memory_format=torch.channels_last), level, weights, keep=keep)
    parameters = (convolution.weight, norm.weight, norm.bias, weights[next_convolution])
    return StemNormReluConv.apply(  # type: ignore[no-untyped-call]
        image, *parameters, norm, get_matmul_dtype(image), keep
    )


def compute_second_raw_map(u: Tensor, level: Level, weights: Weights, *, keep: bool) -> Tensor:
    """Return the raw output of a level's second convolution from that of its first."""
    _, norm, convolution, _ = level
    parameters = (norm.weight, norm.bias, weights[convolution])
    return NormReluConv.apply(u, *parameters, norm, 1, 1, keep)  # type: ignore[no-untyped-call]
