"""The kernels of a model's first convolution against torch's, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.kernels.normalise_triton import GradientSums, Norm
from halfstep_train.kernels.stem import StemConv, can_run_stem
from halfstep_train.kernels.stem_triton import ThroughNorm, compute_stem_gradient, pad_image

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Triton's interpreter multiplies the bits of bf16 as whole numbers.
BF16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu, id="bf16")

# Batch, channels, height, width; out channels, kernel, stride, padding.
SHAPES = [
    ((2, 3, 8, 8), (16, 3, 1, 1)),
    ((1, 3, 9, 8), (16, 7, 2, 3)),
    ((3, 1, 5, 7), (16, 5, 2, 2)),
    ((1, 4, 9, 6), (48, 3, 2, 1)),
    ((2, 2, 7, 11), (80, 3, 1, 2)),
    ((1, 3, 4, 13), (32, 1, 1, 0)),
    ((2, 3, 6, 5), (16, 3, 1, 0)),
]
shapes = pytest.mark.parametrize(("size", "layer"), SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def image_and_weight(size: tuple[int, ...], out: int, kernel: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    image = torch.randn(size, device=DEVICE).to(memory_format=torch.channels_last)
    return image, torch.randn(out, size[1], kernel, kernel, device=DEVICE) / (size[1] * kernel**2) ** 0.5


def outcome(conv: object, image: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """The map and the gradient of the weight, for a gradient of the map that is the same for all."""
    weight = weight.clone().requires_grad_()
    y = conv(image, weight, stride, padding)  # type: ignore[operator]
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, device=DEVICE).to(y.dtype))
    assert weight.grad is not None
    return y.detach(), weight.grad


def plain(image: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
    return F.conv2d(image, weight, stride=stride, padding=padding)


@shapes
def test_map_and_gradient_are_those_of_torch(size: tuple[int, ...], layer: tuple[int, ...]) -> None:
    out, kernel, stride, padding = layer
    image, weight = image_and_weight(size, out, kernel)
    assert can_run_stem(image, weight, stride, padding)
    y, gradient = outcome(StemConv.apply, image, weight, stride, padding)
    exact_y, exact = outcome(plain, image.double(), weight.double(), stride, padding)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.double(), exact_y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("size", "layer"), SHAPES[2:4], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_half_formats_round_operands_and_the_map_only(
    dtype: torch.dtype, size: tuple[int, ...], layer: tuple[int, ...]
) -> None:
    out, kernel, stride, padding = layer
    image, weight = image_and_weight(size, out, kernel)
    image, weight = image.to(dtype), weight.to(dtype).float()
    y, gradient = outcome(StemConv.apply, image, weight, stride, padding)
    assert y.dtype is dtype
    assert gradient.dtype is torch.float32
    exact_y, _ = outcome(plain, image.double(), weight.double(), stride, padding)
    torch.manual_seed(1)
    dy = torch.randn(y.shape, device=DEVICE).to(dtype).double()
    exact = torch.nn.grad.conv2d_weight(image.double(), weight.shape, dy, stride=stride, padding=padding)  # type: ignore[no-untyped-call]
    # The map is rounded once, by half a unit in the last place; products of half values are exact in fp32.
    torch.testing.assert_close(y.double(), exact_y, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-4)


def test_an_image_still_to_be_cast_is_cast_as_torch_casts_it() -> None:
    image, weight = image_and_weight((2, 3, 8, 8), 16, 3)
    cast = outcome(StemConv.apply, image.half(), weight, 1, 1)
    fused = outcome(lambda *given: StemConv.apply(*given, torch.float16), image, weight, 1, 1)
    assert fused[0].dtype is torch.float16
    assert all(torch.equal(a, b) for a, b in zip(cast, fused, strict=True))


def test_the_image_may_lie_in_memory_in_any_order() -> None:
    image, weight = image_and_weight((2, 3, 8, 9), 16, 3)
    last = outcome(StemConv.apply, image, weight, 2, 1)
    first = outcome(StemConv.apply, image.contiguous(), weight.to(memory_format=torch.channels_last), 2, 1)
    assert all(torch.equal(a, b) for a, b in zip(last, first, strict=True))


def test_the_gradient_lies_in_memory_as_the_weight_does() -> None:
    image, weight = image_and_weight((1, 3, 6, 6), 16, 3)
    _, gradient = outcome(StemConv.apply, image, weight.to(memory_format=torch.channels_last), 1, 1)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("out", "masked"), [(16, True), (48, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_the_gradient_through_batch_norm_is_that_of_the_raw_maps_gradient(
    dtype: torch.dtype, out: int, masked: bool
) -> None:
    image, weight = image_and_weight((2, 3, 9, 7), out, 3)
    image = image.to(dtype)
    y = StemConv.apply(image, weight, 1, 1)
    weight = weight.requires_grad_()
    g = torch.randn_like(y)
    mean, inverse, offset = torch.randn(3, out, device=DEVICE).abs()
    norm = Norm(mean, inverse, inverse * 0.7, offset - mean)
    sums = GradientSums(*torch.randn(3, out, device=DEVICE) * 10)
    dy = plain_gradient_of_raw(g, y, norm, sums, masked)
    StemConv.apply(image, weight, 1, 1).backward(dy.to(dtype))
    padded = pad_image(image, 3, 1, 1, dtype)
    found = compute_stem_gradient(padded, weight, g, ThroughNorm(y, norm, sums, masked))
    # Where dy lies between two values of a half format, the order of operations decides which it becomes: now and then
    # one of 126 dy, of sizes up to 20, differs in its last place.
    torch.testing.assert_close(found, weight.grad, rtol=1e-5, atol=max(1e-4, 20 * torch.finfo(dtype).eps))


def plain_gradient_of_raw(g: Tensor, y: Tensor, norm: Norm, sums: GradientSums, masked: bool) -> Tensor:
    mean, inverse, scale, offset, sum_g, sum_gx = (v.view(1, -1, 1, 1) for v in (*norm, sums.g, sums.gx))
    num_values, y = y.numel() // y.shape[1], y.float()
    g = g.float().where(y * scale + offset > 0, 0) if masked else g.float()
    return scale * (g - sum_g / num_values - (y - mean) * inverse**2 * sum_gx / num_values)


@pytest.mark.parametrize(
    ("size", "shape", "stride"),
    [
        ((1, 5, 8, 8), (16, 5, 3, 3), 1),
        ((1, 3, 8, 8), (24, 3, 3, 3), 1),
        ((1, 3, 8, 8), (16, 3, 4, 4), 1),
        ((1, 3, 12, 12), (16, 3, 9, 9), 1),
        ((1, 3, 8, 8), (16, 3, 3, 3), 4),
        ((1, 4, 8, 8), (16, 2, 3, 3), 1),
        ((0, 3, 8, 8), (16, 3, 3, 3), 1),
        ((1, 3, 8, 2), (16, 3, 7, 7), 1),
    ],
)
def test_what_the_kernels_do_not_compute_does_not_fit(
    size: tuple[int, ...], shape: tuple[int, ...], stride: int
) -> None:
    assert not can_run_stem(torch.zeros(size), torch.zeros(shape), stride, 1)


def test_an_image_that_wants_a_gradient_does_not_fit() -> None:
    image, weight = image_and_weight((1, 3, 6, 6), 16, 3)
    assert not can_run_stem(image.requires_grad_(), weight, 1, 1)
    with pytest.raises(AssertionError, match="image's gradient"):
        StemConv.apply(image, weight, 1, 1)
