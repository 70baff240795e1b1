"""A ResNet between raw outputs of convolutions, in our kernels. Every convolution is centred: odd-sized and padded.

BatchNorm, ReLU and the sum with a shortcut belong to the module that reads the raw maps: `NormReluConv` within a block,
`Join` at its end, `StemPool` before the first block. The latter two also hold the convolutions that read their result:
autograd would sum the gradients of these in an extra pass, while here the first kernel that reads them does it.

Backward reads a block's output 4 times and writes once for g, which is also the gradient of an identity shortcut, and
reads twice and writes once for the gradient of the raw map. A projection adds one read to each, and a write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from halfstep_train.kernels.chain import (
    NormReluConv,
    SideStream,
    cast_together,
    cast_weight,
    convolve,
    convolve_backward,
)
from halfstep_train.kernels.normalise_triton import Norm, compute_norm, compute_raw_gradient, normalise
from halfstep_train.kernels.resnet_triton import (
    compute_join_gradient,
    compute_pair_gradients,
    compute_stem_pool_gradient,
    join_maps,
    pool_stem,
)
from halfstep_train.kernels.stem import StemConv, can_run_stem

Gradients = tuple[Tensor | None, ...]
Layer = tuple[nn.Conv2d, nn.BatchNorm2d]
Reader = tuple[Tensor, int]  # the weight and the stride of a convolution that reads a block's input


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetBlock:
    """The layers of a residual block, each a convolution and its BatchNorm."""

    layers: Sequence[Layer]  # in the order they run
    projection: Layer | None  # the shortcut's projection, if the shape changes
    keep: bool  # whether normalised maps within the block stay in memory, or are computed again in backward

    @property
    def readers(self) -> list[nn.Conv2d]:
        return [self.layers[0][0]] if self.projection is None else [self.layers[0][0], self.projection[0]]

    @property
    def convolutions(self) -> list[nn.Conv2d]:
        return [*self.readers, *(convolution for convolution, _ in self.layers[1:])]


def run_resnet_chain(image: Tensor, stem: Layer, blocks: Sequence[ResNetBlock], *, is_pooled: bool) -> Tensor:
    """Return the last block's output; gradients reach every parameter, and running statistics are updated."""
    y = _convolve_first(image, stem[0])
    convolutions = [convolution for block in blocks for convolution in block.convolutions]
    cast = cast_together([convolution.weight for convolution in convolutions], y.dtype)
    weights = dict(zip(convolutions, cast, strict=True))
    readers = _list_readers(blocks[0], weights)
    if is_pooled:
        z, *raws = _pool(y, stem[1], readers, keep=blocks[0].keep)
    else:
        z, *raws = _join(y, stem[1], None, None, readers)
    for block, following in zip_longest(blocks, blocks[1:]):
        y, *projected = raws
        for (_, norm), (convolution, _) in pairwise(block.layers):
            w, stride = weights[convolution], convolution.stride[0]
            y = NormReluConv.apply(  # type: ignore[no-untyped-call]
                y, norm.weight, norm.bias, w, norm, stride, w.shape[2] // 2, block.keep
            )
        shortcut_norm = None if block.projection is None else block.projection[1]
        readers = [] if following is None else _list_readers(following, weights)
        z, *raws = _join(y, block.layers[-1][1], projected[0] if projected else z, shortcut_norm, readers)
    return z


def _convolve_first(image: Tensor, convolution: nn.Conv2d) -> Tensor:
    weight, stride, device = convolution.weight, convolution.stride[0], image.device.type
    if not can_run_stem(image, weight, stride, weight.shape[2] // 2):
        plain: Tensor = convolution(image)
        return plain.contiguous(memory_format=torch.channels_last)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else image.dtype
    return StemConv.apply(image, weight, stride, weight.shape[2] // 2, dtype)  # type: ignore[no-untyped-call]


def _list_readers(block: ResNetBlock, weights: Mapping[nn.Conv2d, Tensor]) -> list[Reader]:
    return [(weights[reader], reader.stride[0]) for reader in block.readers]


def _pool(y: Tensor, norm: nn.BatchNorm2d, readers: Sequence[Reader], *, keep: bool) -> tuple[Tensor, ...]:
    weights, strides = (w for w, _ in readers), tuple(stride for _, stride in readers)
    return StemPool.apply(  # type: ignore[no-untyped-call]
        y, norm.weight, norm.bias, norm, keep, strides, *weights
    )


def _join(
    y: Tensor,
    norm: nn.BatchNorm2d,
    shortcut: Tensor | None,
    shortcut_norm: nn.BatchNorm2d | None,
    readers: Sequence[Reader],
) -> tuple[Tensor, ...]:
    affine = (None, None) if shortcut_norm is None else (shortcut_norm.weight, shortcut_norm.bias)
    weights, strides = (w for w, _ in readers), tuple(stride for _, stride in readers)
    return Join.apply(  # type: ignore[no-untyped-call]
        y, norm.weight, norm.bias, shortcut, *affine, norm, shortcut_norm, strides, *weights
    )


class Join(torch.autograd.Function):
    """Compute z = relu(y normalised + shortcut), and the raw maps of the convolutions that read z, at `strides`.

    The shortcut is the previous z, a raw map with its own norm, or nothing after a stem that does not pool.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        _weight: Tensor,
        _bias: Tensor,
        shortcut: Tensor | None,
        _shortcut_weight: Tensor | None,
        _shortcut_bias: Tensor | None,
        norm: nn.BatchNorm2d,
        shortcut_norm: nn.BatchNorm2d | None,
        strides: tuple[int, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        # Kernels read weight and bias from the norms. They are arguments too, so that autograd takes gradients.
        how, raws = compute_norm(y, norm), [y]
        hows, shortcut_how = [how], None
        if shortcut is not None and shortcut_norm is not None:
            shortcut_how = compute_norm(shortcut, shortcut_norm)
            raws, hows = [y, shortcut], [how, shortcut_how]
        z = join_maps(y, how, shortcut, shortcut_how)
        found, cast = convolve_readers(z, weights, strides)
        ctx.save_for_backward(z, *cast, *raws)
        ctx.hows, ctx.strides = hows, strides
        # dz is None where only the convolutions read z, as before a block with a projection.
        ctx.set_materialize_grads(False)
        return z, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, *gradients: Tensor) -> Gradients:
        (z, *kept), num_readers = ctx.saved_tensors, len(ctx.strides)
        weights, raws = kept[:num_readers], kept[num_readers:]
        wants = ctx.needs_input_grad
        with SideStream(z.device) as side:
            dzs, dws = compute_reader_gradients(side, gradients, z, weights, ctx.strides, any(wants[:6]), wants[9:])
            dzs += [] if dz is None else [dz.contiguous(memory_format=torch.channels_last)]
            if not any(wants[:6]):
                return (*[None] * 9, *dws)
            pairs = list(zip(raws, ctx.hows, strict=True))
            g, sums = compute_join_gradient(dzs, z, pairs)
            if len(pairs) == 2:
                dy, dshortcut = compute_pair_gradients(g, pairs, sums)
                of_shortcut: Gradients = (dshortcut, sums[1].weight, sums[1].g)
            else:
                dy = compute_raw_gradient(g, *pairs[0], sums[0], masked=False)
                # The gradient of an identity shortcut is g itself.
                of_shortcut = (g if wants[3] else None, None, None)
        return (dy, sums[0].weight, sums[0].g, *of_shortcut, None, None, None, *dws)


class StemPool(torch.autograd.Function):
    """Compute z, the 3×3 max-pooling at stride 2 of relu(y normalised), and the raw maps of the convolutions that read
    z."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        _weight: Tensor,
        _bias: Tensor,
        norm: nn.BatchNorm2d,
        keep: bool,
        strides: tuple[int, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        how = compute_norm(y, norm)
        pool = pool_stem(y, how)
        found, cast = convolve_readers(pool.z, weights, strides)
        ctx.save_for_backward(y, pool.raw, pool.places, pool.z if keep else None, *how, *cast)
        ctx.strides = strides
        ctx.set_materialize_grads(False)
        return pool.z, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None, *gradients: Tensor) -> Gradients:
        y, raw, places, z, *kept = ctx.saved_tensors
        how, weights, wants = Norm(*kept[:4]), kept[4:], ctx.needs_input_grad
        # Normalising the raw values of the maxima gives z again, at a quarter of the size of y.
        z = normalise(raw, how) if z is None else z
        with SideStream(z.device) as side:
            dzs, dws = compute_reader_gradients(side, gradients, z, weights, ctx.strides, any(wants[:3]), wants[6:])
            dzs += [] if dz is None else [dz.contiguous(memory_format=torch.channels_last)]
            if not any(wants[:3]):
                return (*[None] * 6, *dws)
            g, (sums,) = compute_join_gradient(dzs, z, [(raw, how)])
            dy = compute_stem_pool_gradient(g, places, y, how, sums) if wants[0] else None
        return (dy, sums.weight, sums.g, None, None, None, *dws)


def convolve_readers(z: Tensor, weights: Sequence[Tensor], strides: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Convolve z with each of these weights, centred; return the maps and the weights as used."""
    cast = [cast_weight(z, w) for w in weights]
    return [convolve(z, w, stride, w.shape[2] // 2) for w, stride in zip(cast, strides, strict=True)], cast


def compute_reader_gradients(
    side: SideStream,
    gradients: Sequence[Tensor],
    z: Tensor,
    weights: Sequence[Tensor],
    strides: Sequence[int],
    wants_z: bool,
    wants_weights: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return each convolution's gradients of z, unsummed, and of its weight, computed on the side stream."""
    dzs: list[Tensor] = []
    dws: list[Tensor | None] = []
    for dy, w, stride, wants_w in zip(gradients, weights, strides, wants_weights, strict=True):
        is_sparse = (
            bool(dzs) and stride == 2 and w.shape[2] == 1
        )  # only as the second term: the join kernel reads the first as a whole map
        wants = (wants_z and not is_sparse, wants_w)
        dz, dw = convolve_backward(side, dy, z, w, stride, w.shape[2] // 2, wants)
        if wants_z and is_sparse:
            # Only the pixels that the 1×1 convolution reads: at stride 2 all others would be zeros.
            dz = (dy.permute(0, 2, 3, 1) @ w.flatten(1)).permute(0, 3, 1, 2)
        dzs += [] if dz is None else [dz]
        dws.append(dw)
    return dzs, dws
