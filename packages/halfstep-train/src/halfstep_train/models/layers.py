"""Subclasses of torch layers that chains of our kernels recognise by their class.

`is_as_built` detects later changes that the class does not show, such as another stride or BatchNorm momentum; torch's
code runs in that case. A chain replaces layers only if the result is the same (`are_plain`): a model lists the classes
that its chain supports, each with a check of the layer's settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from halfstep.errors import ConfigError, ModelError
from halfstep_train.kernels.fast_forms import is_wanted


class CentredConv2d(nn.Conv2d):
    """A convolution with an odd kernel and "same" padding; no bias, since BatchNorm follows."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)

    def is_as_built(self) -> bool:
        """True if kernel and stride are square, the kernel is odd, the padding fits, and there is no bias."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        is_square = self.kernel_size == (kernel, kernel) and self.stride == (stride, stride)
        is_padded = self.padding == (kernel // 2, kernel // 2) and self.padding_mode == "zeros"
        is_dense = self.groups == 1 and self.dilation == (1, 1)
        return is_square and kernel % 2 == 1 and is_padded and is_dense and self.bias is None


class PatchConv2d(nn.Conv2d):
    """A convolution over non-overlapping patches, computed as one matmul where that is faster."""

    def __init__(self, in_channels: int, out_channels: int, patch: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=patch, stride=patch)

    def forward(self, input: Tensor) -> Tensor:
        if is_wanted("patches", input) and self.is_as_built():
            return convolve_patches(input, self.weight, self.bias)
        return super().forward(input)

    def is_as_built(self) -> bool:
        """True if patches still tile the image."""
        is_tiling = self.kernel_size == self.stride and self.padding == (0, 0) and self.dilation == (1, 1)
        return is_tiling and self.groups == 1


class DoublingConvTranspose2d(nn.ConvTranspose2d):
    """A transposed convolution that turns each pixel into 2×2."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=2, stride=2)

    def is_as_built(self) -> bool:
        is_tiling = self.kernel_size == self.stride == (2, 2)
        is_whole = self.padding == self.output_padding == (0, 0) and self.dilation == (1, 1)
        return is_tiling and is_whole and self.groups == 1 and self.bias is not None


class BatchNorm2d(nn.BatchNorm2d):
    """BatchNorm with torch's defaults: affine, with running statistics and a momentum."""

    def is_as_built(self) -> bool:
        """True if the settings are the defaults; torch's `update_bn` sets the momentum to None for a while."""
        has_numbers = isinstance(self.eps, (int, float)) and isinstance(self.momentum, (int, float))
        return self.affine and self.track_running_stats and has_numbers


class HalvingMaxPool2d(nn.MaxPool2d):
    """Max pooling with stride 2, and kernel 2 or (padded) 3."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__(kernel_size, stride=2, padding=(kernel_size - 1) // 2)
        self.kernel = kernel_size

    def is_as_built(self) -> bool:
        has_kernel = self.kernel_size == self.kernel and self.padding == (self.kernel - 1) // 2
        return has_kernel and self.stride == 2 and self.dilation == 1 and not (self.ceil_mode or self.return_indices)


Checks = Mapping[type[nn.Module], Callable[[Any], bool]]
"""Supported classes, each with a check of a module's settings."""


def are_plain(modules: Iterable[nn.Module], known: Checks) -> bool:
    """True if all modules are in training mode, of known classes, without hooks, and have fp32 parameters."""
    return all(is_plain(module) and type(module) in known and known[type(module)](module) for module in modules)


def is_plain(module: nn.Module) -> bool:
    """True if a module (without its children) is in training mode, in fp32, without hooks and with its own forward.

    `are_plain` also checks its class: a module that computes in another format has a different class.
    """
    has_fp32 = all(weight.dtype == torch.float32 for weight in module.parameters(recurse=False))
    return module.training and has_fp32 and "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, or global module hooks are set."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    forward = global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks
    backward = global_hooks._global_backward_hooks, global_hooks._global_backward_pre_hooks
    return any((*own, *forward, *backward))


def accept_any(_: nn.Module) -> bool:
    """Accept any module of a class: its settings do not matter, or its parent checks them."""
    return True


def consists_of(parts: Iterable[nn.Module], *classes: type[nn.Module]) -> bool:
    """True if the modules have exactly these classes, in order. Pass `children()` of a container: a replaced one may
    not be iterable."""
    return [type(part) for part in parts] == [*classes]


CONVOLUTIONAL: Checks = {
    CentredConv2d: CentredConv2d.is_as_built,
    BatchNorm2d: BatchNorm2d.is_as_built,
    **dict.fromkeys((nn.ReLU, nn.Sequential), accept_any),
}
"""Layers that the chains of both convolutional models support."""


def has_gain_and_bias(norm: nn.LayerNorm) -> bool:
    """True if a LayerNorm normalises only the last axis, and has gain and bias."""
    return len(norm.normalized_shape) == 1 and norm.elementwise_affine and norm.bias is not None


def has_bias(linear: nn.Linear) -> bool:
    """True if a linear layer has a bias."""
    return linear.bias is not None


def check_heads(dim: int, heads: int) -> None:
    """Refuse attention whose heads do not divide its channels."""
    if dim % heads:
        raise ModelError(f"{heads} attention heads for {dim} channels", why="heads must divide channels")


LEVELS_HALVE = "every level but the last halves it"
"""Why the side of an image must be a multiple of a power of two."""


def divide_side(side: int, step: int, why: str) -> int:
    """Return how many steps tile the side of an image; refuse one that they do not tile, and name the nearest."""
    if side < step or side % step:
        raise ConfigError(
            f"images of {side} pixels: the side must be a multiple of {step}",
            why=why,
            fix=f"data.image_size={max(1, round(side / step)) * step}",
        )
    return side // step


def convolve_patches(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a convolution whose stride equals its kernel size as one matmul; the result is channels_last."""
    n, c, height, width = x.shape
    out, _, p, q = weight.shape
    # Split both axes into (patch, pixel inside the patch).
    grid = x.reshape(n, c, height // p, p, width // q, q)
    if x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        # Keep channels innermost: a row of q pixels with their channels is contiguous.
        patches, weight = grid.permute(0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)
    else:
        patches = grid.permute(0, 2, 4, 1, 3, 5)
    return F.linear(patches.flatten(3), weight.reshape(out, -1), bias).permute(0, 3, 1, 2)
