"""fp8 in hs.Step: bf16 until the compiled step is measured, then the faster of the two, on the CPU by emulation."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("torchao.float8", reason="torchao is not installed: NOT tested against it")

import halfstep as hs  # noqa: E402
from fake_driver import ALL_NATIVE, make_hardware  # noqa: E402
from halfstep.errors import ConfigError, HardwareError, PrecisionError  # noqa: E402
from halfstep.fast import compiled_trial, fp8_trial  # noqa: E402
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape  # noqa: E402
from halfstep.precision.fp8 import read_torchao_settings  # noqa: E402
from replay_stand_in import replays_on_cpu, try_compiled_code_at_once  # noqa: E402

WITH_FP8 = make_hardware("cpu", **ALL_NATIVE)


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
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), Conv1D(32, 64))
        self.odd = nn.Linear(32, 24)
        self.last = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        output: Tensor = self.last(self.odd(x))
        return output


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The products are torchao's, emulated; times are given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
    return [row.module for row in step.plan.rows if row.compute == "fp8" and row.module != "block"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_faster_step_is_taken_and_trains_in_fp8(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    step, outcomes = train(hs.Precision("fp8", fp8_recipe=recipe))
    assert step.plan.granted == "fp8"
    assert find_fp8(step) == ["block.0", "block.2"]
    lines = capsys.readouterr().err
    assert "fp8 in 2 layers (block.*): 1e+03 ms per step, 2e+03 ms in bf16 (2.00x)" in lines
    assert "2000.0 ms in bf16" in step.plan.reason
    assert outcomes[-1].loss < outcomes[0].loss
    _, same = train("bf16", fast="off")
    assert list(step.model.state_dict()) == list(Net().state_dict())
    assert all(value.dtype == torch.float32 for value in step.model.state_dict().values())
    assert outcomes[-1].loss != same[-1].loss  # it does compute in fp8
    assert abs(outcomes[-1].loss / same[-1].loss - 1) < 0.05
    assert type(step.model.block[0]) is nn.Linear


def slow_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code is faster, and fp8 slower than that."""
    seconds = itertools.cycle([2.0, 1.0, 1.0, 1.1])
    monkeypatch.setattr(compiled_trial, "time_replays", lambda replay, device: next(seconds))


def test_a_slower_step_stays_in_bf16_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow_replays(monkeypatch)
    step, _ = train("fp8")
    assert (step.plan.asked, step.plan.granted, find_fp8(step)) == ("fp8", "bf16", [])
    lines = capsys.readouterr().err
    assert lines.count("fp8 requested, running bf16: a step takes 1100.0 ms in fp8 and 1000.0 ms in bf16") == 1


def test_strict_refuses_a_slower_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_replays(monkeypatch)
    with pytest.raises(HardwareError, match="1100.0 ms in fp8 and 1000.0 ms in bf16"):
        train(hs.Precision("fp8", strict=True))


def test_layers_that_do_not_gain_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Fp8Gain(fp8_ms=1.0, bf16_ms=0.9)
    shapes: list[LayerShape] = []
    measure = lambda given, *_: shapes.extend(given) or dict.fromkeys(shapes, slow)  # noqa: E731
    monkeypatch.setattr(fp8_trial, "measure_gains_once", measure)
    step, _ = train("fp8", num=7)
    assert step.plan.granted == "bf16"
    assert "0.90x" in str(step.plan)
    # 4 x 5 rows, padded to 32; the first and the last layer are measured as well, the one with 24 outputs is not.
    assert set(shapes) == {LayerShape(16, 32, 32), LayerShape(32, 64, 32), LayerShape(64, 32, 32)}


@pytest.mark.parametrize("fast", ["off", "graph"])
def test_uncompiled_steps_stay_in_bf16(fast: Any) -> None:
    with pytest.warns(UserWarning, match=f"running bf16: fp8 pays off in compiled steps only: fast='{fast}'"):
        step, _ = train("fp8", num=0, fast=fast)
    assert step.plan.granted == "bf16"
    with pytest.raises(HardwareError, match="compiled steps only"):
        train(hs.Precision("fp8", strict=True), num=0, fast=fast)


def test_hooks_that_keep_a_step_from_being_compiled_keep_it_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    step, _ = train("fp8", num=7, on_commit=lambda model: None)
    assert step.plan.granted == "bf16"
    assert (
        "running bf16: the step is captured without its commit: on_gradients= and on_commit=" in capsys.readouterr().err
    )


def test_a_model_without_layers_for_fp8_stays_captured_in_bf16(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(5, 5)
    step = hs.Step(model, torch.optim.SGD(model.parameters(), 0.1, fused=True), "fp8")
    for _ in range(7):
        step(lambda x: model(x).square().mean(), [torch.ones(4, 5)])
    assert "running bf16: loss_fn calls no linear layer with sizes divisible by 16" in capsys.readouterr().err
    assert (step.plan.granted, step.mode) == ("bf16", "graph")


def test_names_choose_the_layers() -> None:
    step, _ = train(hs.Precision("bf16", modules={"block": "fp8", "block.2": "bf16"}))
    assert (step.plan.granted, find_fp8(step)) == ("bf16", ["block.0"])


def test_accumulation_average_and_bad_steps_work_and_a_state_resumes() -> None:
    torch.manual_seed(1)
    step, _ = train("fp8", accumulate=2, ema_decay=0.9, clip_norm=1.0, watch=4, fast=hs.Fast("compile"))
    assert find_fp8(step)
    model, before = step.model, copy.deepcopy(step.model.state_dict())
    loss_fn = lambda x: (model(x) - x).square().mean()  # noqa: E731
    assert not step(loss_fn, [torch.full((4, 5, 16), float("nan"))] * 2).committed
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(2)
    other = Net()
    other.load_state_dict(before)
    again = hs.Step(
        other, torch.optim.AdamW(other.parameters(), 1e-2, fused=True), "fp8", accumulate=2, ema_decay=0.9, watch=4,
    )  # fmt: skip
    again.load_state_dict(step.state_dict())
    assert again.committed == step.committed


def test_compiled_code_that_fails_later_gives_fp8_up(capsys: pytest.CaptureFixture[str]) -> None:
    step, _ = train("fp8")
    step._fast.move("refused", "planted")
    assert (step.plan.granted, find_fp8(step)) == ("bf16", [])
    assert "running bf16: the step is not compiled as a whole: planted" in capsys.readouterr().err


def test_an_unknown_recipe_and_a_simulated_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown fp8_recipe 'columnwise'"):
        hs.Precision("fp8", fp8_recipe="columnwise")
    with pytest.raises(PrecisionError, match="cannot be simulated"):
        train(hs.Precision("fp8", simulate=True, fp8_recipe="rowwise"), num=0)
