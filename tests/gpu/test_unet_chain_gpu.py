"""U-Net's chain on the GPU: as near to fp32 as the layers are, chosen by itself in compiled code, and captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from capture import captured
from chain_steps import error, step
from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels import unet_chain
from halfstep_train.kernels.fast_forms import force
from halfstep_train.workloads.segmentation.unet import UNet

pytestmark = pytest.mark.gpu


def unet(**options: int) -> nn.Module:
    torch.manual_seed(0)
    model = UNet(**{"base_channels": 32, "depth": 2} | options)  # type: ignore[arg-type]
    return model.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def image(*size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, *size, device="cuda").contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("size", "classes"), [((64, 96), 2), ((53, 47), 5)])
def test_in_bf16_the_chain_is_as_near_to_fp32_as_the_layers(size: tuple[int, int], classes: int) -> None:
    model, x = unet(num_classes=classes), image(*size)
    with force(False), torch.backends.cudnn.flags(allow_tf32=False):
        exact = step(copy.deepcopy(model), x, half=False)
        layers = step(copy.deepcopy(model), x)
        with force(True, "chain"):
            chain = step(copy.deepcopy(model), x)
            in_fp32 = step(copy.deepcopy(model), x, half=False)
    assert error(in_fp32, exact) < 1e-3
    # Both round every map once, and both gradients jump where that turns a ReLU or a maximum over.
    assert error(chain, exact) < 1.5 * error(layers, exact)


def test_what_is_not_kept_is_computed_again_to_the_bit() -> None:
    model, x, found = unet(), image(64, 64), []
    ways: tuple[Recompute, ...] = ("none", "pointwise")
    for how in ways:
        changed = copy.deepcopy(model)
        set_recompute(changed, how)
        with force(True, "chain"), torch.backends.cudnn.flags(deterministic=True):
            found.append(step(changed, x))
    assert all(map(torch.equal, *found))


# torch's compiler looks at the gradient of what a graph break hands on, and hides the warning, but not from "error".
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_under_autocast_the_chain_is_chosen_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    calls, original = [], unet_chain.compute_chained_logits

    def note(*args: object, **options: object) -> Tensor:
        calls.append(True)
        return original(*args, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(unet_chain, "compute_chained_logits", note)
    model, x = unet(), image(64, 64)
    compiled = torch.compile(model)
    with torch.backends.cudnn.flags(deterministic=True):
        eager = step(compiled, x)  # type: ignore[arg-type]
        assert calls
        graph, graphed = captured(lambda: step(compiled, x))  # type: ignore[arg-type]
    graph.replay()
    assert all(map(torch.equal, graphed, eager))
