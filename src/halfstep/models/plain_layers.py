"""Whether a chain of kernels may take the place of a model's layers: nobody must notice that they are not called.

A model names the classes its chain knows, each with a check of what a layer of it was told: a class does not say
whether somebody has since replaced a part of it or set another stride. The checks that models share are here, and those
of our own layers beside them (`layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from halfstep.models.layers import BatchNorm2d, CentredConv2d

Checks = Mapping[type[nn.Module], Callable[[Any], bool]]


def are_plain(modules: Iterable[nn.Module], known: Checks) -> bool:
    """Whether all of these are in training, with forwards we know, no hooks, and parameters in fp32."""
    return all(is_plain(module) and type(module) in known and known[type(module)](module) for module in modules)


def is_plain(module: nn.Module) -> bool:
    """The same of one module, without what is in it; its class is looked at by `are_plain`, as a part that computes in
    another format has a class of its own."""
    has_fp32 = all(weight.dtype == torch.float32 for weight in module.parameters(recurse=False))
    return module.training and has_fp32 and "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody wants to be told of its calls, or of all modules' calls."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    forward = of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks
    backward = of_all_modules._global_backward_hooks, of_all_modules._global_backward_pre_hooks
    return any((*own, *forward, *backward))


def always(_: nn.Module) -> bool:
    """For a class that can be told nothing that matters, or whose owner looks at its parts."""
    return True


def consists_of(parts: Iterable[nn.Module], *classes: type[nn.Module]) -> bool:
    """Whether the parts have these very classes, in order. Of a container they are its `children()`: what somebody has
    put in its place need not be a sequence."""
    return [type(part) for part in parts] == [*classes]


CONVOLUTIONAL: Checks = {
    CentredConv2d: CentredConv2d.is_as_built,
    BatchNorm2d: BatchNorm2d.is_as_built,
    **dict.fromkeys((nn.ReLU, nn.Sequential), always),
}
"""What both of the convolutional models' chains know."""


def has_gain_and_bias(norm: nn.LayerNorm) -> bool:
    """A LayerNorm of each token alone."""
    return len(norm.normalized_shape) == 1 and norm.elementwise_affine and norm.bias is not None


def has_bias(linear: nn.Linear) -> bool:
    return linear.bias is not None


def is_exact(gelu: nn.GELU) -> bool:
    """By the error function, not by tanh."""
    return gelu.approximate == "none"
