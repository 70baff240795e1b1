"""torch's layers, to be built, saved and hooked as such, that chains of our kernels know by their class.

`is_as_built` tells whether somebody has since set what the class does not say, such as another stride or BatchNorm's
momentum: then torch's own code runs.
"""

from __future__ import annotations

from torch import Tensor, nn

from halfstep.kernels.fast_forms import wanted
from halfstep.kernels.patches import patches_conv2d


class CentredConv2d(nn.Conv2d):
    """An odd kernel that keeps the size but for its stride, without bias, as BatchNorm follows."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)

    def is_as_built(self) -> bool:
        """With any odd square kernel and stride."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        is_square = self.kernel_size == (kernel, kernel) and self.stride == (stride, stride)
        is_padded = self.padding == (kernel // 2, kernel // 2) and self.padding_mode == "zeros"
        is_dense = self.groups == 1 and self.dilation == (1, 1)
        return is_square and kernel % 2 == 1 and is_padded and is_dense and self.bias is None


class PatchConv2d(nn.Conv2d):
    """Patches side by side."""

    def __init__(self, in_channels: int, out_channels: int, patch: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=patch, stride=patch)

    def forward(self, input: Tensor) -> Tensor:
        if wanted("patches", input) and self.is_as_built():
            return patches_conv2d(input, self.weight, self.bias)
        return super().forward(input)

    def is_as_built(self) -> bool:
        is_tiling = self.kernel_size == self.stride and self.padding == (0, 0) and self.dilation == (1, 1)
        return is_tiling and self.groups == 1


class DoublingConvTranspose2d(nn.ConvTranspose2d):
    """Each pixel becomes 2×2."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=2, stride=2)

    def is_as_built(self) -> bool:
        is_tiling = self.kernel_size == self.stride == (2, 2)
        is_whole = self.padding == self.output_padding == (0, 0) and self.dilation == (1, 1)
        return is_tiling and is_whole and self.groups == 1 and self.bias is not None


class BatchNorm2d(nn.BatchNorm2d):
    """Built with the defaults: affine, running statistics, a momentum."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)

    def is_as_built(self) -> bool:
        """With any momentum that is a number: torch's own `update_bn` takes it away for a while."""
        has_numbers = isinstance(self.eps, (int, float)) and isinstance(self.momentum, (int, float))
        return self.affine and self.track_running_stats and has_numbers


class HalvingMaxPool2d(nn.MaxPool2d):
    """Kernel 2, or 3 with padding, at stride 2."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__(kernel_size, stride=2, padding=(kernel_size - 1) // 2)
        self.kernel = kernel_size

    def is_as_built(self) -> bool:
        has_kernel = self.kernel_size == self.kernel and self.padding == (self.kernel - 1) // 2
        return has_kernel and self.stride == 2 and self.dilation == 1 and not (self.ceil_mode or self.return_indices)
