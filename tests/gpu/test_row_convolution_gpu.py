"""3×3 convolutions in our own kernel on a Hopper GPU: against torch in fp64, in a U-Net's chain, and captured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture import captured
from chain_steps import error, step
from halfstep.kernels import chain
from halfstep.kernels.fast_forms import forced
from halfstep.kernels.normalise import finished_sums, normalisation
from halfstep.kernels.row_convolution import works_on
from halfstep.kernels.row_convolution_gluon import convolve, input_gradient
from halfstep.models.unet import UNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="made for Hopper"
    ),
]
SHAPES = [(2, 64, 128, 16), (1, 40, 250, 7), (3, 5, 129, 3), (1, 1, 3, 1)]
"""Images, height, width, rows of a program: full strips and rests of them, rests of rows, and less than a tile."""


def a_map(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16, mean: float = 0.0) -> Tensor:
    torch.manual_seed(seed)
    return (torch.randn(*shape, device="cuda") + mean).to(dtype, memory_format=torch.channels_last)


def weights(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return a_map(64, 64, 3, 3, seed=2, dtype=dtype) / 16


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within a rounding of the result."""
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=step, atol=step * exact.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_the_convolution_and_the_parts_are_its_statistics(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    n, height, width, rows = shape
    z, w = a_map(n, 64, height, width, dtype=dtype, mean=2.0), weights(dtype)
    y, exact = torch.full_like(z, float("nan")), F.conv2d(z.double(), w.double(), padding=1)
    parts = convolve(z, w, y, rows)
    assert_near(y, exact, dtype)
    norm, stored = nn.BatchNorm2d(64).cuda(), y.double()
    found = normalisation(y, norm, parts)
    variance = stored.var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(found.mean.double(), stored.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.inverse.double(), (variance + norm.eps).rsqrt(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_is_the_transposed_convolution_and_the_sums_are_what_batch_norm_needs(
    shape: tuple[int, ...],
) -> None:
    n, height, width, rows = shape
    dy, w, y = a_map(n, 64, height, width), weights(), a_map(n, 64, height, width, seed=3, mean=0.5)
    norm = normalisation(y, nn.BatchNorm2d(64).cuda())
    dz = torch.full_like(y, float("nan"))
    parts = input_gradient(dy, w, dz, y, (norm.mean, norm.scale, norm.offset), rows)
    exact = F.conv_transpose2d(dy.double(), w.double(), padding=1)
    assert_near(dz, exact, torch.bfloat16)
    found = finished_sums(parts, norm)
    mean, scale, offset = (vector[:, None, None] for vector in (norm.mean, norm.scale, norm.offset))
    g = torch.where(y * scale + offset > 0, exact, 0)
    size = g.abs().sum().item() / 64
    torch.testing.assert_close(found.g.double(), g.sum((0, 2, 3)), rtol=0, atol=1e-5 * size)
    torch.testing.assert_close(found.gx.double(), (g * (y - mean)).sum((0, 2, 3)), rtol=0, atol=1e-5 * size)


def test_a_channel_that_does_not_vary_is_normalised_to_its_bias() -> None:
    z, w = a_map(1, 64, 40, 256), torch.zeros(64, 64, 3, 3, device="cuda", dtype=torch.bfloat16)
    z[:], w[:, 0, 1, 1] = 3.01, 1.003  # the centre's tap alone: no border, and a product that bf16 rounds
    w = w.contiguous(memory_format=torch.channels_last)
    y = torch.empty_like(z)
    norm = normalisation(y, nn.BatchNorm2d(64).cuda(), convolve(z, w, y, 8))
    assert (y.float() * norm.scale[:, None, None] + norm.offset[:, None, None]).abs().max() < 1e-3


def test_a_nan_spreads_to_its_neighbours_and_to_the_statistics_alone() -> None:
    z, w = a_map(1, 64, 40, 256), weights()
    z[0, 5, 20, 128] = float("nan")
    y = torch.empty_like(z)
    parts = convolve(z, w, y, 8)
    is_bad = y.isnan().any(1)[0]
    assert is_bad.sum() == 9
    assert is_bad[19:22, 127:130].all()
    assert normalisation(y, nn.BatchNorm2d(64).cuda(), parts).inverse.isnan().all()


def test_it_repeats_to_the_bit_and_can_be_captured() -> None:
    z, w = a_map(8, 64, 256, 256), weights()
    first, parts = chain.convolved_and_summed(z, w, 1, 1)
    assert parts is not None
    graph, (again, again_parts) = captured(lambda: chain.convolved_and_summed(z, w, 1, 1))
    graph.replay()
    assert torch.equal(first, again)
    assert torch.equal(parts, again_parts)
    norm = normalisation(first, nn.BatchNorm2d(64).cuda())
    once, again = (chain.row_gradient(z, w, first, norm) for _ in range(2))
    assert all(map(torch.equal, once, again))


def test_this_gpu_uses_it() -> None:
    assert works_on(torch.device("cuda", 0), torch.bfloat16)


def test_a_u_net_with_it_is_as_near_to_fp32_as_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: nn.Module = UNet(base_channels=64, depth=2).to("cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    x, calls = a_map(8, 3, 256, 256, dtype=torch.float32), []
    original = chain.row_gradient
    monkeypatch.setattr(chain, "row_gradient", lambda *given: calls.append(True) or original(*given))
    with forced(False), torch.backends.cudnn.flags(allow_tf32=False):
        exact = step(copy.deepcopy(model), x, half=False)
        with forced(True, "chain"):
            ours = step(copy.deepcopy(model), x)
            assert len(calls) == 2  # the first level's second convolution, and the last level's
            monkeypatch.setattr(chain, "row_convolution_fits", lambda *_: False)
            library = step(copy.deepcopy(model), x)
    assert error(ours, exact) < 1.1 * error(library, exact)
