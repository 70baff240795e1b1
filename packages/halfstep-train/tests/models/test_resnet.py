from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.workloads.classification.build import load_classifier_
from halfstep_train.workloads.classification.resnet import RESNETS, BasicBlock, Bottleneck, ResNet, build_resnet

TINY = {"blocks": (1, 1), "width": 4, "num_classes": 3}


def reference_names(name: str) -> set[str]:
    """torchvision's state dict, spelled from its published structure, not from our model."""
    block, blocks = RESNETS[name]
    convs = 3 if block is Bottleneck else 2
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{part}" for part in norm}
    for stage, depth in enumerate(blocks, start=1):
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            for number in range(1, convs + 1):
                names |= {f"{prefix}.conv{number}.weight"} | {f"{prefix}.bn{number}.{part}" for part in norm}
            if index == 0 and (stage > 1 or block is Bottleneck):
                names |= {f"{prefix}.downsample.0.weight"} | {f"{prefix}.downsample.1.{part}" for part in norm}
    return names


@pytest.mark.parametrize("name", RESNETS)
def test_layers_carry_torchvisions_names(name: str) -> None:
    with torch.device("meta"):
        assert set(build_resnet(name).state_dict()) == reference_names(name)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_every_block_begins_as_the_identity_on_its_shortcut(name: str) -> None:
    torch.manual_seed(0)
    model = build_resnet(name, **TINY)
    for block in model.modules():
        if isinstance(block, (BasicBlock, Bottleneck)):
            width = block.conv1.weight.shape[1]
            x = torch.randn(2, width, 4, 4)
            assert torch.equal(block(x), block.downsample(x).relu())


def test_convolutions_start_with_kaimings_fan_out_deviation() -> None:
    torch.manual_seed(0)
    weight = build_resnet("resnet18", blocks=(1,), width=64).get_submodule("layer1.0").conv1.weight
    assert isinstance(weight, Tensor)
    expected = (2 / (64 * 9)) ** 0.5
    # The deviation of n normal numbers is itself known to 1/√(2n): 0.4 % at 36,864; five of these.
    assert abs(weight.std().item() / expected - 1) < 0.02


def test_a_block_computes_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    block = Bottleneck(8, 4, 2).double().eval()
    for norm in (block.bn1, block.bn2, block.bn3):
        norm.weight.data.uniform_()
        norm.bias.data.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 1)
    x = torch.randn(1, 8, 6, 6, dtype=torch.float64)

    def norm_of(n: nn.BatchNorm2d, y: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        assert n.running_mean is not None
        assert n.running_var is not None
        y = (y - n.running_mean.view(shape)) / (n.running_var.view(shape) + 1e-5).sqrt()
        return y * n.weight.view(shape) + n.bias.view(shape)

    y = norm_of(block.bn1, nn.functional.conv2d(x, block.conv1.weight)).relu()
    y = norm_of(block.bn2, nn.functional.conv2d(y, block.conv2.weight, stride=2, padding=1)).relu()
    y = norm_of(block.bn3, nn.functional.conv2d(y, block.conv3.weight))
    torch.testing.assert_close(block(x), (y + block.downsample(x)).relu())


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 8), ("small", 32)])
def test_the_small_stem_keeps_the_size_of_small_images(stem: str, size: int) -> None:
    model = build_resnet("resnet18", blocks=(1,), width=2, stem=stem)
    seen: list[torch.Size] = []
    model.get_submodule("layer1").register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert seen == [torch.Size([1, 2, size, size])]


def build(num_classes: int) -> ResNet:
    return build_resnet("resnet18", blocks=(1,), width=2, num_classes=num_classes)


def test_a_head_of_the_same_size_is_replaced_too_when_asked_for() -> None:
    theirs, ours = build(3), build(3)
    head = ours.fc.weight.clone()
    load_classifier_(ours, theirs.state_dict(), source="w.pth", replace_head=True)
    assert torch.equal(ours.fc.weight, head)
