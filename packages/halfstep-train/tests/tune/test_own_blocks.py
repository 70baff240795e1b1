"""Blocks of models that know nothing of recomputing: found in the tree, and the same numbers from less memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from halfstep.hardware.memory import LiveBytes
from halfstep.own_loop.repeated_blocks import Recomputed, describe_blocks, find_blocks, recompute_blocks_
from halfstep.recompute import Recompute
from halfstep_train.workloads.segmentation.unet import UNet
from models_of_others import BLOCKS, MODELS, BasicBlock, Block, ResNet, SharedNet, Transformer, UncalledNet, images

HOW: list[Recompute] = ["pointwise", "alternate", "blocks"]


def trained(model: nn.Module, how: Recompute, num_steps: int = 3) -> tuple[dict[str, Tensor], int]:
    """State and bytes kept for backward of a copy that trains for some steps."""
    model, kept = copy.deepcopy(model), [0]
    recompute_blocks_(model, how, find_blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def keep(tensor: Tensor) -> Tensor:
        kept[0] += tensor.nbytes
        return tensor

    torch.manual_seed(1)
    for _ in range(num_steps):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict(), kept[0]


@pytest.mark.parametrize("name", MODELS)
def test_weights_and_buffers_after_three_steps_are_those_of_the_plain_model_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    assert find_blocks(model) == BLOCKS[name]
    plain, kept = trained(model, "none")
    for how in HOW:
        state, fewer = trained(model, how)
        assert all(torch.equal(value, state[key]) for key, value in plain.items()), how
        assert fewer < 0.5 * kept


def live_peak(how: Recompute) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 24, 3, padding=1), *(BasicBlock(24) for _ in range(6)))
    recompute_blocks_(model, how, find_blocks(model))
    x = torch.randn(2, 2, 32, 32)
    gc.collect()
    with LiveBytes() as live:
        model(x).square().mean().backward()
    return int(live.peak)


def test_fewer_bytes_are_alive_the_more_is_recomputed() -> None:
    none, pointwise, alternate, blocks = (live_peak(how) for how in ("none", *HOW))  # type: ignore[arg-type]
    assert pointwise < 0.8 * none
    assert blocks < alternate < pointwise
    assert blocks < 0.6 * none


@pytest.mark.parametrize(
    ("name", "how"), [("transformer", "alternate"), pytest.param("resnet", "pointwise", marks=pytest.mark.slow)]
)
def test_the_compiled_model_has_the_same_gradients_and_statistics(name: str, how: Recompute) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = MODELS[name]()
    for part in plain.modules():
        if isinstance(part, (Block, nn.Dropout)):
            part.p = part.dropout = 0.0  # type: ignore[assignment]
    model = copy.deepcopy(plain)
    recompute_blocks_(model, how, find_blocks(model))
    compiled = torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)
    for run in (plain, compiled):
        run(images()).square().mean().backward()
    for (key, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=key)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


def test_a_model_is_as_it_was_once_it_does_not_recompute() -> None:
    model = ResNet()
    kinds = [type(part) for part in model.modules()]
    recompute_blocks_(model, "pointwise", find_blocks(model))
    assert not any(getattr(part, "inplace", False) for part in model.layer1.modules())
    recompute_blocks_(model, "none", ())
    assert [type(part) for part in model.modules()] == kinds
    assert all(part.inplace for part in model.modules() if isinstance(part, nn.ReLU))


def test_a_copy_recomputes_and_names_of_weights_stay() -> None:
    model = Transformer()
    names = list(model.state_dict())
    recompute_blocks_(model, "blocks", find_blocks(model))
    again = copy.deepcopy(model)
    assert list(again.state_dict()) == names
    assert isinstance(again.layers[0], Recomputed)
    assert isinstance(again.layers[0], Block)


def test_evaluation_and_frozen_blocks_run_plainly() -> None:
    model = Transformer().eval().requires_grad_(False)
    expected = model(images())
    recompute_blocks_(model, "blocks", find_blocks(model))
    assert torch.equal(model(images()), expected)
    with torch.no_grad():
        assert torch.equal(model(images()), expected)


def test_stages_and_wrappers_are_looked_into_and_single_layers_are_no_blocks() -> None:
    stages = nn.Sequential(nn.Sequential(BasicBlock(8), BasicBlock(8)), nn.Sequential(BasicBlock(8), BasicBlock(8)))
    assert find_blocks(stages) == ["0.0", "0.1", "1.0", "1.1"]
    assert not find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()))
    pairs = nn.ModuleList(nn.ModuleList([BasicBlock(8), nn.LayerNorm(8)]) for _ in range(2))
    assert find_blocks(pairs) == ["0.0", "1.0"]
    assert not find_blocks(UNet(base_channels=2, depth=1)), "it knows to recompute itself"
    assert (find_blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2))) == [
        "layers.0",
        "layers.1",
    ]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


def test_a_layer_of_the_users_own_is_a_block_in_a_list_alone() -> None:
    class Own(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    model = nn.Module()
    model.norm, model.layers = Own(), nn.Sequential(Own(), nn.ReLU(), Own())
    assert find_blocks(model) == ["layers.0", "layers.2"]
    model.layers = nn.Sequential(Scale(), Scale())
    assert not find_blocks(model), "they have no forward"


def test_blocks_that_are_not_called_are_replaced_by_their_parts() -> None:
    uncalled = set(find_blocks(UncalledNet()))
    assert uncalled == {"layers.0", "layers.1"}
    assert (find_blocks(UncalledNet(), uncalled)) == ["layers.0.downsample", "layers.1.downsample"]


def test_a_block_compiled_or_patched_by_its_user_is_looked_into() -> None:
    model = SharedNet()
    model.blocks = nn.Sequential(*(torch.compile(BasicBlock(8), backend="eager") for _ in range(2)))  # type: ignore[arg-type]
    assert find_blocks(model) == ["blocks.0._orig_mod", "blocks.1._orig_mod"]
    patched = nn.Sequential(BasicBlock(8), BasicBlock(8))
    patched[0].forward = patched[1].forward = lambda x: x
    assert find_blocks(patched) == ["0.downsample", "1.downsample"]


def test_blocks_whose_parts_have_hooks_are_left_alone_but_for_torchs_own() -> None:
    hooked = nn.Sequential(BasicBlock(8), BasicBlock(8))
    for block in hooked:
        block.conv1.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    assert find_blocks(hooked) == ["0.downsample", "1.downsample"]


def test_blocks_are_told_by_kind() -> None:
    model = MODELS["skips"]()
    assert describe_blocks(model, find_blocks(model)) == "2 x Down (down1 ... down2), 2 x Up (up1 ... up2)"
    assert describe_blocks(model, ["up1"]) == "1 x Up (up1)"
