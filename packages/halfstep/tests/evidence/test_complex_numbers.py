"""Replay of steps with complex numbers: spectra, complex weights, buffers and inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_steps import Batch, keep_fault, numbers, replay_fault
from torch import Tensor, nn

import halfstep as hs
from halfstep.evidence import causes
from halfstep.evidence.capsule import read_capsule


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


@pytest.mark.filterwarnings("ignore:not finite before the first step:UserWarning")
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
