"""ResNet's chain on the GPU: as near to fp64 as the layers are, chosen by itself in compiled code, and captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from capture import captured
from halfstep.recompute import set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.kernels.resnet_chain import run_resnet_chain
from halfstep_train.workloads.classification.resnet import ResNet, build_resnet

pytestmark = pytest.mark.gpu


def built(name: str, blocks: tuple[int, ...], stem: str = "imagenet") -> ResNet:
    torch.manual_seed(0)
    model = build_resnet(name, blocks=blocks, width=32, num_classes=10, stem=stem)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return model.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def image(*size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 3, *size, device="cuda").contiguous(memory_format=torch.channels_last)


def step(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Logits and the gradients of all parameters."""
    with torch.autocast("cuda", dtype, enabled=dtype.itemsize == 2):
        logits = model(x)
    # Detached: a graph that stays alive would hold on to the stream it was made on.
    return [logits.detach(), *torch.autograd.grad(logits.double().square().mean(), list(model.parameters()))]


def mean_error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Each beside its size: a single one may be lucky."""
    relative = [(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
    return torch.stack(relative).mean().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "blocks", "stem", "size"),
    [("resnet50", (1, 2, 1), "imagenet", (96, 80)), ("resnet18", (2, 1), "small", (33, 35))],
)
def test_the_chain_is_as_near_to_fp64_as_the_layers(
    name: str, blocks: tuple[int, ...], stem: str, size: tuple[int, int], dtype: torch.dtype
) -> None:
    model, x = built(name, blocks, stem), image(*size)
    with force(False), torch.backends.cudnn.flags(allow_tf32=False):
        exact = step(copy.deepcopy(model).double(), x.double(), torch.float64)
        layers = step(copy.deepcopy(model), x, dtype)
        with force(True, "chain"):
            chain = step(model, x, dtype)
    # Both round every map once, and both gradients jump where that turns a ReLU or a maximum over.
    assert mean_error(chain, exact) < 1.5 * mean_error(layers, exact)


def test_normalised_maps_built_again_give_the_same_bits() -> None:
    model, x = built("resnet50", (1, 2)), image(64, 64)
    again = copy.deepcopy(model)
    set_recompute(again, "pointwise")
    with force(True, "chain"), torch.backends.cudnn.flags(deterministic=True):
        assert all(map(torch.equal, step(model, x), step(again, x)))


# torch looks at the gradient of what enters a graph, and hides its own warning in a way that no error filter allows.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_under_autocast_the_chain_is_chosen_and_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    calls: list[bool] = []

    def noted(*args: object, **options: object) -> Tensor:
        calls.append(True)
        return run_resnet_chain(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("halfstep_train.kernels.resnet_chain.run_resnet_chain", noted)
    model, x = built("resnet50", (1, 2)), image(64, 64)
    compiled = torch.compile(model)
    with torch.backends.cudnn.flags(deterministic=True):
        eager = step(compiled, x)  # type: ignore[arg-type]
        assert calls
        graph, graphed = captured(lambda: step(compiled, x))  # type: ignore[arg-type]
    graph.replay()
    assert all(map(torch.equal, graphed, eager))
