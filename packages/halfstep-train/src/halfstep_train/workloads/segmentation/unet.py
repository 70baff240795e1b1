"""U-Net (Ronneberger et al. 2015) with the layer names of milesial/Pytorch-UNet, so that its checkpoints load.

It has 31,037,698 parameters by default, 17,263,042 with `bilinear`. Width and depth are free; the names are those of
the original at depth 4. Image sizes that are not multiples of 2**depth work: each upsampled map is padded to the size
of its skip connection.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.recompute import Recomputing, choose_block_runner, choose_region_runner, keeps_every_product
from halfstep_train.kernels.fast_forms import can_chain, has_room_for_tiles
from halfstep_train.kernels.layout import MOST_CLASSES, MOST_HEAD_CHANNELS
from halfstep_train.models.layers import (
    CONVOLUTIONAL,
    BatchNorm2d,
    CentredConv2d,
    Checks,
    DoublingConvTranspose2d,
    HalvingMaxPool2d,
    are_plain,
    consists_of,
    is_plain,
)


class DoubleConv(nn.Module):
    """(3×3 convolution, BatchNorm, ReLU) twice."""

    def __init__(self, in_channels: int, out_channels: int, mid_channels: int | None = None) -> None:
        super().__init__()
        mid = mid_channels or out_channels
        self.double_conv = nn.Sequential(
            CentredConv2d(in_channels, mid, 3),
            BatchNorm2d(mid),
            nn.ReLU(inplace=True),
            CentredConv2d(mid, out_channels, 3),
            BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Down(nn.Module):
    """Halve the size, then convolve."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(HalvingMaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool_conv(x)

    def get_convolutions(self) -> DoubleConv:
        return cast(DoubleConv, self.maxpool_conv[1])


class Up(nn.Module):
    """Double the size, pad to the skip connection, concatenate, then convolve."""

    def __init__(self, in_channels: int, out_channels: int, *, bilinear: bool) -> None:
        super().__init__()
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(in_channels, out_channels, in_channels // 2)
        else:
            self.up = DoublingConvTranspose2d(in_channels, in_channels // 2)
            self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, deep: Tensor, skip: Tensor) -> Tensor:
        x: Tensor = self.up(deep)
        # An odd side was rounded down by pooling.
        dy, dx = skip.shape[2] - x.shape[2], skip.shape[3] - x.shape[3]
        if dy or dx:
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))

    def get_transposed(self) -> nn.ConvTranspose2d:
        """Return the transposed convolution that doubles the size; the model must not be bilinear."""
        return cast(nn.ConvTranspose2d, self.up)


class OutConv(nn.Module):
    """1×1 convolution to the logits."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class UNet(Recomputing):
    """Compute logits (N, num_classes, H, W) of images (N, in_channels, H, W)."""

    def __init__(
        self,
        *,
        in_channels: int = 3,
        num_classes: int = 2,
        base_channels: int = 64,
        depth: int = 4,
        bilinear: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.depth = depth
        self.recompute = "blocks" if checkpointing else "none"
        widths = [base_channels * 2**level for level in range(depth + 1)]
        shrink = 2 if bilinear else 1
        self.inc = DoubleConv(in_channels, widths[0])
        for level in range(1, depth + 1):
            out = widths[level] // (shrink if level == depth else 1)
            self.add_module(f"down{level}", Down(widths[level - 1], out))
        for level in range(depth, 0, -1):
            out = widths[level - 1] // (shrink if level > 1 else 1)
            self.add_module(f"up{depth - level + 1}", Up(widths[level], out, bilinear=bilinear))
        self.outc = OutConv(widths[0], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        is_chain = (
            keeps_every_product(self.recompute) and not x.requires_grad and can_chain(x, is_training=self.training)
        )
        if is_chain and self._can_run_chain():
            return self._run_chain(x)
        return choose_region_runner(self.recompute)(self._run_levels, x)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _can_run_chain(self) -> bool:
        """True if all layers are as built, so that the fused kernels compute the same."""
        levels = [Down] * self.depth + [Up] * self.depth
        replaced = (part for name, part in self.named_modules() if name not in ("", "outc.conv"))
        is_whole = consists_of(self.children(), DoubleConv, *levels, OutConv) and are_plain(replaced, CHAINED)
        return is_whole and has_room_for_tiles(self.outc.conv.weight.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_chain(self, x: Tensor) -> Tensor:
        """Run all levels as a chain of fused kernels."""
        if not self._can_run_chain():  # compiled code checks only once; a layer may have been hooked since
            return self._run_levels(x)
        from halfstep_train.kernels.unet_chain import compute_chained_logits  # needs Triton

        depths = range(1, self.depth + 1)
        downs: list[Down] = [getattr(self, f"down{depth}") for depth in depths]
        ups: list[Up] = [getattr(self, f"up{depth}") for depth in depths]
        return compute_chained_logits(
            x,
            [block.double_conv for block in (self.inc, *(down.get_convolutions() for down in downs))],
            [(up.get_transposed(), up.conv.double_conv) for up in ups],
            self.outc.conv,
            keep=self.recompute == "none",
        )

    def _run_levels(self, x: Tensor) -> Tensor:
        """Run the levels module by module."""
        run = choose_block_runner(self.recompute)
        skips = [run(self.inc, x)]
        for level in range(1, self.depth + 1):
            skips.append(run(self.get_submodule(f"down{level}"), skips[-1]))
        y = skips.pop()
        for level in range(1, self.depth + 1):
            y = run(self.get_submodule(f"up{level}"), y, skips.pop())
        return self.outc(y)


def has_small_head(outer: OutConv) -> bool:
    """True if the 1×1 convolution is as built and small enough for the kernel."""
    head = outer.conv
    if type(head) is not nn.Conv2d or not is_plain(head) or head.bias is None or head.groups != 1:
        return False
    is_pointwise = head.kernel_size == head.stride == (1, 1) and head.padding == (0, 0)
    return is_pointwise and head.out_channels <= MOST_CLASSES and head.in_channels <= MOST_HEAD_CHANNELS


def has_equal_halves(block: Up) -> bool:
    """True if the upsampled map has as many channels as the skip connection, as the chain assumes."""
    if not consists_of((block.up, block.conv), DoublingConvTranspose2d, DoubleConv):
        return False
    first = next(block.conv.double_conv.children(), None)
    return isinstance(first, CentredConv2d) and first.in_channels == 2 * block.get_transposed().out_channels


CHAINED: Checks = {
    **CONVOLUTIONAL,
    CentredConv2d: lambda layer: layer.is_as_built() and layer.kernel_size == (3, 3) and layer.stride == (1, 1),
    HalvingMaxPool2d: lambda layer: layer.is_as_built() and layer.kernel == 2,
    DoublingConvTranspose2d: DoublingConvTranspose2d.is_as_built,
    DoubleConv: lambda block: consists_of(block.double_conv.children(), *2 * (CentredConv2d, BatchNorm2d, nn.ReLU)),
    Down: lambda block: consists_of(block.maxpool_conv.children(), HalvingMaxPool2d, DoubleConv),
    Up: has_equal_halves,
    OutConv: has_small_head,
}
"""Modules that the chain can replace, each with a check."""


def compute_receptive_radius(depth: int) -> int:
    """Return the largest distance in pixels at which an input pixel affects an output pixel.

    The four convolutions of each level reach 2**level pixels each, the two at the bottom 2**depth each, and a pixel is
    up to 2**depth - 1 from the far corner of its pooled cell: 6·2**d - 4 + 2**d - 1. This is for transposed
    convolutions: bilinear upsampling with aligned corners depends on the size of the whole map.
    """
    return 7 * (1 << depth) - 5
