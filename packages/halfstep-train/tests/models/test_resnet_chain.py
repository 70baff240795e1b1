"""A ResNet as a chain of kernels against its own layers one by one: logits, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfstep.recompute import set_recompute
from halfstep_train.kernels import resnet_chain
from halfstep_train.kernels.fast_forms import force
from halfstep_train.workloads.classification.resnet import Bottleneck, ResNet, build_resnet

pytest.importorskip("triton")


def halving_early() -> ResNet:
    """Bottlenecks as first published, which halve the size in their 1×1 convolution: so does the shortcut."""
    model = build_resnet("resnet50", blocks=(1, 2), width=4, num_classes=3)
    first = model.get_submodule("layer2.0")
    assert isinstance(first, Bottleneck)
    first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
    return model


MODELS: dict[str, tuple[Callable[[], ResNet], tuple[int, int]]] = {
    "bottlenecks": (lambda: build_resnet("resnet50", blocks=(1, 2), width=4, num_classes=3), (33, 27)),
    "bottlenecks, halving early": (halving_early, (32, 32)),
    "basic": (lambda: build_resnet("resnet18", blocks=(1, 2), width=8, num_classes=3), (35, 32)),
    "basic, small": (lambda: build_resnet("resnet18", blocks=(2, 1), width=8, num_classes=3, stem="small"), (9, 11)),
    "our own stem": (lambda: build_resnet("resnet18", blocks=(1,), width=16, num_classes=3), (32, 32)),
}


def built(name: str) -> tuple[ResNet, Tensor]:
    """Gains of both signs, and none of 0, with which a block's own gradients would be 0."""
    torch.manual_seed(0)
    build, size = MODELS[name]
    model = build().to(memory_format=torch.channels_last)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    return model, torch.randn(3, 3, *size).to(memory_format=torch.channels_last)


class Counted:
    """How often the chain ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        monkeypatch.setattr("halfstep_train.workloads.classification.resnet.run_resnet_chain", self)

    def __call__(self, *args: object, **options: object) -> Tensor:
        self.times += 1
        return resnet_chain.run_resnet_chain(*args, **options)  # type: ignore[arg-type]


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def stepped(model: nn.Module, x: Tensor, *, is_chain: bool) -> dict[str, Tensor]:
    """Logits, gradients and buffers after a forward and a backward."""
    with force(False), force(is_chain, "chain"):
        logits = model(x)
    logits.float().square().sum().backward()
    gradients = {f"d {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients, **dict(model.named_buffers())}


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """A step of the bottlenecks' chain, nothing frozen and every map kept."""
    return stepped(*built("bottlenecks"), is_chain=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_is_the_same_function(name: str, chain: Counted) -> None:
    model, x = built(name)
    exact = stepped(copy.deepcopy(model).double(), x.double(), is_chain=False)
    ours = stepped(model, x, is_chain=True)
    assert chain.times == 1
    assert ours.keys() == exact.keys()
    for key, value in exact.items():
        # The error of fp32 through up to ten layers, in which BatchNorm takes differences; torch's layers have more.
        torch.testing.assert_close(ours[key].to(value), value, rtol=0, atol=2e-4 * value.abs().max().item(), msg=key)


def test_building_normalised_maps_again_changes_no_bit(whole: dict[str, Tensor], chain: Counted) -> None:
    again, x = built("bottlenecks")
    set_recompute(again, "pointwise")
    rebuilt = stepped(again, x, is_chain=True)
    assert chain.times == 1
    assert all(torch.equal(whole[key], rebuilt[key]) for key in whole)


def test_bf16_is_as_near_to_fp32_as_the_layers_are(chain: Counted) -> None:
    model, x = built("bottlenecks")
    exact = stepped(copy.deepcopy(model), x, is_chain=False)
    with torch.autocast("cpu", torch.bfloat16):
        layers = stepped(copy.deepcopy(model), x, is_chain=False)
        ours = stepped(model, x, is_chain=True)
    assert chain.times == 1

    keys = [key for key in exact if key.startswith("d ")]

    def error(found: dict[str, Tensor]) -> float:
        """Over all gradients together: a single one may be lucky in one of the two."""
        relative = [(found[key] - exact[key]).norm() / exact[key].norm() for key in keys]
        return float(torch.stack(relative).square().mean().sqrt())

    assert ours["logits"].dtype is torch.bfloat16
    assert error(ours) < 1.25 * error(layers)


@pytest.mark.parametrize("frozen", ["conv1.", "layer2.0.downsample", "conv1. bn1. layer1."])
def test_frozen_parameters_get_no_gradient_and_change_no_other(
    frozen: str, whole: dict[str, Tensor], chain: Counted
) -> None:
    model, x = built("bottlenecks")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not key.startswith(tuple(frozen.split())))
    part = stepped(model, x, is_chain=True)
    free = {f"d {key}" for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert chain.times == 1
    assert free == {key for key in part if key.startswith("d ")} < whole.keys()
    assert all(torch.equal(part[key], whole[key]) for key in part)


def never_mind(*_: object) -> None:
    """A hook."""


@pytest.mark.parametrize(
    "change",
    [
        lambda model, x: model.eval(),
        lambda model, x: model.layer1[0].bn2.eval(),
        lambda model, x: model.layer2.register_forward_hook(never_mind),
        lambda model, x: set_recompute(model, "blocks"),
        lambda model, x: x.requires_grad_(),
        lambda model, x: setattr(model.layer1, "__class__", type("Other", (type(model.layer1),), {})),
        lambda model, x: setattr(model.bn1, "momentum", None),
        lambda model, x: vars(model.layer1[0].conv1).update(dilation=(2, 2), padding=(2, 2)),
        lambda model, x: setattr(model.maxpool, "stride", 1),
        lambda model, x: setattr(model.layer1[0], "relu", nn.Identity()),
        lambda model, x: model.layer2.__setitem__(1, nn.Identity()),
        lambda model, x: model.layer1.append(nn.ReLU()),
        lambda model, x: vars(model).update(num_stages=3) or setattr(model, "layer3", nn.Identity()),
    ],
    ids=[
        *("evaluating", "a norm frozen", "a hook", "blocks", "a gradient of the image", "another class", "momentum"),
        *("dilated", "pooling at stride 1", "no activation", "a block left out", "more than blocks", "no stage"),
    ],
)
def test_where_somebody_would_notice_layers_run_one_by_one(
    change: Callable[[ResNet, Tensor], object], chain: Counted
) -> None:
    model, x = built("basic")
    change(model, x)
    stepped(model, x, is_chain=True)
    assert chain.times == 0


# torch looks at the gradient of what enters a graph, and hides its own warning in a way that no error filter allows.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_calls_the_chain_and_sees_a_hook_that_came_later(chain: Counted) -> None:
    torch.compiler.reset()
    model, x = built("basic")
    theirs, compiled = stepped(copy.deepcopy(model), x, is_chain=False), torch.compile(model, backend="aot_eager")
    ours = stepped(compiled, x, is_chain=True)
    assert chain.times == 1
    for key, value in theirs.items():
        name = key if key == "logits" else key.replace("d ", "d _orig_mod.") if "d " in key else f"_orig_mod.{key}"
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4 * value.abs().max().item())
    model.layer1.register_forward_hook(never_mind)
    stepped(compiled, x, is_chain=True)
    assert chain.times == 1
