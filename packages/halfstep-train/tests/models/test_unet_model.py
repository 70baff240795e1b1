from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from halfstep.errors import ModelError
from halfstep_train.models.weights import load_weights_, read_weights
from halfstep_train.workloads.segmentation.unet import UNet, compute_receptive_radius


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize(("depth", "size"), [(1, (7, 5)), (3, (33, 21)), (4, (16, 47))])
def test_odd_sizes_come_out_as_they_went_in(bilinear: bool, depth: int, size: tuple[int, int]) -> None:
    model = UNet(base_channels=2, depth=depth, bilinear=bilinear, num_classes=3, in_channels=1)
    assert model(torch.randn(2, 1, *size)).shape == (2, 3, *size)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_receptive_radius_is_the_farthest_pixel_with_a_gradient(depth: int) -> None:
    torch.manual_seed(0)
    radius = compute_receptive_radius(depth)
    side = 2 * radius + 16
    model = UNet(base_channels=8, depth=depth, in_channels=1).eval()
    reach = 0
    for offset in range(2**depth):
        x = torch.randn(1, 1, side, side, requires_grad=True)
        row = radius + offset
        model(x)[0, :, row, row].sum().backward()
        assert x.grad is not None
        touched = x.grad[0, 0].abs().sum(dim=1).nonzero().flatten()
        reach = max(reach, row - int(touched.min()), int(touched.max()) - row)
    assert reach == radius


def test_a_pth_of_the_reference_project_loads_and_yields_its_mask_values(tmp_path: Path) -> None:
    theirs = UNet(base_channels=2)
    torch.save(theirs.state_dict() | {"mask_values": [0, 255]}, tmp_path / "checkpoint_epoch5.pth")
    weights, extra = read_weights(tmp_path / "checkpoint_epoch5.pth")
    ours = UNet(base_channels=2)
    load_weights_(ours, weights, source="checkpoint_epoch5.pth")
    assert extra == {"mask_values": [0, 255]}
    assert torch.equal(ours.outc.conv.weight, theirs.outc.conv.weight)


def test_safetensors_load_through_the_prefixes_of_compile_and_dataparallel(tmp_path: Path) -> None:
    model = UNet(base_channels=2, depth=1)
    save_file({f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}, tmp_path / "w.safetensors")
    weights, _ = read_weights(tmp_path / "w.safetensors")
    load_weights_(torch.compile(UNet(base_channels=2, depth=1), backend="eager"), weights, source="w")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_classes": 3}, "outc.conv.weight is 3×2×1×1 in the file, but 2×2×1×1 here"),
        ({"depth": 3}, "the model has no down3.maxpool_conv.1.double_conv.0.weight"),
        ({"depth": 1}, "the file lacks down2.maxpool_conv.1.double_conv.0.weight"),
        ({"bilinear": True}, "the file lacks up1.up.weight"),
    ],
)
def test_weights_of_another_model_are_an_error_naming_the_difference(other: dict[str, int], named: str) -> None:
    model = UNet(base_channels=2, depth=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        load_weights_(model, UNet(**{"base_channels": 2, "depth": 2} | other).state_dict(), source="other.pth")
    assert named in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_counters_of_batches_may_be_missing_as_in_files_of_old() -> None:
    model = UNet(base_channels=2, depth=1)
    weights = {name: value for name, value in model.state_dict().items() if "num_batches_tracked" not in name}
    load_weights_(model, weights, source="other.pth")
    del weights["outc.conv.weight"]
    with pytest.raises(ModelError) as caught:
        load_weights_(model, weights, source="other.pth")
    assert caught.value.why == "the file lacks outc.conv.weight"
