"""Fast forms under torch.compile on the GPU, on against off: a layer in bf16 and fp32, then a whole model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from halfstep.backend_flags import set_fp32_mode
from halfstep_train.kernels.fast_forms import FORMS, Form, force, is_wanted
from halfstep_train.models.layers import PatchConv2d
from halfstep_train.models.vit import build_vit

pytestmark = pytest.mark.gpu

FORMATS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative error (of norms) between two orders of summation: sums of up to 25,000 products in fp32, whose
gradients are differences, and results rounded to 8 bits."""


@pytest.fixture(autouse=True)
def _strict_fp32() -> Iterator[None]:
    torch.compiler.reset()
    with set_fp32_mode("ieee"):
        yield


def image(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape, device="cuda").to(memory_format=torch.channels_last)


def outcome(model: nn.Module, x: Tensor, dtype: torch.dtype, *forms: Form, on: bool) -> list[Tensor]:
    """Output, gradients of input and parameters, and buffers of a compiled copy."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    autocast = torch.autocast("cuda", dtype) if dtype is not torch.float32 else contextlib.nullcontext()
    with force(on, *forms), autocast:
        y = torch.compile(model, fullgraph=True)(x)
    y.backward(torch.linspace(-1, 1, y.numel(), device="cuda").sin().view(y.shape).to(y.dtype))
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [y.detach(), x.grad, *gradients, *(b for b in model.buffers() if b.is_floating_point())]


def assert_close(fast: list[Tensor], plain: list[Tensor], bound: float) -> None:
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours.double() - theirs.double()).norm() <= bound * theirs.double().norm() + 1e-12


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_compiled_patches_in_their_fast_form_agree_with_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = PatchConv2d(3, 64, 16).to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    fast, plain = (outcome(layer, image(4, 3, 64, 64), dtype, "patches", on=on) for on in (True, False))
    assert_close(fast, plain, FORMATS[dtype])


def test_a_compiled_vit_gives_the_same_gradients_in_fast_forms() -> None:
    torch.manual_seed(0)
    model = build_vit("vit_s_16", depth=2, heads=2, dim=64, patch=16, image_size=64, num_classes=10)
    model = model.to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
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
        seen.append(is_wanted("patches", x))
        return x + 1

    note(image(1, 1, 1, 1))
    torch.compile(note, backend="eager")(image(1, 1, 1, 1))
    assert seen == [False, True]
