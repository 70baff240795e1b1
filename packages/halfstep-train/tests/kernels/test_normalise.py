"""BatchNorm and ReLU in our own kernels against torch's layers, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from halfstep_train.kernels.normalise import (
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


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_layer_keeps_moves_as_torchs(shape: tuple[int, ...]) -> None:
    ours, theirs = batch_norm(shape[1]), batch_norm(shape[1])
    for seed in range(2):
        y = random_map(*shape, seed=seed) + 3
        compute_norm(y, ours)
        theirs(y)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))


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


def test_a_gradient_that_relu_has_masked_already_needs_no_mask() -> None:
    y, dz = random_map(2, 16, 5, 7), random_map(2, 16, 5, 7, seed=2)
    how = compute_norm(y, batch_norm(16))
    g, sums = dz * (normalise(y, how) > 0), sum_gradients(dz, y, how)
    masked, plain = (
        compute_raw_gradient(x, y, how, sums, masked=is_masked) for x, is_masked in ((dz, True), (g, False))
    )
    assert torch.equal(masked, plain)
    assert not torch.equal(compute_raw_gradient(dz, y, how, sums, masked=False), plain)


@pytest.mark.parametrize(("parts", "kinds", "channels"), [(1, 2, 64), (528, 2, 12), (1500, 3, 5), (7, 1, 130)])
def test_parts_are_combined(parts: int, kinds: int, channels: int) -> None:
    partials = torch.randn(parts, kinds, channels, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(combine_partials(partials).double(), partials.double().sum(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("ratio", [0, 100, 10_000])
def test_statistics_stay_exact_however_far_the_mean_is(ratio: int) -> None:
    y = random_map(4, 16, 8, 8) + ratio
    norm, exact = compute_norm(y, nn.BatchNorm2d(16, eps=0.0)), y.double()
    torch.testing.assert_close(norm.mean.double(), exact.mean((0, 2, 3)), rtol=2**-22, atol=2**-20)
    # kernels.normalise states 2⁻²³ (1 + r²) for the variance; r up to 4, 8 for the summation.
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
def test_triton_is_imported_only_where_a_kernel_runs() -> None:
    code = "import sys, halfstep, halfstep_train.kernels.chain; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
