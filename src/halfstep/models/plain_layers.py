"""Whether a chain of kernels may take the place of a model's layers: nobody must notice that they are not called.

A model names the classes its chain knows, each with a check of what a layer of it was told: a class does not say
whether somebody has since replaced a part of it or set another stride. The checks that models share are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules

from halfstep.models.layers import CentredConv2d, DoublingConvTranspose2d, HalvingMaxPool2d

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
    """Whether the parts have these very classes, in order."""
    return [type(part) for part in parts] == [*classes]


def is_centred(convolution: CentredConv2d) -> bool:
    """Still what its class builds, with any odd square kernel and stride."""
    kernel, stride = convolution.kernel_size[0], convolution.stride[0]
    is_square = convolution.kernel_size == (kernel, kernel) and convolution.stride == (stride, stride)
    is_padded = convolution.padding == (kernel // 2, kernel // 2) and convolution.padding_mode == "zeros"
    is_dense = convolution.groups == 1 and convolution.dilation == (1, 1)
    return is_square and kernel % 2 == 1 and is_padded and is_dense and convolution.bias is None


def is_doubling(convolution: DoublingConvTranspose2d) -> bool:
    """Still what its class builds: 2×2 pixels that do not overlap, with a bias."""
    is_tiling = convolution.kernel_size == convolution.stride == (2, 2)
    is_whole = convolution.padding == convolution.output_padding == (0, 0) and convolution.dilation == (1, 1)
    return is_tiling and is_whole and convolution.groups == 1 and convolution.bias is not None


def is_halving(pool: HalvingMaxPool2d, kernel: int) -> bool:
    """Still what its class builds with this kernel."""
    has_kernel = pool.kernel == pool.kernel_size == kernel and pool.padding == (kernel - 1) // 2
    return has_kernel and pool.stride == 2 and pool.dilation == 1 and not (pool.ceil_mode or pool.return_indices)


def has_statistics(norm: nn.BatchNorm2d) -> bool:
    """A BatchNorm with a gain, a bias, and running statistics that move by a number."""
    has_numbers = isinstance(norm.eps, int | float) and isinstance(norm.momentum, int | float)
    return norm.affine and norm.track_running_stats and has_numbers


def has_gain_and_bias(norm: nn.LayerNorm) -> bool:
    """A LayerNorm of each token alone."""
    return len(norm.normalized_shape) == 1 and norm.elementwise_affine and norm.bias is not None


def has_bias(linear: nn.Linear) -> bool:
    """A linear layer that adds one."""
    return linear.bias is not None


def is_exact(gelu: nn.GELU) -> bool:
    """By the error function, not by tanh."""
    return gelu.approximate == "none"
