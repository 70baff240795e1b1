"""Vision transformers and ResNets: weights of other sizes, patches, initial values and stems."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError
from halfstep_train.models.vit import ViT, ViTSize, resize_positions
from halfstep_train.workloads.classification.build import load_classifier_
from halfstep_train.workloads.classification.resnet import BasicBlock, Bottleneck, ResNet, build_resnet

TINY = ViTSize(depth=2, heads=2, dim=8, mlp_dim=16, patch=4)


def tiny(**options: object) -> ViT:
    torch.manual_seed(0)
    model = ViT(TINY, **{"num_classes": 3, "image_size": 16, **options})  # type: ignore[arg-type]
    nn.init.normal_(model.heads[0].weight)  # type: ignore[arg-type]  # a zero head would hide the encoder
    return model


def state_as_saved_by_torchvision(model: ViT) -> dict[str, Tensor]:
    """The released files still have the first names of the perceptron's layers."""
    return {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): value
        for name, value in model.state_dict().items()
    }


def test_the_released_names_of_torchvisions_files_load() -> None:
    theirs, ours = tiny(), ViT(TINY, num_classes=3, image_size=16)
    load_classifier_(ours, state_as_saved_by_torchvision(theirs), source="vit_b_16-c867db91.pth", replace_head=False)
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


def test_weights_for_another_image_size_load_with_interpolated_positions() -> None:
    theirs, ours = tiny(), ViT(TINY, num_classes=3, image_size=24)
    load_classifier_(ours, theirs.state_dict(), source="w.pth", replace_head=False)
    x = torch.randn(1, 3, 24, 24)
    torch.testing.assert_close(ours(x), theirs(x))


def test_positions_of_the_models_own_size_are_untouched_and_the_class_tokens_always() -> None:
    positions = torch.randn(1, 17, 8)
    assert resize_positions(positions, 4, 4) is positions
    larger = resize_positions(positions, 6, 5)
    assert larger.shape == (1, 31, 8)
    assert torch.equal(larger[:, 0], positions[:, 0])


def test_an_image_that_patches_cannot_tile_is_named() -> None:
    with pytest.raises(ConfigError, match="18 pixels.* multiple of 4"):
        tiny()(torch.randn(1, 3, 18, 16))


# --- ResNets ---

TINY_RESNET = {"blocks": (1, 1), "width": 4, "num_classes": 3}


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_every_block_begins_as_the_identity_on_its_shortcut(name: str) -> None:
    torch.manual_seed(0)
    model = build_resnet(name, **TINY_RESNET)
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
