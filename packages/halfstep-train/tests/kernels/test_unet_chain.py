"""A whole U-Net as a chain of our own kernels against its layers: logits, gradients and running statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from halfstep.recompute import Recompute, set_recompute
from halfstep_train.kernels.fast_forms import force
from halfstep_train.models.layers import CentredConv2d, DoublingConvTranspose2d
from halfstep_train.workloads.segmentation import unet as unet_module
from halfstep_train.workloads.segmentation.unet import DoubleConv, UNet

pytest.importorskip("triton")
from halfstep_train.kernels import unet_chain  # noqa: E402
from halfstep_train.kernels.normalise_triton import compute_norm  # noqa: E402
from halfstep_train.kernels.unet_chain import Head, PoolConv, UpConcatConv  # noqa: E402

Outcome = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The images that went through the chain."""
    images: list[Tensor] = []
    original = unet_chain.compute_chained_logits

    def note(image: Tensor, *args: object, **options: object) -> Tensor:
        images.append(image)
        return original(image, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(unet_chain, "compute_chained_logits", note)
    return images


def unet(**options: int) -> UNet:
    torch.manual_seed(0)
    model = UNet(**{"base_channels": 4, "depth": 2, "num_classes": 2} | options)
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)  # some below zero: a maximum is one of the normalised values
        nn.init.normal_(norm.bias, std=0.3)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def image(*size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, *size).to(memory_format=torch.channels_last)


def outcome(
    model: nn.Module, x: Tensor, *, chain: bool, how: Recompute = "none", half: torch.dtype | None = None
) -> Outcome:
    """Logits, gradients of all parameters, and buffers after a step."""
    model = copy.deepcopy(model)
    set_recompute(model, how)
    autocast = torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None)
    with force(False), force(chain, "chain"), autocast:
        logits = model(x)
    torch.manual_seed(2)
    (logits.float() * torch.randn(logits.shape)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return logits.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize(
    ("size", "options"),
    [((8, 12), {}), ((11, 9), {"num_classes": 5}), ((8, 9), {"base_channels": 16, "depth": 1})],
)
def test_the_chain_is_the_layers_in_fp32(size: tuple[int, int], options: dict[str, int], chained: list[Tensor]) -> None:
    model, x = unet(**options), image(*size)
    logits, gradients, buffers = outcome(model, x, chain=True)
    assert len(chained) == 1
    plain_logits, plain_gradients, plain_buffers = outcome(model, x, chain=False)
    torch.testing.assert_close(logits, plain_logits, rtol=1e-4, atol=1e-4)
    for name, theirs in plain_gradients.items():
        # Both sum a few thousand fp32 terms in orders of their own.
        torch.testing.assert_close(gradients[name], theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-5)
    torch.testing.assert_close(buffers, plain_buffers, rtol=1e-4, atol=1e-5)


def test_what_is_not_kept_is_computed_again_to_the_bit() -> None:
    model, x = unet(base_channels=16, depth=1), image(9, 8)
    kept, again = outcome(model, x, chain=True), outcome(model, x, chain=True, how="pointwise")
    assert torch.equal(kept[0], again[0])
    for one, other in zip(kept[1:], again[1:], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def relative_error(ours: Outcome, exact: Outcome) -> float:
    """Of all gradients together."""
    difference, size = (
        torch.cat([f(ours[1][name].double(), exact[1][name].double()).flatten() for name in exact[1]]).norm().item()
        for f in (torch.sub, lambda _, theirs: theirs)
    )
    return difference / size


def test_in_a_half_format_the_chain_is_as_near_to_fp32_as_the_layers_are() -> None:
    # fp16, since Triton's interpreter multiplies bf16 matrices as if they were whole numbers.
    model, x = unet(base_channels=16, depth=1), image(10, 9)
    exact = outcome(model, x, chain=False)
    layers, chain = (outcome(model, x, chain=on, half=torch.float16) for on in (False, True))
    assert chain[0].dtype == layers[0].dtype == torch.float16
    # Every map on the way is rounded to 2⁻¹¹ of its size.
    torch.testing.assert_close(chain[0].float(), exact[0], rtol=0, atol=10 * 2**-11 * float(exact[0].abs().max()))
    # Gradients jump where a rounding turns a ReLU or a maximum over, in both alike: 0.03 to 0.12 was seen of each.
    assert max(relative_error(chain, exact), relative_error(layers, exact)) < 0.2


# torch's compiler looks at the gradient of what a graph break hands on, and hides the warning, but not from "error".
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_runs_the_chain_until_a_layer_is_frozen_or_watched(chained: list[Tensor]) -> None:
    torch.compiler.reset()
    model, x, seen = unet(base_channels=2, depth=1), image(4, 4), []
    plain = copy.deepcopy(model)
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
    with force(False), force(True, "chain"):
        compiled(x).backward()
        assert len(chained) == 1
        plain(x.clone().requires_grad_()).square().mean().backward()
        assert len(chained) == 1
        model.inc.double_conv[1].eval()
        compiled(x)
        model.train()
        model.outc.register_forward_hook(lambda *_: seen.append(True))
        compiled(x)
    assert len(chained) == 1
    assert seen == [True]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    """The gradients of a small chain, nothing frozen."""
    return outcome(unet(base_channels=2, depth=1), image(4, 4), chain=True)[1]


@pytest.mark.parametrize("frozen", ["inc.", "down1. up1.up", "outc. up1.conv", "inc. down1."])
def test_frozen_parameters_get_no_gradient_and_change_no_other(
    frozen: str, whole: dict[str, Tensor], chained: list[Tensor]
) -> None:
    model, x = unet(base_channels=2, depth=1), image(4, 4)
    with force(False), force(True, "chain"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen.split())))
        logits = model(x)
    torch.manual_seed(2)
    (logits * torch.randn(logits.shape)).sum().backward()
    assert len(chained) == 1
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) is parameter.requires_grad
        assert parameter.grad is None or torch.equal(parameter.grad, whole[name])


def with_unequal_halves(model: UNet) -> None:
    """5 channels are concatenated, 2 of the skip connection and 3 from below."""
    model.up1.up, model.up1.conv = DoublingConvTranspose2d(4, 3), DoubleConv(5, 2)


class Wrapped(nn.Module):
    """As an adapter or a profiler wraps a part of a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


UNSUITED: dict[str, tuple[dict[str, object], Callable[[UNet], object]]] = {
    "bilinear": ({"bilinear": True}, lambda model: None),
    "recomputed blocks": ({"checkpointing": True}, lambda model: None),
    "many classes": ({"num_classes": 9}, lambda model: None),
    "a part of another class": ({}, lambda model: setattr(model.inc.double_conv[1], "__class__", nn.BatchNorm2d)),
    # As a part that computes in another format has one.
    "a container of another class": (
        {},
        lambda model: setattr(model.inc, "__class__", type("Other", (DoubleConv,), {})),
    ),
    "a convolution with bias": (
        {},
        lambda model: model.inc.double_conv.__setitem__(3, nn.Conv2d(2, 2, 3, padding=1)),
    ),
    "a bias given later": ({}, lambda model: setattr(model.inc.double_conv[3], "bias", nn.Parameter(torch.ones(2)))),
    "reflecting": ({}, lambda model: setattr(model.inc.double_conv[3], "padding_mode", "reflect")),
    "dilated": ({}, lambda model: vars(model.inc.double_conv[3]).update(dilation=(2, 2), padding=(2, 2))),
    "a larger kernel": ({}, lambda model: model.inc.double_conv.__setitem__(3, CentredConv2d(2, 2, 5))),
    "no activation": ({}, lambda model: model.inc.double_conv.pop(5)),
    "a head without bias": ({}, lambda model: setattr(model.outc, "conv", nn.Conv2d(2, 2, 1, bias=False))),
    "a head of 3×3": ({}, lambda model: setattr(model.outc, "conv", nn.Conv2d(2, 2, 3, padding=1))),
    "another forward": ({}, lambda model: setattr(model.inc.double_conv[2], "forward", torch.tanh)),
    "a container wrapped": ({}, lambda model: setattr(model.inc, "double_conv", Wrapped(model.inc.double_conv))),
    "a level's container wrapped": (
        {},
        lambda model: setattr(model.down1, "maxpool_conv", Wrapped(model.down1.maxpool_conv)),
    ),
    "pooling rounds up": ({}, lambda model: setattr(model.down1.maxpool_conv[0], "ceil_mode", True)),
    "a level of another kind": ({}, lambda model: setattr(model, "down1", DoubleConv(2, 4))),
    "unequal halves": ({}, with_unequal_halves),
    "half parameters": ({}, lambda model: model.bfloat16()),
    "evaluation": ({}, lambda model: model.eval()),
}


@pytest.mark.parametrize("name", UNSUITED)
def test_what_the_chain_has_no_kernels_for_runs_layer_by_layer(name: str, chained: list[Tensor]) -> None:
    options, change = UNSUITED[name]
    model = UNet(**{"base_channels": 2, "depth": 1} | options)  # type: ignore[arg-type]
    change(model)
    with force(True, "chain"):
        model(image(4, 4).to(next(model.parameters()).dtype))
    assert not chained


def test_a_hook_on_all_modules_is_a_hook(chained: list[Tensor]) -> None:
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    with handle, force(True, "chain"):
        model = unet(base_channels=2, depth=1)
        model(image(4, 4))
    assert not chained
    assert model.inc in seen


def test_a_gpu_with_little_shared_memory_runs_layer_by_layer(
    chained: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unet_module, "has_room_for_tiles", lambda device: False)
    with force(True, "chain"):
        unet(base_channels=2, depth=1)(image(4, 4))
    assert not chained


# --- its kernels: pooling, doubling into a concatenation and the head, each against torch's layers ---

pytest.importorskip("triton")


def some_map(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator) + 0.5).to(memory_format=torch.channels_last)


def some_norm(channels: int) -> nn.BatchNorm2d:
    torch.manual_seed(channels)
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight)  # some below zero, where the largest value is not the largest normalised one
    nn.init.normal_(norm.bias)
    return norm


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """The results, then the gradient of every input, of a sum with random factors."""
    inputs = tuple(leaf(x) for x in inputs)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(9)
    sum((r.float() * torch.randn(r.shape)).sum() for r in results).backward()  # type: ignore[union-attr]
    return [*(r.detach() for r in results), *(x.grad for x in inputs if x.grad is not None)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], bound: float) -> None:
    """Compare errors with the largest value of the tensor: a value near zero is a difference of larger ones."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=bound * float(other.abs().max()))


def pooled_and_skip(norm: nn.BatchNorm2d, *, chain: bool) -> Callable[..., tuple[Tensor, ...]]:
    """What the next level's convolution gives, and the skip connection behind a 1×1 convolution of its own."""

    def layers(y: Tensor, weight: Tensor, bias: Tensor, w_conv: Tensor, w_skip: Tensor) -> tuple[Tensor, ...]:
        z = F.relu(F.batch_norm(y, None, None, weight, bias, training=True))
        return F.conv2d(F.max_pool2d(z, 2), w_conv.to(y.dtype), padding=1), F.conv2d(z, w_skip.to(y.dtype))

    def kernels(y: Tensor, weight: Tensor, bias: Tensor, w_conv: Tensor, w_skip: Tensor) -> tuple[Tensor, ...]:
        how = compute_norm(y.detach(), norm)
        u, promise = PoolConv.apply(y, weight, bias, w_conv, how)
        return u, Skip.apply(promise, y.detach(), how, w_skip)

    return kernels if chain else layers


class Skip(torch.autograd.Function):
    """The other consumer: a promise's gradient has a second half that belongs to another consumer."""

    @staticmethod
    def forward(ctx, promise, y, how, w_skip):  # type: ignore[no-untyped-def]
        z = F.relu(y.float() * how.scale.view(1, -1, 1, 1) + how.offset.view(1, -1, 1, 1)).to(y.dtype)
        ctx.save_for_backward(z, w_skip)
        return F.conv2d(z, w_skip.to(y.dtype))

    @staticmethod
    def backward(ctx, dskip):  # type: ignore[no-untyped-def]
        z, w = ctx.saved_tensors
        dz = F.conv_transpose2d(dskip, w.to(dskip.dtype))
        other = torch.full_like(dz, 7)
        dw = torch.einsum("nohw,nihw->oi", dskip.float(), z.float())[:, :, None, None]
        return torch.cat([dz, other], 1).contiguous(memory_format=torch.channels_last), None, None, dw


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (1, 24, 5, 7), (1, 130, 2, 2)])
def test_pooling_and_its_skip_connection(shape: tuple[int, ...]) -> None:
    channels = shape[1]
    norm, y = some_norm(channels), some_map(*shape)
    weights = (norm.weight, norm.bias, some_map(5, channels, 3, 3), some_map(3, channels, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 1e-5)


def test_of_equal_values_in_a_window_the_first_gets_the_gradient_as_torch_has_it() -> None:
    norm, y = some_norm(4), some_map(2, 4, 8, 8).div(2).round()
    weights = (norm.weight, norm.bias, some_map(5, 4, 3, 3), some_map(3, 4, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 1e-5)


def test_pooling_in_bf16_is_as_near_as_its_roundings() -> None:
    # Quarters are equal or far apart: which of two nearly equal values is the maximum may differ.
    norm, y = some_norm(8), some_map(2, 8, 6, 6).mul(4).round().div(4).bfloat16()
    norm.weight.data.sign_()
    weights = (norm.weight, norm.bias, some_map(5, 8, 3, 3), some_map(3, 8, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    # 2⁻⁸ a rounding; torch rounds the normalised map's gradient once more than we do, before it is summed.
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 4 * 2**-8)


def test_a_nan_comes_through_pooling_and_head() -> None:
    norm, y = some_norm(4), some_map(1, 4, 4, 4)
    y[0, 2, 3, 3] = float("nan")
    how = compute_norm(y, norm)
    u, _ = PoolConv.apply(y, norm.weight, norm.bias, some_map(1, 4, 3, 3), how)
    assert u.isnan().all()
    assert Head.apply(y, norm.weight, norm.bias, some_map(2, 4, 1, 1), torch.zeros(2), how).isnan().all()


@pytest.mark.parametrize(
    ("deep_shape", "size"), [((2, 8, 3, 4), (6, 8)), ((1, 6, 3, 2), (7, 5)), ((2, 34, 2, 3), (5, 7))]
)
def test_doubling_into_the_concatenation(deep_shape: tuple[int, ...], size: tuple[int, int]) -> None:
    n, depth = deep_shape[:2]
    channels = depth // 2
    norm, skip_norm, skip = some_norm(depth), some_norm(channels), some_map(n, channels, *size, seed=1)
    inputs = (norm.weight, norm.bias, some_map(depth, channels, 2, 2), torch.randn(channels), some_map(3, depth, 3, 3))

    def layers(deep: Tensor, weight: Tensor, bias: Tensor, w_up: Tensor, b_up: Tensor, w_conv: Tensor) -> Tensor:
        z = F.relu(F.batch_norm(deep, None, None, weight, bias, training=True))
        up = F.conv_transpose2d(z, w_up, b_up, stride=2)
        dy, dx = size[0] - up.shape[2], size[1] - up.shape[3]
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        other = F.relu(
            F.batch_norm(skip, None, None, skip_norm.weight.detach(), skip_norm.bias.detach(), training=True)
        )
        return F.conv2d(torch.cat([other, up], 1), w_conv, padding=1)

    def kernels(deep: Tensor, weight: Tensor, bias: Tensor, w_up: Tensor, b_up: Tensor, w_conv: Tensor) -> Tensor:
        promise = torch.zeros(n, depth, *size)
        how, skip_how = compute_norm(deep.detach(), norm), compute_norm(skip, skip_norm)
        return UpConcatConv.apply(promise, skip, skip_how, deep, weight, bias, w_up, b_up, w_conv, how, False)

    deep = some_map(*deep_shape)
    assert_near(gradients(kernels, deep, *inputs), gradients(layers, deep, *inputs), 1e-5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last),
    "channels first": lambda g: g.contiguous(),
    "columns before rows": lambda g: g.mT.contiguous().mT,
}


@pytest.mark.parametrize(
    ("shape", "classes", "layout"),
    [
        ((2, 8, 5, 6), 2, "channels last"),
        ((1, 20, 4, 3), 8, "channels first"),
        ((2, 3, 5, 5), 1, "columns before rows"),
    ],
)
def test_the_head_whose_logits_gradient_lies_in_any_order(shape: tuple[int, ...], classes: int, layout: str) -> None:
    norm, y = some_norm(shape[1]), some_map(*shape)
    inputs = (norm.weight, norm.bias, some_map(classes, shape[1], 1, 1), torch.randn(classes))

    def layers(y: Tensor, weight: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.batch_norm(y, None, None, weight, bias, training=True)), w_out, b_out)

    def kernels(y: Tensor, weight: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        logits: Tensor = Head.apply(y, weight, bias, w_out, b_out, compute_norm(y.detach(), norm))
        logits.register_hook(LAYOUTS[layout])
        return logits

    assert_near(gradients(kernels, y, *inputs), gradients(layers, y, *inputs), 1e-5)
