"""Attention over few tokens on the GPU: as near to fp64 as torch's kernels are, and the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as torchs_attention

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.capsule import list_capsules
from halfstep.precision.contexts import has_cudnn_fault
from halfstep_train.kernels import attention_triton as kernels
from halfstep_train.kernels.transformer_chain import is_short, run_cudnn_attention, split_heads
from tiny_training import plan

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
    out, log_sum = run_cudnn_attention(qkv, 2)
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
    q, k, v = split_heads(qkv, 4)
    raw = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, compute_log_sumexp=True)[0]
    assert raw.transpose(1, 2).is_contiguous()
    _, log_sum = run_cudnn_attention(qkv, 4)
    expected = torch.logsumexp(q.double() @ k.double().transpose(2, 3) / 8, 3)
    torch.testing.assert_close(log_sum.double(), expected, rtol=1e-4, atol=1e-4)


def gradients(keys: int, dtype: torch.dtype, *, is_compiled: bool, heads: int = 2, queries: int = 64) -> Tensor:
    """Of finite numbers, all of whose scores are -120."""
    torch.manual_seed(0)
    sizes = ((queries, 0.1), (keys, 0.1), (keys, 1))
    q, k, v = (torch.randn(heads, heads, tokens, 64, device="cuda") * size for tokens, size in sizes)
    q[..., 0], k[..., 0] = 1.0, -120.0 * 8
    q, k, v = (part.to(dtype).requires_grad_() for part in (q, k, v))
    attend = lambda: F.scaled_dot_product_attention(q, k, v).float().square().sum()  # noqa: E731
    (torch.compile(attend) if is_compiled else attend)().backward()
    assert q.grad is not None
    assert k.grad is not None
    return torch.cat([q.grad.flatten(), k.grad.flatten()])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_attention_is_finite_at_lengths_where_cudnn_gives_nan(precision: str, is_compiled: bool) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for keys, heads, queries in ((64, 2, 64), (192, 2, 64), (128, 1, 1)):
        with plan(precision, "cuda").forward():
            found = gradients(keys, dtype, is_compiled=is_compiled, heads=heads, queries=queries)
        assert found.isfinite().all()
        if has_cudnn_fault("cuda") and not is_compiled:
            raw = gradients(keys, dtype, is_compiled=False, heads=heads, queries=queries)
            assert raw.isnan().any(), "fixed: is_at_fault may ask for the version"


class Attending(nn.Module):
    """Calls torch's attention by a name of its own, with scores of -120."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.ones_like(x[..., :1])
        q, k = torch.cat([first, self.inner(x)[..., 1:]], -1), torch.cat([-120.0 * 8 * first, x[..., 1:]], -1)
        return torchs_attention(*(part[:, None] for part in (q, k, x))).float()


@pytest.mark.skipif(not has_cudnn_fault("cuda"), reason="NOT tested: cuDNN of this GPU is right")
def test_replay_blames_the_kernel_where_the_code_calls_torchs_attention_by_a_name_of_its_own(tmp_path: Path) -> None:
    model = Attending().cuda()
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16", capsules=tmp_path)
    loss_fn = lambda x: model(x).square().mean()  # noqa: E731
    step(loss_fn, [torch.randn(2, 64, 64, device="cuda")])
    with pytest.warns(UserWarning, match="was saved"):
        step.finish()
    found = hs.replay(list_capsules(tmp_path)[0], model, loss_fn)
    assert found.cause == causes.KERNEL
    assert "scaled_dot_product_cudnn_attention_backward" in found.diagnosis.origin.name
