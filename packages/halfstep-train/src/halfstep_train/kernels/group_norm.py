"""GroupNorm and SiLU of a channels_last map in one kernel, for networks whose steps are captured uncompiled.

On a GPU torch's GroupNorm copies such a map to the other layout first, and computes fp32 maps under autocast. Here
forward reads a map twice and writes it once, in its own format. Optional `scale` and `shift` (images, channels) apply
between the two, and `added` (images, channels) is added to the map first. Twin: `F.silu(F.group_norm(x + added) * (1 +
scale) + shift)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep_train.kernels.fast_forms import has_half_autocast, has_triton, is_forced_on


def can_fuse_group_norm(x: Tensor, norm: nn.Module) -> bool:
    """True if this map can be normalised here: the form is requested (`force`) and the layer is plain."""
    is_asked = is_forced_on("group_norm", otherwise=False) and not torch.compiler.is_compiling() and has_triton()
    is_map = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.dtype != torch.float64
    return is_asked and is_plain_norm(norm) and is_map and (not x.is_cuda or has_half_autocast(x))


def is_plain_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.GroupNorm and norm.affine and not (norm._forward_hooks or norm._forward_pre_hooks)


def apply_group_norm_silu(norm: nn.GroupNorm, x: Tensor, *between: Tensor | None) -> Tensor:
    """Return SiLU of the normalised map in autocast's format. `between` is `added`, `scale` and `shift`, or empty."""
    return _GroupNormSilu.apply(*_collect_arguments(norm, x, *between))  # type: ignore[no-untyped-call]


def _collect_arguments(norm: nn.GroupNorm, x: Tensor, *between: Tensor | None) -> tuple[Any, ...]:
    added, scale, shift = between or (None, None, None)
    assert (scale is None) == (shift is None)
    return x, norm.weight, norm.bias, added, scale, shift, norm.num_groups, norm.eps


class _GroupNormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Any) -> Tensor:
        y, table = _normalise(x, *given)
        ctx.save_for_backward(x, *_collect_saved(ctx, *given), table)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bias, scale, table = ctx.saved_tensors
        return _compute_gradients(ctx, (x, weight, bias, scale), table, gradients[0])


def convolve_group_norm_silu(norm: nn.GroupNorm, layer: nn.Conv2d, x: Tensor, *between: Tensor | None) -> Tensor:
    """Convolve the result of `apply_group_norm_silu` without bias; backward recomputes that result."""
    form = (layer.stride, layer.padding, layer.dilation, layer.groups)
    given = _collect_arguments(norm, x, *between)
    return _NormalisedConvolution.apply(layer.weight.to(_choose_dtype(x)), form, *given)  # type: ignore[no-untyped-call]


class _NormalisedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Tensor, form: Any, x: Tensor, *given: Any) -> Tensor:
        y, table = _normalise(x, *given)
        ctx.form, ctx.dtype = form, y.dtype
        ctx.save_for_backward(kernel, x, *_collect_saved(ctx, *given), table)
        stride, padding, dilation, groups = form
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = torch.ops.aten.convolution(y, kernel, None, stride, padding, dilation, False, [0, 0], groups)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from halfstep_train.kernels import group_norm_triton

        kernel, x, weight, bias, scale, table = ctx.saved_tensors
        y = torch.empty_like(x, dtype=ctx.dtype)
        group_norm_triton.recompute_silu(x, table, y)
        stride, padding, dilation, groups = ctx.form
        wanted = [True, ctx.needs_input_grad[0], False]
        at_y, at_kernel, _ = torch.ops.aten.convolution_backward(
            gradients[0], y, kernel, None, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return at_kernel, None, *_compute_gradients(ctx, (x, weight, bias, scale), table, at_y)


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    """Return the normalised map, and the table that its gradient needs."""
    from halfstep_train.kernels import group_norm_triton

    added, scale, shift, groups, eps = more
    added, scale, shift = (None if one is None else one.contiguous() for one in (added, scale, shift))
    y = torch.empty_like(x, dtype=_choose_dtype(x))
    return y, group_norm_triton.normalise_silu(x, weight, bias, added, scale, shift, y, groups, eps)


def _choose_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if has_half_autocast(x) else x.dtype


def _collect_saved(ctx: Any, weight: Tensor, bias: Tensor, *more: Any) -> tuple[Tensor | None, ...]:
    added, scale, _, groups, _ = more
    ctx.groups, ctx.added_dtype = groups, None if added is None else added.dtype
    return weight, bias, None if scale is None else scale.contiguous()


def _compute_gradients(ctx: Any, kept: tuple[Any, ...], table: Tensor, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, weight, bias, added, scale and shift, and None for the two numbers."""
    from halfstep_train.kernels import group_norm_triton

    x, weight, bias, scale = kept
    dx = torch.empty_like(x)
    db, dw, before = group_norm_triton.compute_gradient(
        x, dy.contiguous(memory_format=torch.channels_last), table, dx, ctx.groups
    )
    dadded = None if ctx.added_dtype is None else before.to(ctx.added_dtype)
    if scale is None:
        return dx, dw.sum(0), db.sum(0), dadded, None, None, None, None
    factor = 1 + scale.float()
    # z = (x̂·weight + bias)·(1 + scale) + shift; db is Σ dz and dw is Σ dz·x̂, each per image and channel.
    dscale = (dw * weight + db * bias).to(scale.dtype)
    return dx, (dw * factor).sum(0), (db * factor).sum(0), dadded, dscale, db.to(scale.dtype), None, None


def add_branch(x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
    """Return x + branch + the branch's bias (channels), all maps channels_last.

    Each map is read once, and one kernel sums the bias' gradient over rows in memory order.
    """
    return _AddBranch.apply(x, branch, bias)  # type: ignore[no-untyped-call]


class _AddBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
        from halfstep_train.kernels import group_norm_triton

        x, branch = (one.contiguous(memory_format=torch.channels_last) for one in (x, branch))
        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
        group_norm_triton.add_branch(x, branch, bias, y)
        ctx.dtypes = x.dtype, branch.dtype, bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from halfstep_train.kernels import group_norm_triton

        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        of_x, of_branch, of_bias = ctx.dtypes
        return dy.to(of_x), dy.to(of_branch), group_norm_triton.sum_channels(dy).to(of_bias)
