"""Every fast form against torch's layer in fp64: values and gradients; then whole models, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.batch_norm import shifted_statistics
from halfstep.kernels.fast_forms import FORMS, Form, forced, wanted
from halfstep.models.layers import (
    BatchNorm2d,
    CentredConv2d,
    DoublingConvTranspose2d,
    HalvingMaxPool2d,
    PatchConv2d,
)
from halfstep.models.recompute import Recompute, set_recompute
from halfstep.models.resnet import resnet
from halfstep.models.unet import UNet
from halfstep.models.vit import vit

layouts = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])


def image(*shape: int, layout: torch.memory_format = torch.channels_last) -> Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape, dtype=torch.float64).to(memory_format=layout)


def outcome(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, gradients of the input and of every parameter, and the buffers, in fp64."""
    layer, x = copy.deepcopy(layer).double(), x.clone().requires_grad_()
    y = layer(x)
    torch.manual_seed(4)
    (y * torch.randn(y.shape, dtype=y.dtype)).sum().backward()
    assert x.grad is not None
    parameters = [p.grad for p in layer.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *parameters, *layer.buffers()]


def assert_same_function(layer: nn.Module, x: Tensor) -> None:
    """fp64 differs by the order of its sums only: torch's own tolerance for it, 1e-7, is far above that."""
    with forced(False):
        plain = outcome(layer, x)
    with forced(True):
        fast = outcome(layer, x)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@layouts
@pytest.mark.parametrize("channels", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_a_convolution_of_few_channels(kernel: int, stride: int, channels: int, layout: torch.memory_format) -> None:
    assert_same_function(CentredConv2d(channels, 4, kernel, stride), image(2, channels, 10, 8, layout=layout))


@pytest.mark.parametrize("size", [(9, 8), (8, 9), (9, 9)])
def test_an_odd_size_at_stride_2_takes_the_plain_convolution(size: tuple[int, int]) -> None:
    assert_same_function(CentredConv2d(3, 4, 7, 2), image(2, 3, *size))


@pytest.mark.parametrize("kernel", [3, 7])
def test_the_convolution_of_an_image_computes_no_gradient_of_the_image(kernel: int) -> None:
    layer, asked = CentredConv2d(3, 4, kernel, 2).double(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if op is torch.ops.aten.convolution_backward.default:
                asked.append(args[-1])
            return op(*args, **(kwargs or {}))

    with forced(True), Watch():
        layer(image(1, 3, 8, 8)).sum().backward()
    assert asked == [[False, True, False]]


@layouts
def test_a_convolution_of_patches(layout: torch.memory_format) -> None:
    assert_same_function(PatchConv2d(3, 5, 4), image(2, 3, 8, 12, layout=layout))


@layouts
def test_a_transposed_convolution_that_doubles(layout: torch.memory_format) -> None:
    assert_same_function(DoublingConvTranspose2d(6, 3), image(2, 6, 3, 5, layout=layout))


@layouts
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 2, 7, 9), (2, 1, 1, 5), (3, 2, 1, 1)])
def test_batch_norm_in_training(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    layer = BatchNorm2d(shape[1])
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    assert_same_function(layer, image(*shape, layout=layout) * 2 + 1)


def test_batch_norm_in_evaluation_uses_the_running_statistics() -> None:
    assert_same_function(BatchNorm2d(3).eval(), image(2, 3, 4, 4))


def test_batch_norm_of_one_value_a_channel_is_torchs_error() -> None:
    with forced(True), pytest.raises(ValueError, match="more than 1 value"):
        BatchNorm2d(3)(torch.zeros(1, 3, 1, 1))


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (CentredConv2d(3, 4, 3, 2), {"dilation": (2, 2), "padding": (2, 2)}),
        (CentredConv2d(3, 4, 3, 2), {"padding_mode": "circular", "_reversed_padding_repeated_twice": [1, 1, 1, 1]}),
        (CentredConv2d(3, 4, 3, 2), {"bias": nn.Parameter(torch.ones(4))}),
        (PatchConv2d(3, 4, 4), {"stride": (2, 2)}),
        (DoublingConvTranspose2d(3, 4), {"stride": (1, 1)}),
        (BatchNorm2d(3), {"momentum": None}),
        (HalvingMaxPool2d(2), {"stride": 1}),
        (HalvingMaxPool2d(3), {"ceil_mode": True}),
    ],
)
def test_a_layer_that_was_told_otherwise_since_it_was_built_is_torchs(layer: nn.Module, told: dict[str, Any]) -> None:
    for name, value in told.items():
        setattr(layer, name, value)
    assert_same_function(layer, image(2, 3, 8, 8))


@pytest.mark.parametrize("ratio", [0, 1, 100, 10_000])
def test_fp32_statistics_are_exact_to_a_few_roundings_however_far_the_mean_is(ratio: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(8, 16, 32, 32, dtype=torch.float64) + ratio).float()
    mean, variance = shifted_statistics(x)
    exact = x.double()
    # What the docstring states, with r up to 4 and 8 for the summation: 2⁻²³ · 17 · 8.
    torch.testing.assert_close(variance.double(), exact.var((0, 2, 3), correction=0), rtol=1.6e-5, atol=0)
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=2**-22, atol=2**-20)


def test_a_constant_channel_has_variance_zero_not_below() -> None:
    _, variance = shifted_statistics(torch.full((2, 1, 8, 8), 0.1))
    assert variance.item() == 0


def test_bf16_comes_back_as_bf16_and_as_near_as_torchs() -> None:
    torch.manual_seed(0)
    layer, x = BatchNorm2d(4), torch.randn(4, 4, 8, 8).bfloat16()
    with forced(True):
        y = layer(x)
    assert y.dtype is torch.bfloat16
    # Both round an fp32 result once, so they differ by one rounding at most.
    torch.testing.assert_close(y, BatchNorm2d(4)(x), rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 1, 0, 0), (1, 1, 3, 2)])
def test_what_is_not_finite_reaches_output_and_running_statistics(bad: float, place: tuple[int, ...]) -> None:
    layer, x = BatchNorm2d(3), torch.randn(2, 3, 4, 4)
    x[place] = bad
    with forced(True):
        y = layer(x)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert not layer.running_mean[1].isfinite()
    assert layer.running_var.isnan().tolist() == [False, True, False]
    assert y[:, 1].isnan().all()
    assert y[:, ::2].isfinite().all()


@layouts
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (2, 3), (5, 6)])
@pytest.mark.parametrize("kernel", [2, 3])
def test_max_pooling(kernel: int, size: tuple[int, int], layout: torch.memory_format) -> None:
    x = image(2, 3, *size, layout=layout)
    assert_same_function(HalvingMaxPool2d(kernel), x)
    # Whole numbers and zeros after ReLU are full of ties.
    assert_same_function(HalvingMaxPool2d(kernel), x.round().relu())


@pytest.mark.parametrize("kernel", [2, 3])
def test_max_pooling_hands_nan_on_and_its_gradient_back(kernel: int) -> None:
    layer, x = HalvingMaxPool2d(kernel), image(1, 1, 6, 6)
    x[0, 0, 3, 3] = float("nan")
    results = []
    for on in (False, True):
        leaf = x.clone().requires_grad_()
        with forced(on):
            y = layer(leaf)
        y.sum().backward()
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    torch.testing.assert_close(results[0], results[1], equal_nan=True)
    assert results[1][0].isnan().sum() == (1 if kernel == 2 else 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(base_channels=4, depth=1),
    "resnet": lambda: resnet("resnet50", blocks=(1,), width=4, num_classes=3),
    "vit": lambda: vit("vit_s_16", depth=2, heads=2, dim=16, patch=4, image_size=16, num_classes=3, registers=2),
}


@pytest.mark.parametrize(("name", "how"), [("unet", "none"), ("resnet", "blocks"), ("vit", "none")])
def test_a_compiled_step_in_fast_forms_is_the_plain_step(name: str, how: Recompute) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in plain.parameters():  # a gain or a head of zero would hide what stands before it
        nn.init.normal_(parameter, std=0.3) if not parameter.any() else None
    fast = copy.deepcopy(plain)
    set_recompute(fast, how)
    x = image(4, 3, 16, 16)
    plain(x).square().mean().backward()
    with forced(True):
        torch.compile(fast, backend="aot_eager_decomp_partition", fullgraph=True)(x).square().mean().backward()
    assert list(plain.state_dict()) == list(fast.state_dict())
    for (key, theirs), (_, ours) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")
    torch.testing.assert_close(dict(fast.named_buffers()), dict(plain.named_buffers()))


def test_the_last_block_in_its_fast_form_gives_the_class_token_alone() -> None:
    model, seen = MODELS["vit"](), []
    model.get_submodule("encoder.layers.encoder_layer_1").register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    for on in (False, True):
        with forced(on):
            model(torch.randn(2, 3, 16, 16))
    assert seen == [torch.Size([2, 19, 16]), torch.Size([2, 1, 16])]


@pytest.mark.parametrize("form", FORMS)
def test_eager_code_and_the_cpu_want_no_fast_form(form: Form) -> None:
    x, seen = torch.ones(1, 3, 2, 2), []

    def note(x: Tensor) -> Tensor:
        seen.append(wanted(form, x))
        return x + 1

    note(x)
    torch.compile(note, backend="eager")(x)
    assert seen == [False, False]


def test_forcing_one_form_leaves_the_others_and_ends_with_its_block() -> None:
    x = torch.ones(1)
    with forced(True, "max_pool"):
        with forced(False, "max_pool"):
            assert not wanted("max_pool", x)
        assert [form for form in FORMS if wanted(form, x)] == ["max_pool"]
    assert not wanted("max_pool", x)
