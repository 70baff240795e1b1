"""Whether a chain of kernels may take the place of a model's layers: nobody must notice that they are not called."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn


def are_plain(modules: Iterable[nn.Module], known: Collection[type[nn.Module]]) -> bool:
    """Whether all of these are in training, with forwards we know, no hooks, and parameters in fp32."""
    return all(type(module) in known and is_plain(module) for module in modules)


def is_plain(module: nn.Module) -> bool:
    """The same of one module, without what is in it; its class is looked at by `are_plain`, as a part that computes in
    another format has a class of its own."""
    has_statistics = not isinstance(module, nn.BatchNorm2d) or (
        module.track_running_stats and module.affine and module.momentum is not None
    )
    has_fp32 = all(weight.dtype == torch.float32 for weight in module.parameters(recurse=False))
    return module.training and has_statistics and has_fp32 and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be told of its calls."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
