"""Kernels of a ResNet's chain against torch's own layers, values and gradients, on odd sizes and many channels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.kernels.normalise import Norm, compute_norm, compute_raw_gradient

pytest.importorskip("triton")

from halfstep_train.kernels import resnet_triton
from halfstep_train.kernels.resnet_triton import (
    compute_join_gradient,
    compute_pair_gradients,
    compute_stem_pool_gradient,
    join_maps,
    pool_stem,
)

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
