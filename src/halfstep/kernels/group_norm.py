"""GroupNorm and SiLU of a channels_last map in one go, for networks whose steps are captured uncompiled.

torch's own GroupNorm on a GPU copies such a map to the other layout first, and computes in fp32 maps under autocast.
Here a map is read twice and written once, forward, and in its own format; with `scale` and `shift` (images, channels)
between the two, as some networks have it. Twin: `F.silu(F.group_norm(x + added) * (1 + scale) + shift)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfstep.kernels.fast_forms import decided, has_half_autocast, has_triton


def fits(x: Tensor, norm: nn.Module) -> bool:
    """Whether this map may be normalised here: asked for (`forced`), where its layer is plain."""
    is_asked = decided("group_norm", otherwise=False) and not torch.compiler.is_compiling() and has_triton()
    is_plain = type(norm) is nn.GroupNorm and norm.affine and not (norm._forward_hooks or norm._forward_pre_hooks)
    is_map = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.dtype != torch.float64
    return is_asked and is_plain and is_map and (not x.is_cuda or has_half_autocast(x))


def group_norm_silu(
    norm: nn.GroupNorm,
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    added: Tensor | None = None,
) -> Tensor:
    """SiLU of the normalised map, in autocast's format; `added` (images, channels) counts as part of the map."""
    assert (scale is None) == (shift is None)
    given = (x, norm.weight, norm.bias, added, scale, shift, norm.num_groups, norm.eps)
    return _GroupNormSilu.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


class _GroupNormSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        from halfstep.kernels import group_norm_triton

        x, weight, bias, added, scale, shift, groups, eps = given
        added, scale, shift = (None if one is None else one.contiguous() for one in (added, scale, shift))
        dtype = torch.get_autocast_dtype(x.device.type) if has_half_autocast(x) else x.dtype
        y = torch.empty_like(x, dtype=dtype)
        table = group_norm_triton.normalised_silu(x, weight, bias, added, scale, shift, y, groups, eps)
        ctx.groups, ctx.added_dtype = groups, None if added is None else added.dtype
        ctx.save_for_backward(x, weight, bias, scale, table)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from halfstep.kernels import group_norm_triton

        x, weight, bias, scale, table = ctx.saved_tensors
        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(x)
        db, dw, before = group_norm_triton.gradient(x, dy, table, dx, ctx.groups)
        dadded = None if ctx.added_dtype is None else before.to(ctx.added_dtype)
        if scale is None:
            return dx, dw.sum(0), db.sum(0), dadded, None, None, None, None
        factor = 1 + scale.float()
        dscale = (dw * weight + db * bias).to(scale.dtype)
        return dx, (dw * factor).sum(0), (db * factor).sum(0), dadded, dscale, db.to(scale.dtype), None, None


def add_branch(x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
    """x + branch + the branch's bias (channels), all maps channels_last: read once, and the bias' gradient summed by a
    kernel that reads rows as they lie."""
    return _AddBranch.apply(x, branch, bias)  # type: ignore[no-any-return, no-untyped-call]


class _AddBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, bias: Tensor) -> Tensor:
        from halfstep.kernels import group_norm_triton

        y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, branch.dtype))
        group_norm_triton.add_branch(x, branch.contiguous(memory_format=torch.channels_last), bias, y)
        ctx.dtypes = x.dtype, branch.dtype, bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from halfstep.kernels import group_norm_triton

        dy = gradients[0].contiguous(memory_format=torch.channels_last)
        of_x, of_branch, of_bias = ctx.dtypes
        return dy.to(of_x), dy.to(of_branch), group_norm_triton.sums_of_channels(dy).to(of_bias)
