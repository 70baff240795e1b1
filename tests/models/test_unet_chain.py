"""A whole U-Net as a chain of our own kernels against its layers: logits, gradients and running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from halfstep.kernels.fast_forms import forced
from halfstep.models.recompute import Recompute, set_recompute
from halfstep.models.unet import UNet

Outcome = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


def unet(**options: int) -> UNet:
    torch.manual_seed(0)
    model = UNet(**{"base_channels": 4, "depth": 2, "num_classes": 2} | options)
    for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)  # some below zero: a maximum is one of the normalised values
        nn.init.normal_(norm.bias, std=0.3)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def image(*size: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, *size).to(memory_format=torch.channels_last)


def outcome(model: nn.Module, x: Tensor, *, chain: bool, how: Recompute = "none", half: bool = False) -> Outcome:
    """Logits, gradients of all parameters, and buffers after a step."""
    model = copy.deepcopy(model)
    set_recompute(model, how)
    with forced(False), forced(chain, "chain"), torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(x)
    torch.manual_seed(2)
    (logits.float() * torch.randn(logits.shape)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return logits.detach(), gradients, dict(model.named_buffers())


@pytest.mark.parametrize(
    ("size", "options"),
    [((16, 16), {}), ((13, 11), {}), ((10, 14), {"num_classes": 5}), ((8, 9), {"base_channels": 16, "depth": 1})],
)
def test_the_chain_is_the_layers_in_fp32(size: tuple[int, int], options: dict[str, int]) -> None:
    model, x = unet(**options), image(*size)
    logits, gradients, buffers = outcome(model, x, chain=True)
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
