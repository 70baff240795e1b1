"""A ResNet as a chain of kernels against its own layers one by one: logits, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.recompute import set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.workloads.classification.resnet import Bottleneck, ResNet, build_resnet

pytest.importorskip("triton")

from halfstep_train.kernels import resnet_chain, resnet_triton  # noqa: E402
from halfstep_train.kernels.normalise_triton import Norm, compute_norm, compute_raw_gradient  # noqa: E402
from halfstep_train.kernels.resnet_triton import (  # noqa: E402
    compute_join_gradient,
    compute_pair_gradients,
    compute_stem_pool_gradient,
    join_maps,
    pool_stem,
)


def halving_early() -> ResNet:
    """Bottlenecks as first published, which halve the size in their 1×1 convolution: so does the shortcut."""
    model = build_resnet("resnet50", blocks=(1, 2), width=4, num_classes=3)
    first = model.get_submodule("layer2.0")
    assert isinstance(first, Bottleneck)
    first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)
    return model


MODELS: dict[str, tuple[Callable[[], ResNet], tuple[int, int]]] = {
    "bottlenecks": (lambda: build_resnet("resnet50", blocks=(1, 2), width=4, num_classes=3), (17, 15)),
    "bottlenecks, halving early": (halving_early, (16, 16)),
    "basic": (lambda: build_resnet("resnet18", blocks=(1, 2), width=8, num_classes=3), (19, 16)),
    "basic, small": (lambda: build_resnet("resnet18", blocks=(2, 1), width=8, num_classes=3, stem="small"), (9, 11)),
    "our own stem": (lambda: build_resnet("resnet18", blocks=(1,), width=16, num_classes=3), (16, 16)),
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


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return what counts how often the chain ran."""
    counted = Mock(side_effect=resnet_chain.run_resnet_chain)
    monkeypatch.setattr("halfstep_train.kernels.resnet_chain.run_resnet_chain", counted)
    return counted


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
def test_the_chain_is_the_same_function(name: str, chain: Mock) -> None:
    model, x = built(name)
    exact = stepped(copy.deepcopy(model).double(), x.double(), is_chain=False)
    ours = stepped(model, x, is_chain=True)
    assert chain.call_count == 1
    assert ours.keys() == exact.keys()
    for key, value in exact.items():
        # The error of fp32 through up to ten layers, in which BatchNorm takes differences; torch's layers have more.
        torch.testing.assert_close(ours[key].to(value), value, rtol=0, atol=2e-4 * value.abs().max().item(), msg=key)


def test_building_normalised_maps_again_changes_no_bit(whole: dict[str, Tensor], chain: Mock) -> None:
    again, x = built("bottlenecks")
    set_recompute(again, "pointwise")
    rebuilt = stepped(again, x, is_chain=True)
    assert chain.call_count == 1
    assert all(torch.equal(whole[key], rebuilt[key]) for key in whole)


def test_bf16_is_as_near_to_fp32_as_the_layers_are(chain: Mock) -> None:
    model, _ = built("bottlenecks")
    x = torch.randn(3, 3, 33, 27).to(memory_format=torch.channels_last)  # roundings of a small one do not average
    exact = stepped(copy.deepcopy(model), x, is_chain=False)
    with torch.autocast("cpu", torch.bfloat16):
        layers = stepped(copy.deepcopy(model), x, is_chain=False)
        ours = stepped(model, x, is_chain=True)
    assert chain.call_count == 1

    keys = [key for key in exact if key.startswith("d ")]

    def error(found: dict[str, Tensor]) -> float:
        """Over all gradients together: a single one may be lucky in one of the two."""
        relative = [(found[key] - exact[key]).norm() / exact[key].norm() for key in keys]
        return float(torch.stack(relative).square().mean().sqrt())

    assert ours["logits"].dtype is torch.bfloat16
    assert error(ours) < 1.25 * error(layers)


@pytest.mark.parametrize("frozen", ["conv1.", "layer2.0.downsample", "conv1. bn1. layer1."])
def test_frozen_parameters_get_no_gradient_and_change_no_other(
    frozen: str, whole: dict[str, Tensor], chain: Mock
) -> None:
    model, x = built("bottlenecks")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not key.startswith(tuple(frozen.split())))
    part = stepped(model, x, is_chain=True)
    free = {f"d {key}" for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert chain.call_count == 1
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
    change: Callable[[ResNet, Tensor], object], chain: Mock
) -> None:
    model, x = built("basic")
    change(model, x)
    stepped(model, x, is_chain=True)
    assert chain.call_count == 0


# torch looks at the gradient of what enters a graph, and hides its own warning in a way that no error filter allows.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_calls_the_chain_and_sees_a_hook_that_came_later(chain: Mock) -> None:
    torch.compiler.reset()
    model, x = built("basic")
    theirs, compiled = stepped(copy.deepcopy(model), x, is_chain=False), torch.compile(model, backend="aot_eager")
    ours = stepped(compiled, x, is_chain=True)
    assert chain.call_count == 1
    for key, value in theirs.items():
        name = key if key == "logits" else key.replace("d ", "d _orig_mod.") if "d " in key else f"_orig_mod.{key}"
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4 * value.abs().max().item())
    model.layer1.register_forward_hook(never_mind)
    stepped(compiled, x, is_chain=True)
    assert chain.call_count == 1


# --- its kernels against torch's own layers, values and gradients, on odd sizes and many channels ---

SHAPES = [(3, 5, 5, 6), (2, 300, 3, 3)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def rows_of_channels(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def norm_with_gains_of_both_signs(num_channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(num_channels)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def prepared(y: Tensor) -> tuple[nn.BatchNorm2d, Norm]:
    norm = norm_with_gains_of_both_signs(y.shape[1])
    with torch.no_grad():
        return norm, compute_norm(y, norm)


def close(ours: Tensor, theirs: Tensor) -> None:
    """fp32 sums of a few hundred terms in another order: a few units of 2⁻²⁴ of the largest term."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


@shapes
@pytest.mark.parametrize("kind", ["none", "identity", "projected"])
def test_a_block_ends_in_the_relu_of_the_normalised_map_and_its_shortcut(shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    y, other = rows_of_channels(*shape), rows_of_channels(*shape)
    (norm, how), (other_norm, other_how) = prepared(y), prepared(other)
    shortcut = {"none": torch.zeros(()), "identity": other, "projected": other_norm(other)}[kind]
    ours = join_maps(y, how, None if kind == "none" else other, other_how if kind == "projected" else None)
    close(ours, (norm(y) + shortcut).relu())


def test_what_is_not_finite_stays_so_behind_the_relu_and_the_pooling() -> None:
    y = rows_of_channels(2, 4, 5, 5)
    y[0, 1, 2, 2] = float("nan")
    _, how = prepared(y)
    assert join_maps(y, how, y, None)[:, 1].isnan().all()
    pool = pool_stem(y, how)
    assert pool.z[:, 1].isnan().all()
    assert pool.z[:, [0, 2, 3]].isfinite().all()


@shapes
@pytest.mark.parametrize(("second", "num_raws"), [("none", 2), ("dense", 1), ("even pixels", 2)])
def test_the_gradient_of_a_join_sums_what_its_readers_sent(shape: tuple[int, ...], second: str, num_raws: int) -> None:
    torch.manual_seed(1)
    n, c, height, width = shape
    first, dense, z = (rows_of_channels(*shape) for _ in range(3))
    even = rows_of_channels(n, c, (height + 1) // 2, (width + 1) // 2)
    spread = torch.zeros(shape)
    spread[:, :, ::2, ::2] = even
    raws = [(y, prepared(y)[1]) for y in (rows_of_channels(*shape) for _ in range(num_raws))]
    dzs = {"none": [first], "dense": [first, dense], "even pixels": [first, even]}[second]
    g, sums = compute_join_gradient(dzs, z, raws)
    expected = (first + {"none": 0, "dense": dense, "even pixels": spread}[second]) * (z > 0)
    assert torch.equal(g, expected)
    for (y, how), found in zip(raws, sums, strict=True):
        gx = (expected * (y - how.mean.view(1, -1, 1, 1))).sum((0, 2, 3))
        close(found.g, expected.sum((0, 2, 3)))
        close(found.gx, gx)
        close(found.weight, gx * how.inverse)


@shapes
def test_the_gradients_of_two_raw_maps_in_one_pass_are_those_of_each_alone(shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    g, z = rows_of_channels(*shape), rows_of_channels(*shape).abs()
    raws = [(y, prepared(y)[1]) for y in (rows_of_channels(*shape) for _ in range(2))]
    g, sums = compute_join_gradient([g], z, raws)
    for ours, (y, how), its_sums in zip(compute_pair_gradients(g, raws, sums), raws, sums, strict=True):
        close(ours, compute_raw_gradient(g, y, how, its_sums, masked=False))


def test_few_programs_walk_over_many_tiles_to_the_end_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    for name in ("SUMS", "MAPS", "POOLS"):
        monkeypatch.setattr(resnet_triton, name, replace(getattr(resnet_triton, name), num_programs=2))
    y = rows_of_channels(3, 64, 9, 11)
    norm, how = prepared(y)
    _, (sums,) = compute_join_gradient([y], y, [(y, how)])
    close(sums.g, (y * (y > 0)).sum((0, 2, 3)))
    close(join_maps(y, how, y, None), (norm(y) + y).relu())
    close(pool_stem(y, how).z, pooled_by_torch(y, norm))


def pooled_by_torch(y: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.max_pool2d(norm(y).relu(), 3, stride=2, padding=1)


@shapes
def test_pooling_normalises_on_the_way_and_sends_each_gradient_where_its_maximum_was(shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    y = rows_of_channels(*shape).requires_grad_()
    norm, how = prepared(y.detach())
    expected = pooled_by_torch(y, norm)
    dz = torch.randn(expected.shape).to(memory_format=torch.channels_last)
    expected.backward(dz)
    pool = pool_stem(y.detach(), how)
    g, (sums,) = compute_join_gradient([dz], pool.z, [(pool.raw, how)])
    close(pool.z, expected)
    assert y.grad is not None
    close(compute_stem_pool_gradient(g, pool.places, y.detach(), how, sums), y.grad)
    for ours, parameter in ((sums.g, norm.bias), (sums.weight, norm.weight)):
        assert parameter.grad is not None
        close(ours, parameter.grad)


def test_of_equal_maxima_the_first_in_reading_order_gets_the_gradient_as_in_torch() -> None:
    torch.manual_seed(4)
    y = torch.randint(0, 3, (2, 8, 7, 6)).float().to(memory_format=torch.channels_last).requires_grad_()
    norm = nn.BatchNorm2d(8)
    nn.init.ones_(norm.bias)
    with torch.no_grad():
        how = compute_norm(y, norm)
    _, indices = F.max_pool2d(norm(y).relu(), 3, stride=2, padding=1, return_indices=True)
    places = pool_stem(y.detach(), how).places
    top, left = torch.meshgrid(torch.arange(4) * 2 - 1, torch.arange(3) * 2 - 1, indexing="ij")
    assert torch.equal((top + places // 3) * 6 + left + places % 3, indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_maps_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    y, other = (rows_of_channels(2, 16, 6, 6).to(dtype) for _ in range(2))
    (norm, how), (other_norm, other_how) = prepared(y), prepared(other)
    expected = (norm(y.float()) + other_norm(other.float())).relu()
    ours = join_maps(y, how, other, other_how)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
