"""Convolutions between normalised maps against torch's layers, and when models may run as such chains."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.kernels.chain import (
    NormReluConv,
)
from halfstep_train.kernels.fast_forms import can_chain, force, has_room_for_tiles

CONVOLUTIONS = [(1, 1, 0), (3, 1, 1), (3, 2, 1), (1, 2, 0), (3, 1, 0)]
"""Kernel, stride, padding."""


class Layers(nn.Module):
    """What a chain link computes, in torch's layers."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.conv = nn.Conv2d(6, 5, kernel, stride, padding, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.conv(self.norm(y).relu())

    def chained(self, y: Tensor, *, keep: bool = True) -> Tensor:
        stride, padding = self.conv.stride[0], int(self.conv.padding[0])
        weights = self.norm.weight, self.norm.bias, self.conv.weight
        result = NormReluConv.apply(y, *weights, self.norm, stride, padding, keep)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result


def a_map(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape).to(dtype, memory_format=torch.channels_last)


def gradients(out: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.autograd.grad(out, [y, *layers.parameters()], torch.randn(out.shape).to(out))


@pytest.mark.parametrize(("convolution", "keep"), [(one, k % 2 == 0) for k, one in enumerate(CONVOLUTIONS)])
def test_a_link_is_batch_norm_relu_and_convolution(convolution: tuple[int, int, int], keep: bool) -> None:
    torch.manual_seed(0)
    layers, y = Layers(*convolution), a_map(2, 6, 7, 6).requires_grad_()
    twin = copy.deepcopy(layers)
    ours, theirs = layers.chained(y, keep=keep), twin(y)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # fp32 of values around 1, summed over 84 pixels and 54 weights in another order.
    torch.testing.assert_close(gradients(ours, y, layers), gradients(theirs, y, twin), rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(dict(layers.named_buffers()), dict(twin.named_buffers()))


def test_in_bf16_weights_are_cast_and_their_gradients_are_fp32() -> None:
    torch.manual_seed(0)
    layers, y = Layers(3, 1, 1), a_map(2, 6, 7, 6, dtype=torch.bfloat16).requires_grad_()
    twin, exact = copy.deepcopy(layers), y.detach().float().requires_grad_()
    ours, theirs = layers.chained(y), twin(exact)
    assert ours.dtype is torch.bfloat16
    found, truth = (ours, *gradients(ours, y, layers)), (theirs, *gradients(theirs, exact, twin))
    assert [x.dtype for x in found] == [torch.bfloat16] * 2 + [torch.float32] * 3
    for value, expected in zip(found, truth, strict=True):
        # Maps and weights are rounded to 2⁻⁹ on the way, in four places at most.
        assert (value.float() - expected).norm() <= 4 * 2**-8 * expected.norm()


def test_only_the_raw_map_stays_where_nothing_else_is_kept() -> None:
    layers, y = Layers(1, 1, 0), a_map(2, 6, 7, 6).requires_grad_()

    def num_maps_saved(keep: bool) -> int:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            layers.chained(y, keep=keep)
        return sum(x.shape == y.shape for x in saved)

    assert (num_maps_saved(True), num_maps_saved(False)) == (2, 1)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    layers, y = Layers(1, 1, 0), a_map(2, 6, 3, 3).requires_grad_()
    (dy,) = torch.autograd.grad(layers.chained(y).square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dy.sum().backward()


def test_a_chain_needs_training_gradients_channels_last_and_at_most_fp32() -> None:
    x = a_map(2, 3, 4, 4)
    assert not can_chain(x, is_training=True)
    with force(True, "chain"):
        assert can_chain(x, is_training=True)
        assert not can_chain(x, is_training=False)
        assert not can_chain(x.contiguous(), is_training=True)
        assert can_chain(torch.zeros(2, 1, 4, 4), is_training=True)
        assert not can_chain(x.double(), is_training=True)
        with torch.no_grad():
            assert not can_chain(x, is_training=True)


@pytest.mark.parametrize(("offered", "has_room"), [(101_376, False), (166_912, True), (232_448, True)])
def test_tiles_have_room_on_gpus_of_data_centres(offered: int, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=offered)  # of an RTX 40, an A100, an H200
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert has_room_for_tiles.__wrapped__(torch.device("cuda", 0)) is has_room
    assert has_room_for_tiles(torch.device("cpu"))
