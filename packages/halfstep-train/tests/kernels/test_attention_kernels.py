"""Gradients of attention over few tokens against torch's in fp64, on numbers of tokens that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.kernels import attention_triton as kernels

SHAPES = [(2, 5, 2, 16), (1, 17, 3, 16), (1, 33, 1, 32), (1, 130, 1, 16)]
"""Batch, tokens, heads, channels of a head: less than a tile, more than one, more keys than one tile holds."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(qkv: Tensor, d_out: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Output, logarithms of rows' sums, and the gradient, by torch in fp64."""
    qkv = qkv.double().requires_grad_()
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    (d_qkv,) = torch.autograd.grad(out, qkv, d_out.double())
    log_sum = torch.logsumexp(q @ k.transpose(2, 3) * q.shape[3] ** -0.5, 3)
    return out.detach(), log_sum.detach(), d_qkv


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "head", "dtype", "bound"),
    [(*shape, *((torch.float32, 2e-6), (torch.float16, 2e-3))[k % 2]) for k, shape in enumerate(SHAPES)],
)
def test_gradients_and_their_sums(
    batch: int, tokens: int, heads: int, head: int, dtype: torch.dtype, bound: float
) -> None:
    qkv = random(batch, tokens, 3 * heads * head).to(dtype)
    d_out = random(batch, tokens, heads * head, seed=1).to(dtype)
    out, log_sum, exact_gradient = exact(qkv, d_out, heads)
    d_qkv, partials = kernels.attention_backward(d_out, qkv, out.to(dtype), log_sum.float())
    assert all(error(*pair) < bound for pair in zip(d_qkv.chunk(3, 2), exact_gradient.chunk(3, 2), strict=True))
    of_queries, of_keys, of_values = partials.sum(0).chunk(3)
    sums = exact_gradient.sum((0, 1)).chunk(3)
    assert error(of_queries, sums[0]) < 3 * bound
    assert not of_keys.any()
    assert error(of_values, sums[2]) < bound
    assert sums[1].abs().max() < 1e-14 * tokens * batch


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("scale", [30.0, -30.0])
def test_scores_far_from_zero_are_handled(scale: float) -> None:
    """All scores of a row near 1000 or -1000: exp of one of them alone is not a number."""
    qkv, d_out = random(1, 6, 48), random(1, 6, 16, seed=1)
    qkv[:, :, :16] = qkv[:, :, :16] * 0.01 + scale
    qkv[:, :, 16:32] = qkv[:, :, 16:32] * 0.01 + 10
    out, log_sum, exact_gradient = exact(qkv, d_out, 1)
    d_qkv, _ = kernels.attention_backward(d_out, qkv, out.float(), log_sum.float())
    assert error(d_qkv, exact_gradient) < 1e-3  # scores near 1000 are rounded by 6e-5
