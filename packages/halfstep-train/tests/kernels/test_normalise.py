"""BatchNorm and ReLU in our own kernels against torch's layers, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.kernels.chain import (
    NormReluConv,
    SideStream,
    cast_together,
    convolve_backward,
)
from halfstep_train.kernels.fast_forms import can_chain, force, has_room_for_tiles
from halfstep_train.kernels.normalise_triton import (
    combine_partials,
    compute_norm,
    compute_raw_gradient,
    normalise,
    sum_gradients,
)

SHAPES = [(2, 64, 5, 7), (3, 70, 2, 3), (2, 5, 1, 4), (5, 3, 1, 1), (1, 1, 3, 3)]
"""More rows than a tile and less, channels that fill a tile, that spill over, and that do not reach 16 bytes."""


def random_map(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype, memory_format=torch.channels_last)


def batch_norm(channels: int) -> nn.BatchNorm2d:
    torch.manual_seed(2)
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


def slice_of_wider(x: Tensor) -> Tensor:
    """x as the middle channels of a map that is NaN elsewhere."""
    n, c, height, width = x.shape
    wide = torch.full((n, c + 24, height, width), float("nan"), dtype=x.dtype)
    wide = wide.contiguous(memory_format=torch.channels_last)
    wide[:, 8 : 8 + c] = x
    return wide[:, 8 : 8 + c]


def by_torch(y: Tensor, dz: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, ...]:
    """z and the gradients of y, weight and bias, in fp64; `norm` becomes fp64 and its statistics move."""
    y = y.double().requires_grad_()
    z = norm.double()(y).relu()
    return (z.detach(), *torch.autograd.grad(z, [y, norm.weight, norm.bias], dz.double()))


def by_kernels(y: Tensor, dz: Tensor, norm: nn.BatchNorm2d) -> tuple[Tensor, ...]:
    how = compute_norm(y, norm)
    sums = sum_gradients(dz, y, how)
    return normalise(y, how), compute_raw_gradient(dz, y, how, sums, masked=True), sums.weight, sums.g


def assert_near(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...], *, roundings: float) -> None:
    """Within so many roundings of the largest value: sums of a channel's values lose against those, not themselves."""
    for value, truth in zip(ours, exact, strict=True):
        bound = roundings * torch.finfo(value.dtype).eps * truth.abs().max().item()
        torch.testing.assert_close(value.double(), truth, rtol=0, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torchs_layers(shape: tuple[int, ...]) -> None:
    y, dz = random_map(*shape) * 2 + 1, random_map(*shape, seed=2)
    ours, exact = (form(y, dz, batch_norm(shape[1])) for form in (by_kernels, by_torch))
    assert_near(ours, exact, roundings=100)  # fp32 sums of up to 70 values, and 1/deviation of few rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_maps_are_rounded_once(dtype: torch.dtype) -> None:
    y, dz = random_map(2, 16, 5, 7, dtype=dtype), random_map(2, 16, 5, 7, seed=2, dtype=dtype)
    ours, exact = (form(y, dz, batch_norm(16)) for form in (by_kernels, by_torch))
    assert [value.dtype for value in ours] == [dtype, dtype, torch.float32, torch.float32]
    assert_near(ours[:2], exact[:2], roundings=1.01)  # the interpreter cuts bf16 off where a GPU rounds to nearest
    assert_near(ours[2:], exact[2:], roundings=100)


def test_a_slice_of_a_wider_map_is_read_and_written_in_place() -> None:
    y, dz = random_map(2, 16, 5, 7), random_map(2, 16, 5, 7, seed=2)
    how = compute_norm(y, batch_norm(16))
    out = slice_of_wider(torch.zeros_like(y))
    assert normalise(y, how, out=out) is out
    assert torch.equal(out, normalise(y, how))
    assert out._base is not None
    assert out._base.isnan().sum() == 2 * 24 * 5 * 7
    sums, from_slice = sum_gradients(dz, y, how), sum_gradients(slice_of_wider(dz), y, how)
    torch.testing.assert_close(from_slice, sums, rtol=0, atol=0)
    dy = compute_raw_gradient(slice_of_wider(dz), y, how, sums, masked=True)
    assert torch.equal(dy, compute_raw_gradient(dz, y, how, sums, masked=True))
    assert dy.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("parts", "kinds", "channels"), [(1, 2, 64), (528, 2, 12), (1500, 3, 5), (7, 1, 130)])
def test_parts_are_combined(parts: int, kinds: int, channels: int) -> None:
    partials = torch.randn(parts, kinds, channels, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(combine_partials(partials).double(), partials.double().sum(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ratio", [0, 100, 10_000])
def test_statistics_stay_exact_however_far_the_mean_is(ratio: int) -> None:
    y = random_map(4, 16, 8, 8) + ratio
    norm, exact = compute_norm(y, nn.BatchNorm2d(16, eps=0.0)), y.double()
    torch.testing.assert_close(norm.mean.double(), exact.mean((0, 2, 3)), rtol=2**-22, atol=2**-20)
    # kernels.normalise_triton states 2⁻²³ (1 + r²) for the variance; r up to 4, 8 for the summation.
    torch.testing.assert_close(norm.inverse.double() ** -2, exact.var((0, 2, 3), correction=0), rtol=1.6e-5, atol=0)


def test_a_constant_channel_has_variance_zero_not_below() -> None:
    norm = compute_norm(torch.full((2, 1, 8, 8), 0.1), nn.BatchNorm2d(1, eps=0.25))
    assert norm.inverse.item() == 2


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 1, 0, 0), (1, 1, 3, 2)])
def test_what_is_not_finite_reaches_output_and_running_statistics(bad: float, place: tuple[int, ...]) -> None:
    layer, y = nn.BatchNorm2d(3), random_map(2, 3, 4, 4)
    y[place] = bad
    z = normalise(y, compute_norm(y, layer))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert not layer.running_mean[1].isfinite()
    assert layer.running_var.isnan().tolist() == [False, True, False]
    assert z[:, 1].isnan().all()
    assert z[:, ::2].isfinite().all()


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    y, dz = random_map(2, 3, 4, 4), torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    how = compute_norm(y, nn.BatchNorm2d(3))
    dz[0, 1] = float("nan")
    sums = sum_gradients(dz, y, how)
    dy = compute_raw_gradient(dz, y, how, sums, masked=True)
    assert [x.isnan().tolist() for x in sums] == [[False, True, False]] * 3
    assert dy[:, 1].isnan().all()
    assert dy[:, ::2].isfinite().all()


def test_one_value_a_channel_is_torchs_error() -> None:
    with pytest.raises(ValueError, match="more than 1 value"):
        compute_norm(torch.zeros(1, 3, 1, 1), nn.BatchNorm2d(3))


@pytest.mark.slow
def test_kernels_are_imported_only_where_they_run() -> None:
    families = ", ".join(f"halfstep_train.workloads.{name}.build" for name in ("classification", "segmentation"))
    code = f"import sys, {families}; sys.exit(any('halfstep' in name and '_triton' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# --- convolutions between normalised maps against torch's layers, and when models may run as such chains ---

CONVOLUTIONS = [(1, 1, 0), (3, 1, 1), (3, 2, 1), (1, 2, 0), (3, 1, 0)]
"""Kernel, stride, padding."""


class Layers(nn.Module):
    """What a chain link computes, in torch's layers."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.norm = batch_norm(6)
        self.conv = nn.Conv2d(6, 5, kernel, stride, padding, bias=False)

    def forward(self, y: Tensor) -> Tensor:
        return self.conv(self.norm(y).relu())

    def chained(self, y: Tensor, *, keep: bool = True) -> Tensor:
        stride, padding = self.conv.stride[0], int(self.conv.padding[0])
        weights = self.norm.weight, self.norm.bias, self.conv.weight
        result = NormReluConv.apply(y, *weights, self.norm, stride, padding, keep)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result


def gradients(out: Tensor, y: Tensor, layers: Layers) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    return torch.autograd.grad(out, [y, *layers.parameters()], torch.randn(out.shape).to(out))


@pytest.mark.parametrize(("convolution", "keep"), [(one, k % 2 == 0) for k, one in enumerate(CONVOLUTIONS)])
def test_a_link_is_batch_norm_relu_and_convolution(convolution: tuple[int, int, int], keep: bool) -> None:
    torch.manual_seed(0)
    layers, y = Layers(*convolution), random_map(2, 6, 7, 6).requires_grad_()
    twin = copy.deepcopy(layers)
    ours, theirs = layers.chained(y, keep=keep), twin(y)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    # fp32 of values around 1, summed over 84 pixels and 54 weights in another order.
    torch.testing.assert_close(gradients(ours, y, layers), gradients(theirs, y, twin), rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(dict(layers.named_buffers()), dict(twin.named_buffers()))


def test_in_bf16_weights_are_cast_and_their_gradients_are_fp32() -> None:
    torch.manual_seed(0)
    layers, y = Layers(3, 1, 1), random_map(2, 6, 7, 6, dtype=torch.bfloat16).requires_grad_()
    twin, exact = copy.deepcopy(layers), y.detach().float().requires_grad_()
    ours, theirs = layers.chained(y), twin(exact)
    assert ours.dtype is torch.bfloat16
    found, truth = (ours, *gradients(ours, y, layers)), (theirs, *gradients(theirs, exact, twin))
    assert [x.dtype for x in found] == [torch.bfloat16] * 2 + [torch.float32] * 3
    for value, expected in zip(found, truth, strict=True):
        # Maps and weights are rounded to 2⁻⁹ on the way, in four places at most.
        assert (value.float() - expected).norm() <= 4 * 2**-8 * expected.norm()


def test_only_the_raw_map_stays_where_nothing_else_is_kept() -> None:
    layers, y = Layers(1, 1, 0), random_map(2, 6, 7, 6).requires_grad_()

    def num_maps_saved(keep: bool) -> int:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            layers.chained(y, keep=keep)
        return sum(x.shape == y.shape for x in saved)

    assert (num_maps_saved(True), num_maps_saved(False)) == (2, 1)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    layers, y = Layers(1, 1, 0), random_map(2, 6, 3, 3).requires_grad_()
    (dy,) = torch.autograd.grad(layers.chained(y).square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dy.sum().backward()


def test_a_chain_needs_training_gradients_channels_last_and_at_most_fp32() -> None:
    x = random_map(2, 3, 4, 4)
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


# --- tensors that a side stream reads are kept until its block ends ---


def test_what_the_second_stream_reads_is_kept_until_the_block_ends_and_no_longer() -> None:
    with SideStream(torch.device("cpu")) as side:
        tensor = torch.zeros(3)
        seen = weakref.ref(tensor)
        side.keep(tensor)
        del tensor
        assert seen() is not None
    assert seen() is None


def test_a_gradient_that_was_copied_is_kept_until_the_block_ends() -> None:
    z = torch.randn(2, 6, 7, 6).to(memory_format=torch.channels_last)
    w, dy = torch.randn(5, 6, 1, 1), torch.randn(2, 5, 7, 6)
    with SideStream(z.device) as side:
        convolve_backward(side, dy, z, w, 1, 0)
        (kept,) = side._kept
        assert kept.data_ptr() != dy.data_ptr()
        assert torch.equal(kept, dy)


def test_weights_are_cast_as_one_by_one_and_so_are_their_gradients() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in [(4, 3, 3, 3), (5, 4, 1, 1), (2, 5, 3, 3)]]
    weights[0].data = weights[0].data.to(memory_format=torch.channels_last)
    cast = cast_together(weights, torch.bfloat16)
    assert cast_together(weights, torch.float32) is weights
    assert all(torch.equal(ours, weight.bfloat16()) for ours, weight in zip(cast, weights, strict=True))
    assert [ours.stride() for ours in cast] == [weight.stride() for weight in weights]
    (cast[0].square().sum() + cast[2].sum()).backward()
    assert torch.equal(weights[0].grad, (2 * weights[0].detach().bfloat16()).float())
    assert weights[1].grad is None
    assert torch.equal(weights[2].grad, torch.ones_like(weights[2]))


def test_a_frozen_weight_stays_frozen() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), requires_grad=False)]
    trained, frozen = cast_together(weights, torch.bfloat16)
    assert trained.requires_grad
    assert not frozen.requires_grad
    (trained + frozen).sum().backward()
    assert weights[0].grad is not None
    assert weights[1].grad is None
