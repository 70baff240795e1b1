"""The kernels between a transformer's matmuls against torch in fp64, on sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep_train.kernels import transformer_triton as kernels
from halfstep_train.kernels.attention_triton import attention_backward
from halfstep_train.kernels.transformer_chain import sum_partials

SIZES = [(1, 8), (7, 24), (37, 32), (50, 40)]
"""Rows and channels: fewer than a tile has, more than one, and channels that are not a power of two."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_near(ours: Tensor, exact: Tensor, relative: float = 2e-6) -> None:
    """In norm: single values near zero may be off by what others are rounded by."""
    error = (ours.double() - exact).norm() / exact.norm()
    assert error < relative, f"relative error {error:.1e}"


def gelu_of(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.gelu(x, torch.zeros(x.shape[1]), out)
    return out


def test_gelu_is_exact_to_a_small_part_of_what_half_formats_round() -> None:
    x = torch.linspace(-7, 7, 14 * 64)[None]
    exact, ours = F.gelu(x.double()), gelu_of(x).double()
    assert (ours - exact).abs().max() < 6e-7
    relative = ((ours - exact) / exact).abs()
    assert relative[x.abs() < 4].max() < 4e-6
    assert relative.max() < 1.2e-4  # of values down to 1e-11


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
def test_gelu_far_out_is_x_or_nothing() -> None:
    x = torch.tensor([[-1e30, -3e4, -20.0, -0.0, 0.0, 20.0, 3e4, 1e30]])
    assert gelu_of(x).tolist() == [[0, 0, 0, 0, 0, *x[0, 5:].tolist()]]


def test_gelu_hands_nan_on() -> None:
    assert gelu_of(torch.tensor([[float("nan"), 1.0]])).isnan().tolist() == [[True, False]]


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("by_tanh", [False, True])
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_gelu_of_a_sum_with_its_bias_and_all_gradients(rows: int, dim: int, by_tanh: bool) -> None:
    raw, bias, d_out = random(rows, dim) * 2, random(dim, seed=1), random(rows, dim, seed=2)
    x, b = raw.double().requires_grad_(), bias.double().requires_grad_()
    y = F.gelu(x + b, approximate="tanh" if by_tanh else "none")
    d_x, d_b = torch.autograd.grad(y, (x, b), d_out.double())
    out, again, d_raw = torch.empty(3, rows, dim).unbind()
    kernels.gelu(raw, bias, out, by_tanh=by_tanh)
    partials = kernels.gelu_backward(d_out, raw, bias, d_raw, again, by_tanh=by_tanh)
    assert torch.equal(out, again)
    assert_near(out, y.detach())
    assert_near(d_raw, d_x, 5e-6)
    assert_near(sum_partials(partials), d_b, 5e-6)


@pytest.mark.parametrize("has_branch", [False, True])
@pytest.mark.parametrize(("rows", "dim"), SIZES)
def test_a_sum_its_layer_norm_and_all_gradients(rows: int, dim: int, has_branch: bool) -> None:
    x, branch, d_out, d_sum = (random(rows, dim, seed=seed) for seed in range(4))
    weight, bias, branch_bias = (random(dim, seed=seed) for seed in range(4, 7))
    added = (branch, branch_bias) if has_branch else (None, None)
    out, again, dx = torch.empty(3, rows, dim).unbind()
    summed, mean, inverse = kernels.add_norm(x, *added, weight, bias, 1e-6, out)
    d_branch = torch.empty_like(x) if has_branch else None
    partials = kernels.add_norm_backward(d_out, d_sum, summed, (mean, inverse), weight, bias, dx, d_branch, again)

    exact = [t.double().requires_grad_() for t in (x, weight, bias, branch_bias)]
    exact_sum = exact[0] + branch.double() + exact[3] if has_branch else exact[0] + 0 * exact[3]
    y = F.layer_norm(exact_sum, (dim,), exact[1], exact[2], 1e-6)
    d_x, *sums = torch.autograd.grad((y, exact_sum), exact, (d_out.double(), d_sum.double()))
    assert torch.equal(out, again)
    assert_near(out, y.detach())
    assert_near(summed, exact_sum.detach())
    assert_near(dx, d_x, 5e-6)
    if d_branch is not None:
        assert torch.equal(d_branch, dx)
    for ours, theirs in zip(sum_partials(partials).split(dim), sums[: 2 + has_branch], strict=False):
        assert_near(ours, theirs, 5e-6)


def test_a_mean_far_from_zero_costs_layer_norm_no_more_than_the_mean_is_rounded_by() -> None:
    x = random(5, 32) + 1000
    out = torch.empty_like(x)
    kernels.add_norm(x, None, None, torch.ones(32), torch.zeros(32), 1e-6, out)
    assert_near(out, F.layer_norm(x.double(), (32,), eps=1e-6), 1000 * 2**-23)


def test_half_formats_are_rounded_once() -> None:
    x, branch = random(9, 32), random(9, 32, seed=1).half()
    weight, bias = random(32, seed=2), random(32, seed=3)
    out = torch.empty_like(x, dtype=torch.float16)
    summed, _, _ = kernels.add_norm(x, branch, bias, weight, bias, 1e-6, out)
    assert torch.equal(summed, x + (branch.float() + bias))
    # fp16 rounds by 2⁻¹¹ at most, and two fp32 results may fall on two sides of a middle.
    torch.testing.assert_close(out.float(), F.layer_norm(summed, (32,), weight, bias, 1e-6), rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("layout", ["batch head token", "batch token head", "token innermost", "one broadcast"])
@pytest.mark.parametrize(("batch", "heads", "tokens", "channels"), [(1, 2, 5, 8), (3, 3, 7, 12)])
def test_three_gradients_side_by_side_from_any_layout(
    layout: str, batch: int, heads: int, tokens: int, channels: int
) -> None:
    thirds = [random(batch, heads, tokens, channels, seed=seed) for seed in range(3)]
    if layout == "batch token head":
        thirds = [third.transpose(1, 2).contiguous().transpose(1, 2) for third in thirds]
    elif layout == "token innermost":
        thirds = [third.transpose(2, 3).contiguous().transpose(2, 3) for third in thirds]
    elif layout == "one broadcast":
        thirds[1] = thirds[1][:1, :, :1].expand(batch, heads, tokens, channels)
    out = torch.empty(batch, tokens, 3 * heads * channels)
    partials = kernels.pack(thirds, out)
    exact = torch.stack(thirds).permute(1, 3, 0, 2, 4).flatten(2)
    assert torch.equal(out, exact)
    assert_near(sum_partials(partials), exact.double().sum((0, 1)))


# --- gradients of attention over few tokens, on numbers of tokens that fill no tile ---

SHAPES = [(2, 5, 2, 16), (1, 17, 3, 16), (1, 33, 1, 32), (1, 130, 1, 16)]
"""Batch, tokens, heads, channels of a head: less than a tile, more than one, more keys than one tile holds."""


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
    d_qkv, partials = attention_backward(d_out, qkv, out.to(dtype), log_sum.float())
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
    d_qkv, _ = attention_backward(d_out, qkv, out.float(), log_sum.float())
    assert error(d_qkv, exact_gradient) < 1e-3  # scores near 1000 are rounded by 6e-5
