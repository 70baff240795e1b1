"""Where a number stopped being finite: the operation that is blamed, and for what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.ranges import Operation, Range, RangeTrace


def half_bad() -> Tensor:
    """Its first row is not finite, by a division."""
    return torch.tensor([[1.0], [800.0]]) / torch.tensor([[0.0], [1.0]])


def mended_in_place() -> Tensor:
    x = half_bad()
    x[0] = 1.0
    return torch.exp(x)


def beside_it() -> Tensor:
    return torch.exp(half_bad()[1])


def behind_it() -> Tensor:
    x = half_bad()
    x[1] = 1.0
    return torch.exp(x)


@pytest.mark.parametrize(("made", "name"), [(mended_in_place, "exp"), (beside_it, "exp"), (behind_it, "div")])
def test_the_origin_is_that_of_the_numbers_that_were_read(made: Any, name: str) -> None:
    with RangeTrace(nn.Identity()) as trace:
        out = made()
        origin = trace.find_origin(out)
    assert origin.name == name


def backward_of_attention(values: float) -> Operation:
    torch.manual_seed(0)
    x = torch.randn(3, 1, 2, 32, 64)
    x[2] *= values
    q, k, v = (part.half().requires_grad_() for part in x)
    with RangeTrace(nn.Identity()) as trace:
        out = F.scaled_dot_product_attention(q, k, v)
        (gradient, *_) = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 2000.0) * torch.randn(64).half())
        origin = trace.find_origin(gradient)
    assert origin.output.num_nan
    return origin


def test_fp16_attention_that_overflows_inside_is_no_fault_of_the_kernel() -> None:
    op = backward_of_attention(values=64.0)
    runs: Any = SimpleNamespace(eager=SimpleNamespace(origin=op), fp32=SimpleNamespace(is_good=True))
    found = causes._diagnose_attention(runs)
    assert found.cause == causes.OVERFLOW
    runs.eager.origin = replace(op, inputs=[replace(r, high=6.0) for r in op.inputs])
    found = causes._diagnose_attention(runs)
    assert found.cause == causes.KERNEL


def test_an_operation_of_ones_own_that_is_called_attention_is_not_taken_for_torchs() -> None:
    op = backward_of_attention(values=64.0)
    own = replace(op, is_torch=False, inputs=op.inputs[:1])
    runs: Any = SimpleNamespace(eager=SimpleNamespace(origin=own), fp32=SimpleNamespace(is_good=True))
    assert causes._diagnose_attention(runs) is None


def test_no_line_of_halfstep_s_own_machinery_is_named_as_the_user_s() -> None:
    """Every operation of a guarded step, its verdict, clipping, optimizer and EMA included, leads to the caller."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = hs.Step(model, optimizer, precision=hs.Precision("fp16", simulate=True), clip_norm=1.0, ema_decay=0.9)
    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    with RangeTrace(model) as trace:
        step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), [(x, target)])
    lines = {op.line.rsplit(":", 1)[0] for op in trace.operations}
    assert len(trace.operations) > 50
    assert lines - {""} == {__file__}


@pytest.mark.parametrize(
    ("high", "shown"), [(0.0, "float16 without a finite nonzero value (3 inf)"), (2.0, "float16 1 to 2 (3 inf)")]
)
def test_a_range_without_finite_numbers_is_not_shown_as_0_to_0(high: float, shown: str) -> None:
    low = min(high, 1.0)
    assert str(Range(low=low, high=high, num_zero=0, num_nan=0, num_inf=3, numel=3, dtype="float16")) == shown
