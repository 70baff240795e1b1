"""Where a number stopped being finite: the operation that is blamed, and for what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty_steps import Batch, keep_fault, numbers, replay_fault
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.capsule import read_capsule
from halfstep.evidence.ranges import Operation, RangeTrace


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


# --- replay of steps with complex numbers: spectra, complex weights, buffers and inputs ---


def batch_of(**more: Tensor) -> Batch:
    return {"x": numbers(4, 8), "index": torch.arange(4), **more}


class Spectral(nn.Module):
    """A filter with complex weights, and running phases of its input."""

    def __init__(self, *, phases: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.phases: Tensor
        self.register_buffer("phases", torch.zeros(5, dtype=torch.complex64))
        self.has_phases = phases

    def forward(self, x: Tensor) -> Tensor:
        if self.has_phases:
            with torch.no_grad():
                mean = torch.fft.rfft(x).mean(0)
                self.phases.mul_(0.9).add_(0.1 * mean / mean.abs())
        return torch.fft.irfft(torch.fft.rfft(self.inner(x)) * self.weight, n=8)


def test_a_phase_of_0_by_0_is_named_with_its_line_and_the_change_works(tmp_path: Path) -> None:
    model = Spectral()

    def loss_fn(batch: Batch) -> Tensor:
        spectrum = torch.fft.rfft(model(0 * batch["x"]) * 0)
        return (spectrum / spectrum.abs()).real.square().mean() + model(batch["x"]).square().mean()

    found: Any = replay_fault(tmp_path, model, loss_fn, batch_of())
    assert found.cause == causes.UNDERFLOW, str(found)
    assert (found.diagnosis.origin.name, found.diagnosis.origin.output.dtype) == ("div", "complex64")
    assert Path(__file__).name in found.diagnosis.origin.line
    assert found.remedy.works, str(found)


@pytest.mark.filterwarnings("ignore:parameters not finite before:UserWarning")
@pytest.mark.parametrize("name", ["weight", "phases"])
def test_a_complex_weight_or_buffer_that_is_not_finite_is_named(tmp_path: Path, name: str) -> None:
    model = Spectral()
    with torch.no_grad():
        getattr(model, name)[2] = complex(0.0, float("nan"))

    def loss_fn(batch: Batch) -> Tensor:
        return (model(batch["x"]).square().mean() + model.phases.real.sum() + model.phases.imag.sum()).float()

    found: Any = replay_fault(tmp_path, model, loss_fn, batch_of())
    assert found.cause == causes.BAD_STATE, str(found)
    assert found.diagnosis.shown == [f"{name} was not finite from the start"]
    assert name in found.remedy.change
    assert found.remedy.works, str(found)


def test_a_complex_input_that_is_not_finite_is_named_with_its_sample(tmp_path: Path) -> None:
    model, signal = Spectral(), torch.ones(4, 5, dtype=torch.complex64)
    signal[3, 1] = complex(1.0, float("inf"))
    found: Any = replay_fault(
        tmp_path, model, lambda b: (model(b["x"]).sum() * b["signal"]).abs().mean(), batch_of(signal=signal)
    )
    assert found.cause == causes.BAD_INPUT, str(found)
    assert str(found.diagnosis.places[0]) == "sample 3: ['signal'][1] is 1+infj"
    assert found.remedy.works, str(found)


def test_a_complex_buffer_that_forward_fills_with_nan_is_named_though_loss_and_gradients_are_finite(
    tmp_path: Path,
) -> None:
    model, silent = Spectral(phases=True), {"x": torch.zeros(4, 8)}
    is_recorded = False

    def loss_fn(batch: Batch) -> Tensor:
        return model(batch["x"]).square().mean() * (1.0 if is_recorded else float("nan"))

    path = keep_fault(tmp_path, model, loss_fn, silent)
    is_recorded = True
    found: Any = hs.replay(path, model, loss_fn)
    assert found.as_was.not_finite == ("phases",)
    assert found.cause == causes.UNDERFLOW, str(found)
    assert found.diagnosis.origin.name == "div"
    assert Path(__file__).name in found.diagnosis.origin.line
    assert found.remedy.works, str(found)


def test_the_fp64_run_keeps_imaginary_parts(tmp_path: Path) -> None:
    model = Spectral()
    found = replay_fault(tmp_path, model, lambda b: model(b["x"]).square().mean() / 0.0, batch_of())
    in_fp64 = found.diagnosis.attempts[-1]
    assert (in_fp64.name, in_fp64.error) == ("fp64", "")
    assert "complex128" in {op.output.dtype for op in in_fp64.trace.operations}
    assert model.weight.dtype == torch.complex64


def test_a_capsule_holds_complex_numbers_as_they_are(tmp_path: Path) -> None:
    model, signal = Spectral(), torch.randn(4, 3, dtype=torch.complex64).conj()
    before = model.weight.detach().clone()
    held = read_capsule(
        keep_fault(tmp_path, model, lambda b: model(b["x"]).sum().float() * torch.nan, batch_of(signal=signal))
    )
    assert torch.equal(held.state["weight"], before)
    assert torch.equal(held.window[0]["signal"], signal)
