"""Every fast form against torch's layer in fp64: values and gradients; then whole models, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.kernels.fast_forms import FORMS, Form, force, is_wanted
from halfstep_train.models.layers import PatchConv2d
from halfstep_train.models.vit import build_vit

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
    with force(False):
        plain = outcome(layer, x)
    with force(True):
        fast = outcome(layer, x)
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


@layouts
def test_a_convolution_of_patches(layout: torch.memory_format) -> None:
    assert_same_function(PatchConv2d(3, 5, 4), image(2, 3, 8, 12, layout=layout))


def test_a_layer_that_was_told_otherwise_since_it_was_built_is_torchs() -> None:
    layer = PatchConv2d(3, 4, 4)
    layer.stride = (2, 2)
    assert_same_function(layer, image(2, 3, 8, 8))


def tiny_vit() -> nn.Module:
    return build_vit("vit_s_16", depth=2, heads=2, dim=16, patch=4, image_size=16, num_classes=3)


@pytest.mark.slow  # compiles the whole model
def test_a_compiled_step_in_fast_forms_is_the_plain_step() -> None:
    torch.manual_seed(0)
    plain = tiny_vit().double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in plain.parameters():  # a gain or a head of zero would hide what stands before it
        nn.init.normal_(parameter, std=0.3) if not parameter.any() else None
    fast = copy.deepcopy(plain)
    x = image(4, 3, 16, 16)
    plain(x).square().mean().backward()
    with force(True):
        torch.compile(fast, backend="aot_eager_decomp_partition", fullgraph=True)(x).square().mean().backward()
    assert list(plain.state_dict()) == list(fast.state_dict())
    for (key, theirs), (_, ours) in zip(plain.named_parameters(), fast.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda text, key=key: f"{key}: {text}")
    torch.testing.assert_close(dict(fast.named_buffers()), dict(plain.named_buffers()))


def test_the_last_block_in_its_fast_form_gives_the_class_token_alone() -> None:
    model, seen = tiny_vit(), []
    model.get_submodule("encoder.layers.encoder_layer_1").register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    for on in (False, True):
        with force(on):
            model(torch.randn(2, 3, 16, 16))
    assert seen == [torch.Size([2, 17, 16]), torch.Size([2, 1, 16])]


@pytest.mark.parametrize("form", FORMS)
def test_eager_code_and_the_cpu_want_no_fast_form(form: Form) -> None:
    x, seen = torch.ones(1, 3, 2, 2), []

    def note(x: Tensor) -> Tensor:
        seen.append(is_wanted(form, x))
        return x + 1

    note(x)
    torch.compile(note, backend="eager")(x)
    assert seen == [False, False]
