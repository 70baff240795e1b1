from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfstep_train.workloads.classification.build import load_classifier_
from halfstep_train.workloads.classification.resnet import BasicBlock, Bottleneck, ResNet, build_resnet

TINY = {"blocks": (1, 1), "width": 4, "num_classes": 3}


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
