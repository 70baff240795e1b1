"""Pooling, doubling into a concatenation and the head, each against torch's layers, forward and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep_train.kernels.normalise import compute_norm
from halfstep_train.kernels.unet_chain import Head, PoolConv, UpConcatConv

pytest.importorskip("triton")


def some_map(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=generator) + 0.5).to(memory_format=torch.channels_last)


def some_norm(channels: int) -> nn.BatchNorm2d:
    torch.manual_seed(channels)
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight)  # some below zero, where the largest value is not the largest normalised one
    nn.init.normal_(norm.bias)
    return norm


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_()


def gradients(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """The results, then the gradient of every input, of a sum with random factors."""
    inputs = tuple(leaf(x) for x in inputs)
    results = function(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    torch.manual_seed(9)
    sum((r.float() * torch.randn(r.shape)).sum() for r in results).backward()  # type: ignore[union-attr]
    return [*(r.detach() for r in results), *(x.grad for x in inputs if x.grad is not None)]


def assert_near(ours: list[Tensor], theirs: list[Tensor], bound: float) -> None:
    """Compare errors with the largest value of the tensor: a value near zero is a difference of larger ones."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0, atol=bound * float(other.abs().max()))


def pooled_and_skip(norm: nn.BatchNorm2d, *, chain: bool) -> Callable[..., tuple[Tensor, ...]]:
    """What the next level's convolution gives, and the skip connection behind a 1×1 convolution of its own."""

    def layers(y: Tensor, weight: Tensor, bias: Tensor, w_conv: Tensor, w_skip: Tensor) -> tuple[Tensor, ...]:
        z = F.relu(F.batch_norm(y, None, None, weight, bias, training=True))
        return F.conv2d(F.max_pool2d(z, 2), w_conv.to(y.dtype), padding=1), F.conv2d(z, w_skip.to(y.dtype))

    def kernels(y: Tensor, weight: Tensor, bias: Tensor, w_conv: Tensor, w_skip: Tensor) -> tuple[Tensor, ...]:
        how = compute_norm(y.detach(), norm)
        u, promise = PoolConv.apply(y, weight, bias, w_conv, how)
        return u, Skip.apply(promise, y.detach(), how, w_skip)

    return kernels if chain else layers


class Skip(torch.autograd.Function):
    """The other consumer: a promise's gradient has a second half that belongs to another consumer."""

    @staticmethod
    def forward(ctx, promise, y, how, w_skip):  # type: ignore[no-untyped-def]
        z = F.relu(y.float() * how.scale.view(1, -1, 1, 1) + how.offset.view(1, -1, 1, 1)).to(y.dtype)
        ctx.save_for_backward(z, w_skip)
        return F.conv2d(z, w_skip.to(y.dtype))

    @staticmethod
    def backward(ctx, dskip):  # type: ignore[no-untyped-def]
        z, w = ctx.saved_tensors
        dz = F.conv_transpose2d(dskip, w.to(dskip.dtype))
        other = torch.full_like(dz, 7)
        dw = torch.einsum("nohw,nihw->oi", dskip.float(), z.float())[:, :, None, None]
        return torch.cat([dz, other], 1).contiguous(memory_format=torch.channels_last), None, None, dw


@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (1, 24, 5, 7), (1, 130, 2, 2)])
def test_pooling_and_its_skip_connection(shape: tuple[int, ...]) -> None:
    channels = shape[1]
    norm, y = some_norm(channels), some_map(*shape)
    weights = (norm.weight, norm.bias, some_map(5, channels, 3, 3), some_map(3, channels, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 1e-5)


def test_of_equal_values_in_a_window_the_first_gets_the_gradient_as_torch_has_it() -> None:
    norm, y = some_norm(4), some_map(2, 4, 8, 8).div(2).round()
    weights = (norm.weight, norm.bias, some_map(5, 4, 3, 3), some_map(3, 4, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 1e-5)


def test_pooling_in_bf16_is_as_near_as_its_roundings() -> None:
    # Quarters are equal or far apart: which of two nearly equal values is the maximum may differ.
    norm, y = some_norm(8), some_map(2, 8, 6, 6).mul(4).round().div(4).bfloat16()
    norm.weight.data.sign_()
    weights = (norm.weight, norm.bias, some_map(5, 8, 3, 3), some_map(3, 8, 1, 1))
    ours = gradients(pooled_and_skip(norm, chain=True), y, *weights)
    # 2⁻⁸ a rounding; torch rounds the normalised map's gradient once more than we do, before it is summed.
    assert_near(ours, gradients(pooled_and_skip(norm, chain=False), y, *weights), 4 * 2**-8)


def test_a_nan_comes_through_pooling_and_head() -> None:
    norm, y = some_norm(4), some_map(1, 4, 4, 4)
    y[0, 2, 3, 3] = float("nan")
    how = compute_norm(y, norm)
    u, _ = PoolConv.apply(y, norm.weight, norm.bias, some_map(1, 4, 3, 3), how)
    assert u.isnan().all()
    assert Head.apply(y, norm.weight, norm.bias, some_map(2, 4, 1, 1), torch.zeros(2), how).isnan().all()


@pytest.mark.parametrize(
    ("deep_shape", "size"), [((2, 8, 3, 4), (6, 8)), ((1, 6, 3, 2), (7, 5)), ((2, 34, 2, 3), (5, 7))]
)
def test_doubling_into_the_concatenation(deep_shape: tuple[int, ...], size: tuple[int, int]) -> None:
    n, depth = deep_shape[:2]
    channels = depth // 2
    norm, skip_norm, skip = some_norm(depth), some_norm(channels), some_map(n, channels, *size, seed=1)
    inputs = (norm.weight, norm.bias, some_map(depth, channels, 2, 2), torch.randn(channels), some_map(3, depth, 3, 3))

    def layers(deep: Tensor, weight: Tensor, bias: Tensor, w_up: Tensor, b_up: Tensor, w_conv: Tensor) -> Tensor:
        z = F.relu(F.batch_norm(deep, None, None, weight, bias, training=True))
        up = F.conv_transpose2d(z, w_up, b_up, stride=2)
        dy, dx = size[0] - up.shape[2], size[1] - up.shape[3]
        up = F.pad(up, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        other = F.relu(
            F.batch_norm(skip, None, None, skip_norm.weight.detach(), skip_norm.bias.detach(), training=True)
        )
        return F.conv2d(torch.cat([other, up], 1), w_conv, padding=1)

    def kernels(deep: Tensor, weight: Tensor, bias: Tensor, w_up: Tensor, b_up: Tensor, w_conv: Tensor) -> Tensor:
        promise = torch.zeros(n, depth, *size)
        how, skip_how = compute_norm(deep.detach(), norm), compute_norm(skip, skip_norm)
        return UpConcatConv.apply(promise, skip, skip_how, deep, weight, bias, w_up, b_up, w_conv, how, False)

    deep = some_map(*deep_shape)
    assert_near(gradients(kernels, deep, *inputs), gradients(layers, deep, *inputs), 1e-5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda g: g.contiguous(memory_format=torch.channels_last),
    "channels first": lambda g: g.contiguous(),
    "columns before rows": lambda g: g.mT.contiguous().mT,
}


@pytest.mark.parametrize(
    ("shape", "classes", "layout"),
    [
        ((2, 8, 5, 6), 2, "channels last"),
        ((1, 20, 4, 3), 8, "channels first"),
        ((2, 3, 5, 5), 1, "columns before rows"),
    ],
)
def test_the_head_whose_logits_gradient_lies_in_any_order(shape: tuple[int, ...], classes: int, layout: str) -> None:
    norm, y = some_norm(shape[1]), some_map(*shape)
    inputs = (norm.weight, norm.bias, some_map(classes, shape[1], 1, 1), torch.randn(classes))

    def layers(y: Tensor, weight: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.batch_norm(y, None, None, weight, bias, training=True)), w_out, b_out)

    def kernels(y: Tensor, weight: Tensor, bias: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        logits: Tensor = Head.apply(y, weight, bias, w_out, b_out, compute_norm(y.detach(), norm))
        logits.register_hook(LAYOUTS[layout])
        return logits

    assert_near(gradients(kernels, y, *inputs), gradients(layers, y, *inputs), 1e-5)
