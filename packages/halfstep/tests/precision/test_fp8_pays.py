"""fp8 only where it pays: rows with measured reasons, bf16 where nothing gains, and never a silent other way."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import nn

from halfstep.errors import HardwareError, PrecisionError
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape
from halfstep.precision.decide import decide
from halfstep.precision.fp8 import find_edge_layers, find_layer_shapes, judge_whole_steps, measure_layer_gains
from halfstep.precision.plan import Plan

FORMATS = ("fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
HOPPER = Hardware(
    kind="cuda",
    device="cuda:0",
    name="H200",
    vendor="NVIDIA",
    support=MappingProxyType(dict.fromkeys(FORMATS, "native")),  # type: ignore[arg-type]
)
FAST, SLOW = Fp8Gain(fp8_ms=1.0, bf16_ms=1.3), Fp8Gain(fp8_ms=1.0, bf16_ms=0.9)


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10), nn.Linear(10, 16)
    )


def computes(plan: Plan) -> dict[str, str]:
    return {row.module: row.compute for row in plan.rows}


def test_layers_that_gain_run_fp8_and_the_others_say_why_not() -> None:
    plan = decide("fp8", HOPPER, model(), fp8_gains={"1": FAST, "2": SLOW})
    assert plan.granted == "fp8"
    assert computes(plan) == {"0": "bf16", "1": "fp8", "2": "bf16", "3": "bf16", "4": "bf16"}
    reasons = {row.module: row.reason for row in plan.rows}
    assert "first and the last" in reasons["0"]
    assert reasons["1"] == "measured fp8 1.000 ms, bf16 1.300 ms, 1.30x"
    assert "0.90x" in reasons["2"]
    assert "divisible by 16" in reasons["3"]


def test_a_gain_below_five_percent_is_none() -> None:
    gains = {"1": Fp8Gain(fp8_ms=1.0, bf16_ms=1.04), "2": Fp8Gain(fp8_ms=1.0, bf16_ms=1.06)}
    assert [computes(decide("fp8", HOPPER, model(), fp8_gains=gains))[name] for name in "12"] == ["bf16", "fp8"]


def test_where_no_layer_gains_the_plan_is_bf16_and_says_so() -> None:
    plan = decide("fp8", HOPPER, model(), fp8_gains={"1": SLOW, "2": SLOW})
    assert (plan.asked, plan.granted) == ("fp8", "bf16")
    assert plan.warnings[0].startswith("fp8 asked for, running bf16: no layer of Sequential gets faster in fp8")
    assert "0.90x" in str(plan)


def test_strict_makes_going_back_to_bf16_an_error() -> None:
    with pytest.raises(HardwareError, match="no layer of Sequential") as caught:
        decide("fp8", HOPPER, model(), fp8_gains={"1": SLOW, "2": SLOW}, strict=True)
    assert "precision.force=true" in caught.value.fix


def test_force_runs_every_layer_that_can_take_it() -> None:
    plan = decide("fp8", HOPPER, model(), fp8_gains={"1": SLOW}, force=True)
    assert computes(plan) == {"0": "fp8", "1": "fp8", "2": "fp8", "3": "bf16", "4": "bf16"}
    assert plan.rows[1].reason == "forced; fp8 1.000 ms, bf16 0.900 ms, 0.90x"


def test_a_layer_named_for_fp8_gets_it_although_it_is_the_last() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    assert computes(decide("bf16", HOPPER, net, modules={"2": "fp8"}))["2"] == "fp8"
    assert computes(decide("fp8", HOPPER, net))["2"] == "bf16"


def test_a_part_that_gains_nothing_in_fp8_says_so() -> None:
    plan = decide("bf16", HOPPER, model(), modules={"1": "fp8"}, fp8_gains={"1": SLOW})
    assert (plan.granted, computes(plan)["1"]) == ("bf16", "bf16")
    assert "fp8 asked for, running bf16" in plan.warnings[0]


def test_edges_are_the_outermost_layers_with_a_matrix() -> None:
    net = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(3, 4, 1), nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert find_edge_layers(net) == {"1", "3"}
    assert find_edge_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == set()


def test_shapes_are_found_without_computing_or_changing_anything() -> None:
    net = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(7), nn.Linear(48, 16), nn.Linear(16, 3)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    shapes = find_layer_shapes(net, lambda: net(torch.empty(5, 7, 32)))
    assert shapes == {"0": LayerShape(32, 48, 48), "2": LayerShape(48, 16, 48)}  # 35 rows, padded
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_equal_shapes_are_measured_together_and_given_to_each_layer(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64))
    asked: list[LayerShape] = []

    def measure(shapes: Iterable[LayerShape], _hardware: Hardware, _directory: Path) -> dict[LayerShape, Fp8Gain]:
        asked.extend(shapes)
        return dict.fromkeys(asked, FAST)

    gains = measure_layer_gains(net, lambda: net(torch.empty(16, 32)), HOPPER, tmp_path, measure=measure)
    assert set(gains) == {"0", "1", "2"}
    assert set(asked) == {LayerShape(32, 32, 16), LayerShape(32, 64, 16)}


def test_nothing_is_measured_on_a_device_without_fp8(tmp_path: Path) -> None:
    cpu = Hardware(
        kind="cpu", device="cpu", name="Test CPU", vendor="test", support=MappingProxyType({"fp32": "native"})
    )
    assert measure_layer_gains(model(), lambda: 1 / 0, cpu, tmp_path) == {}


@pytest.mark.parametrize(("fp8_ms", "granted"), [(119.9, "bf16"), (100.0, "fp8")])
def test_a_step_that_is_slower_as_a_whole_goes_back_to_bf16(fp8_ms: float, granted: str) -> None:
    plan = decide("fp8", HOPPER, model(), fp8_gains={"1": FAST})
    after = judge_whole_steps(plan, fp8_ms=fp8_ms, bf16_ms=110.1)
    assert after.granted == granted
    assert f"{fp8_ms:.1f} ms in fp8 and 110.1 ms in bf16" in after.reason
    assert (computes(after)["1"] == "fp8") == (granted == "fp8")
    assert Plan.from_json(after.to_json()) == after


def test_without_torchao_fp8_is_an_error_that_names_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    net = model()
    plan = decide("fp8", HOPPER, net)
    with pytest.raises(PrecisionError, match="torchao is not installed") as caught:
        plan.apply(net)
    assert "pip install 'torchao>=0.17'" in caught.value.fix
    with pytest.raises(PrecisionError, match="torchao is not installed"):
        measure_layer_gains(net, lambda: net[:4](torch.empty(16, 64)), HOPPER, tmp_path)
