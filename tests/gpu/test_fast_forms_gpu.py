"""Fast forms under torch.compile on the GPU, on against off: one layer each in bf16 and fp32, then whole models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.fast_forms import FORMS, Form, forced, wanted
from halfstep.models.layers import BatchNorm2d, CentredConv2d, DoublingConvTranspose2d, HalvingMaxPool2d, PatchConv2d
from halfstep.models.resnet import resnet
from halfstep.models.unet import UNet
from halfstep.models.vit import vit
from halfstep.precision.backend import fp32_mode

pytestmark = pytest.mark.gpu

LAYERS: dict[str, tuple[Form, Callable[[], nn.Module], tuple[int, ...]]] = {
    "stem": ("few_channels", lambda: CentredConv2d(3, 64, 7, 2), (4, 3, 64, 64)),
    "batch_norm": ("batch_norm", lambda: BatchNorm2d(64), (8, 64, 56, 56)),
    "patches": ("patches", lambda: PatchConv2d(3, 64, 16), (4, 3, 64, 64)),
    "upsampling": ("upsampling", lambda: DoublingConvTranspose2d(64, 32), (4, 64, 16, 16)),
}
FORMATS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error (of norms) between two orders of summation: sums of up to 25,000 products in fp32, whose
gradients are differences, and results rounded to 8 bits."""


@pytest.fixture(autouse=True)
def _strict_fp32() -> Iterator[None]:
    torch.compiler.reset()
    with fp32_mode("ieee"):
        yield


def image(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, device="cuda").to(memory_format=torch.channels_last)


def outcome(model: nn.Module, x: Tensor, dtype: torch.dtype, *forms: Form, on: bool) -> list[Tensor]:
    """Output, gradients of input and parameters, and buffers of a compiled copy."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    autocast = torch.autocast("cuda", dtype) if dtype is not torch.float32 else contextlib.nullcontext()
    with forced(on, *forms), autocast:
        y = torch.compile(model, fullgraph=True)(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").sin().view(y.shape).to(y.dtype))
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *(b for b in model.buffers() if b.is_floating_point())]


def assert_close(fast: list[Tensor], plain: list[Tensor], bound: float) -> None:
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm() + 1e-12


def layer_of(name: str) -> tuple[Form, nn.Module, Tensor]:
    form, make, shape = LAYERS[name]
    torch.manual_seed(0)
    return form, make().to("cuda", memory_format=torch.channels_last), image(*shape)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_in_its_fast_form_agrees_with_torchs(name: str, dtype: torch.dtype) -> None:
    form, layer, x = layer_of(name)
    assert_close(outcome(layer, x, dtype, form, on=True), outcome(layer, x, dtype, form, on=False), FORMATS[dtype])


@pytest.mark.parametrize("size", [(64, 64), (57, 62)])
@pytest.mark.parametrize("kernel", [2, 3])
def test_gathered_max_pooling_is_torchs_exactly(kernel: int, size: tuple[int, int]) -> None:
    layer, x = HalvingMaxPool2d(kernel), image(4, 64, *size).relu()
    fast = outcome(layer, x, torch.float32, "max_pool", on=True)
    plain = outcome(layer, x, torch.float32, "max_pool", on=False)
    assert torch.equal(fast[0], plain[0])
    # A pixel that is the maximum of several windows sums their gradients: at most 4, in any order.
    torch.testing.assert_close(fast[1], plain[1], rtol=0, atol=4 * 2**-23)
    again = outcome(layer, x, torch.float32, "max_pool", on=True)
    assert torch.equal(fast[1], again[1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": lambda: UNet(base_channels=16, depth=2),
    "resnet": lambda: resnet("resnet50", blocks=(1, 1), width=16, num_classes=10),
    "vit": lambda: vit("vit_s_16", depth=2, heads=2, dim=64, patch=16, image_size=64, num_classes=10),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_gives_the_same_gradients_in_fast_forms(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in model.parameters():  # a gain or a head of zero would hide what stands before it
        nn.init.normal_(parameter, std=0.3) if not parameter.any() else None
    x = image(8, 3, 64, 64)
    forms = [form for form in FORMS if form != "chain"]  # which has tests of its own, and is not part of one graph
    plain = outcome(model, x, torch.float32, *forms, on=False)
    # Rounding grows through the layers: normalised activations flip at ReLU's corner.
    assert_close(outcome(model, x, torch.float32, *forms, on=True), plain, 1e-2)


def test_compiled_code_on_the_gpu_wants_them_and_eager_code_does_not() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(wanted("max_pool", x))
        return x + 1

    note(image(1, 1, 1, 1))
    torch.compile(note, backend="eager")(image(1, 1, 1, 1))
    assert seen == [False, True]
