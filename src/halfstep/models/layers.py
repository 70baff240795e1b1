"""torch's layers, to be built, saved and hooked as such, that compute in a fast form where one is wanted and fits."""

from __future__ import annotations

from torch import Tensor, nn

from halfstep.kernels.batch_norm import batch_norm_training
from halfstep.kernels.convolution import (
    doubling_conv_transpose2d,
    folded_conv2d,
    is_foldable,
    patches_conv2d,
)
from halfstep.kernels.fast_forms import wanted
from halfstep.kernels.layout import has_channels_last
from halfstep.kernels.max_pool import max_pool_stride2


class CentredConv2d(nn.Conv2d):
    """An odd kernel that keeps the size but for its stride, without bias, as BatchNorm follows."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        if wanted("few_channels", input) and is_foldable(input, self.stride[0]):
            return folded_conv2d(input, self.weight)
        return super().forward(input)


class PatchConv2d(nn.Conv2d):
    """Patches side by side."""

    def __init__(self, in_channels: int, out_channels: int, patch: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=patch, stride=patch)

    def forward(self, input: Tensor) -> Tensor:
        return patches_conv2d(input, self.weight, self.bias) if wanted("patches", input) else super().forward(input)


class DoublingConvTranspose2d(nn.ConvTranspose2d):
    """Each pixel becomes 2×2."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=2, stride=2)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if wanted("upsampling", input) and has_channels_last(input) and output_size is None:
            return doubling_conv_transpose2d(input, self.weight, self.bias)
        return super().forward(input, output_size)


class BatchNorm2d(nn.BatchNorm2d):
    """Built with the defaults: affine, running statistics, a momentum."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)

    def forward(self, input: Tensor) -> Tensor:
        has_spread = input.numel() > input.shape[1]  # one value a channel is torch's error to raise
        if self.training and has_spread and wanted("batch_norm", input):
            return batch_norm_training(input, self)
        return super().forward(input)


class HalvingMaxPool2d(nn.MaxPool2d):
    """Kernel 2, or 3 with padding, at stride 2."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__(kernel_size, stride=2, padding=(kernel_size - 1) // 2)
        self.kernel = kernel_size

    def forward(self, input: Tensor) -> Tensor:
        if wanted("max_pool", input) and has_channels_last(input):
            return max_pool_stride2(input, self.kernel)
        pooled: Tensor = super().forward(input)
        return pooled
