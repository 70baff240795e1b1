"""fp8 in hs.Step: bf16 until the compiled step is measured, then the faster of the two, on the CPU by emulation."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchao.float8", reason="torchao is not installed: NOT tested against it")

import halfstep as hs  # noqa: E402
from halfstep.errors import HardwareError, PrecisionError  # noqa: E402
from halfstep.fast import compiled_trial, fp8_trial  # noqa: E402
from halfstep.hardware.device_facts import Hardware  # noqa: E402
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape  # noqa: E402
from halfstep.precision.fp8 import read_torchao_settings  # noqa: E402
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once  # noqa: E402

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
WITH_FP8 = Hardware(
    kind="cpu",
    device="cpu",
    name="a CPU with fp8",
    vendor="test",
    support=MappingProxyType(dict.fromkeys(FORMATS, "native")),  # type: ignore[arg-type]
)


class Conv1D(nn.Module):
    """A layer with its weight stored as (in, out), as in transformers' GPT-2."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, out) / 8), nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 64), nn.GELU(), Conv1D(32, 64)) for _ in range(2)])
        self.odd = nn.Linear(32, 24)
        self.last = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        output: Tensor = self.last(self.odd(x))
        return output


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The products are torchao's, emulated; times are given."""
    monkeypatch.setattr("halfstep.own_loop.step.probe", lambda device: WITH_FP8)
    monkeypatch.setattr(fp8_trial, "read_torchao_settings", functools.partial(read_torchao_settings, emulate=True))
    gain = Fp8Gain(fp8_ms=1.0, bf16_ms=1.5)
    monkeypatch.setattr(fp8_trial, "measure_gains_once", lambda shapes, *_: dict.fromkeys(shapes, gain))
    try_compiled_code_at_once(monkeypatch)
    with replays_on_cpu():
        yield


def train(precision: Any, num: int = 9, **more: Any) -> tuple[hs.Step, list[hs.Step]]:
    torch.manual_seed(0)
    model = Net()
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-2, fused=True), precision, **more)
    outcomes: Any = []
    for _ in range(num):
        window = [torch.randn(4, 5, 16) for _ in range(more.get("accumulate", 1))]
        outcomes.append(step(lambda x: (model(x) - x).square().mean(), window))
    step.finish()
    return step, outcomes


def find_fp8(step: hs.Step) -> list[str]:
    return [row.module for row in step.plan.rows if row.compute == "fp8"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_faster_step_is_taken_and_trains_in_fp8(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    step, outcomes = train(hs.Precision("fp8", fp8_recipe=recipe))
    assert step.plan.granted == "fp8"
    assert find_fp8(step) == ["blocks.0.0", "blocks.0.2", "blocks.1.0", "blocks.1.2"]
    lines = capsys.readouterr().err
    assert "fp8 in 4 layers (blocks.*.*): 1e+03 ms per step, 2e+03 ms in bf16 (2.00x)" in lines
    assert "2000.0 ms in bf16" in step.plan.reason
    assert outcomes[-1].loss < outcomes[0].loss
    in_bf16, same = train("bf16")
    assert list(step.model.state_dict()) == list(in_bf16.model.state_dict())
    assert all(value.dtype == torch.float32 for value in step.model.state_dict().values())
    assert outcomes[-1].loss != same[-1].loss  # it does compute in fp8
    assert abs(outcomes[-1].loss / same[-1].loss - 1) < 0.05
    assert type(step.model.blocks[0][0]) is nn.Linear
