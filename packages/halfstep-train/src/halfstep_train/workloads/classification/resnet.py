"""ResNet v1.5 (He et al. 2015, with the stride in the 3×3 convolution) with torchvision's names.

ResNet-50 has 25,557,032 parameters with 1000 classes, 23,712,932 with 100. Convolutions are initialised by Kaiming's
fan-out normal, and the last BatchNorm of each block with gain 0, so that a block starts as the identity (Goyal et al.
2017, 5.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from halfstep.recompute import Blocks, get_recompute, keeps_every_product
from halfstep_train.kernels.fast_forms import can_chain, has_room_for_tiles
from halfstep_train.models.layers import (
    CONVOLUTIONAL,
    BatchNorm2d,
    CentredConv2d,
    Checks,
    HalvingMaxPool2d,
    accept_any,
    are_plain,
    consists_of,
)

if TYPE_CHECKING:  # the chain needs Triton
    from halfstep_train.kernels.resnet_chain import Layer, ResNetBlock

Stem = Literal["imagenet", "small"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut: ResNet-18 and -34."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = CentredConv2d(in_channels, width, 3, stride)
        self.bn1 = BatchNorm2d(width)
        self.conv2 = CentredConv2d(width, width, 3)
        self.bn2 = BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = make_shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))

    def list_layers(self) -> list[Layer]:
        """Return (convolution, norm) of each layer in the order in which they run."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2)]


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut, with four times as many output channels: ResNet-50 and deeper."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = CentredConv2d(in_channels, width, 1)
        self.bn1 = BatchNorm2d(width)
        self.conv2 = CentredConv2d(width, width, 3, stride)
        self.bn2 = BatchNorm2d(width)
        self.conv3 = CentredConv2d(width, width * self.expansion, 1)
        self.bn3 = BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = make_shortcut(in_channels, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + self.downsample(x))

    def list_layers(self) -> list[Layer]:
        """Return (convolution, norm) of each layer in the order in which they run."""
        return [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]


class ResNet(nn.Module):
    """Compute logits (N, num_classes) of images (N, in_channels, H, W)."""

    head_name = "fc"

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, ...],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        stem: Stem = "imagenet",
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.num_stages = len(blocks)
        is_small = stem == "small"
        # The small stem is for CIFAR (He et al. 2015, 4.2): the usual one would leave one pixel of 32 in the last
        # stage.
        self.conv1 = (
            CentredConv2d(in_channels, width, 3) if is_small else CentredConv2d(in_channels, width, 7, stride=2)
        )
        self.bn1 = BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if is_small else HalvingMaxPool2d(3)
        channels = width
        for number, depth in enumerate(blocks):
            inner, outer = width * 2**number, width * 2**number * block.expansion
            # The first block of a stage changes the width and, except in the first stage, the resolution.
            first = block(channels, inner, stride=1 if number == 0 else 2)
            others = [block(outer, inner, stride=1) for _ in range(depth - 1)]
            named = {str(index): part for index, part in enumerate([first, *others])}
            self.add_module(f"layer{number + 1}", Blocks(named, checkpointing=checkpointing))
            channels = outer
        self.fc = nn.Linear(channels, num_classes)
        self.apply(initialise_)

    def forward(self, x: Tensor) -> Tensor:
        is_chain = not x.requires_grad and can_chain(x, is_training=self.training)
        x = self._run_chain(x) if is_chain and self._can_run_chain() else self._run_layers(x)
        return self.fc(x.mean(dim=(2, 3)))

    def _run_layers(self, x: Tensor) -> Tensor:
        """Run stem and stages layer by layer."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self._list_stages():
            x = stage(x)
        return x

    def _list_stages(self) -> list[Blocks]:
        return [getattr(self, f"layer{number}") for number in range(1, self.num_stages + 1)]

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _can_run_chain(self) -> bool:
        """True if all layers are as built, so that the fused kernels compute the same."""
        replaced = (part for layer in self.children() if layer is not self.fc for part in layer.modules())
        parts = (self.conv1, self.bn1, self.relu, *self._list_stages())
        is_whole = consists_of(parts, CentredConv2d, BatchNorm2d, nn.ReLU, *[Blocks] * self.num_stages)
        is_known = is_whole and type(self.maxpool) in (nn.Identity, HalvingMaxPool2d) and are_plain(replaced, CHAINED)
        return is_known and keeps_every_product(get_recompute(self)) and has_room_for_tiles(self.conv1.weight.device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_chain(self, image: Tensor) -> Tensor:
        """Run stem and stages as a chain of fused kernels."""
        if not self._can_run_chain():  # compiled code checks only once; a layer may have been hooked since
            return self._run_layers(image)
        from halfstep_train.kernels.resnet_chain import run_resnet_chain

        blocks = [
            make_chain_block(block, keep=stage.recompute == "none") for stage in self._list_stages() for block in stage
        ]
        is_pooled = isinstance(self.maxpool, HalvingMaxPool2d)
        return run_resnet_chain(image, (self.conv1, self.bn1), blocks, is_pooled=is_pooled)


def is_whole(block: BasicBlock | Bottleneck) -> bool:
    """True if no layer of a block was replaced."""
    has_layers = all(consists_of(layer, CentredConv2d, BatchNorm2d) for layer in block.list_layers())
    shortcut = [*block.downsample.children()] or [block.downsample]
    has_shortcut = consists_of(shortcut, nn.Identity) or consists_of(shortcut, CentredConv2d, BatchNorm2d)
    return has_layers and has_shortcut and type(block.relu) is nn.ReLU


CHAINED: Checks = {
    **CONVOLUTIONAL,
    HalvingMaxPool2d: lambda layer: layer.is_as_built() and layer.kernel == 3,
    nn.Identity: accept_any,
    # No block may be replaced, for example by `nn.Identity`.
    Blocks: lambda stage: all(type(block) in (BasicBlock, Bottleneck) for block in stage),
    **dict.fromkeys((BasicBlock, Bottleneck), is_whole),
}
"""Modules that `kernels.resnet_chain` can replace, each with a check."""


def make_chain_block(block: nn.Module, *, keep: bool) -> ResNetBlock:
    """Return the layers of a block in the form that the chain expects."""
    from halfstep_train.kernels.resnet_chain import ResNetBlock

    assert isinstance(block, BasicBlock | Bottleneck)
    projection = cast("Layer | None", tuple(block.downsample.children()) or None)  # nn.Identity has no children
    return ResNetBlock(layers=block.list_layers(), projection=projection, keep=keep)


def make_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | nn.Identity:
    """Return the shortcut of a block: the identity, or a projection if the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(CentredConv2d(in_channels, out_channels, 1, stride), BatchNorm2d(out_channels))


def initialise_(module: nn.Module) -> None:
    """Initialise one module. `Module.apply` visits a block after its children, so the zero gain is set last."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, BasicBlock):
        nn.init.zeros_(module.bn2.weight)
    elif isinstance(module, Bottleneck):
        nn.init.zeros_(module.bn3.weight)


RESNETS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def build_resnet(name: str, *, blocks: tuple[int, ...] = (), **options: Any) -> ResNet:
    """Build `resnet18` to `resnet152` with the options of `ResNet`; `blocks` sets the number of blocks per stage."""
    block, published = RESNETS[name]
    return ResNet(block, blocks or published, **options)
