"""Attention over few tokens on the GPU: as near to fp64 as torch's kernels are, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.kernels import attention_triton as kernels
from halfstep.kernels.transformer_chain import attention, by_heads, is_short

pytestmark = pytest.mark.gpu


def by_torch(qkv: Tensor, d_out: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Output, and gradients of queries, keys and values."""
    qkv = qkv.detach().requires_grad_()
    out = F.scaled_dot_product_attention(*qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4))
    out = out.transpose(1, 2).flatten(2)
    (d_qkv,) = torch.autograd.grad(out, qkv, d_out)
    return out.detach(), *d_qkv.chunk(3, 2)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "head"), [(5, 64), (130, 32), (197, 64), (256, 64)])
def test_as_near_to_fp64_as_torch(tokens: int, head: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, tokens, 3 * 2 * head, device="cuda", dtype=dtype)
    d_out = torch.randn(3, tokens, 2 * head, device="cuda", dtype=dtype)
    out, log_sum = attention(qkv, 2)
    d_qkv, partials = kernels.attention_backward(d_out, qkv, out, log_sum)
    exact, theirs = by_torch(qkv.double(), d_out.double(), 2), by_torch(qkv, d_out, 2)
    for ours, torchs, best in zip((out, *d_qkv.chunk(3, 2)), theirs, exact, strict=True):
        assert error(ours, best) < 1.3 * error(torchs, best)
    # Their rounded terms have errors that do not know of each other: a sum's is theirs, more or less.
    of_queries, _, of_values = partials.sum(0).chunk(3)
    assert error(of_queries, exact[1].sum((0, 1))) < 3 * error(theirs[1], exact[1])
    assert error(of_values, exact[3].sum((0, 1))) < 3 * error(theirs[3], exact[3])
    again, _ = kernels.attention_backward(d_out, qkv, out, log_sum)
    assert torch.equal(again, d_qkv)


def test_cudnn_gives_natural_logarithms_and_writes_token_by_token() -> None:
    qkv = torch.randn(2, 197, 3 * 4 * 64, device="cuda", dtype=torch.bfloat16)
    assert is_short(torch.empty(2, 197, 4 * 64, device="cuda"), torch.bfloat16, 4)
    q, k, v = by_heads(qkv, 4)
    raw = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, compute_log_sumexp=True)[0]
    assert raw.transpose(1, 2).is_contiguous()
    _, log_sum = attention(qkv, 4)
    expected = torch.logsumexp(q.double() @ k.double().transpose(2, 3) / 8, 3)
    torch.testing.assert_close(log_sum.double(), expected, rtol=1e-4, atol=1e-4)
