"""fp8 Linear layers, simulated: the right operands in the right formats, in all three products."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fake_driver import ALL_NATIVE, make_hardware
from halfstep.errors import HardwareError, PrecisionError
from halfstep.formats import FP8_E4M3, FP8_E5M2, Format
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape
from halfstep.precision.decide import decide
from halfstep.precision.fp8 import (
    cast_to_fp8,
    find_edge_layers,
    find_layer_shapes,
    judge_whole_steps,
    measure_layer_gains,
)
from halfstep.precision.plan import Plan
from halfstep.precision.simulate import round_to

CPU = make_hardware("cpu")


def scaled_round(x: Tensor, fmt: Format) -> Tensor:
    """The definition: scale to the format's range, round, scale back."""
    factor = fmt.largest / x.abs().amax()
    return round_to((x * factor).clamp(-fmt.largest, fmt.largest), fmt) / factor


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
def test_cast_scales_to_the_formats_range(fmt: Format, magnitude: float) -> None:
    x = torch.randn(33, 17) * magnitude
    values, scale = cast_to_fp8(x, fmt)
    torch.testing.assert_close(values.float() * scale, scaled_round(x, fmt), rtol=1e-6, atol=0)
    assert values.float().abs().max() == fmt.largest


def test_cast_of_zeros_is_zero() -> None:
    values, scale = cast_to_fp8(torch.zeros(4, 4), FP8_E4M3)
    assert (values.float() * scale == 0).all()


def fp8_linear(*, bias: bool = True) -> tuple[nn.Linear, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Linear(32, 48, bias=bias)
    model = nn.Sequential(nn.Linear(32, 48, bias=bias))
    model[0].load_state_dict(plain.state_dict())
    decide("fp8", CPU, model, simulate=True).apply(model)
    return plain, model


def test_the_layer_is_swapped_and_keeps_its_names() -> None:
    plain, model = fp8_linear()
    assert "LinearInFp8" in repr(model)
    assert list(model[0].state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("tokens", [(5,), (2, 7), (16,)])
def test_forward_multiplies_e4m3_values(tokens: tuple[int, ...]) -> None:
    plain, model = fp8_linear()
    x = torch.randn(*tokens, 32).bfloat16().float()  # what autocast hands over
    with decide("fp8", CPU, simulate=True).forward():
        output = model(x)
    product = scaled_round(x, FP8_E4M3) @ scaled_round(plain.weight.detach(), FP8_E4M3).t()
    expected = product.bfloat16() + plain.bias.detach().bfloat16()
    assert output.dtype == torch.bfloat16
    assert output.shape == (*tokens, 48)
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=2**-8)


def test_backward_takes_e5m2_gradients() -> None:
    plain, model = fp8_linear(bias=False)
    plan = decide("fp8", CPU, simulate=True)
    x = torch.randn(24, 32).bfloat16().float().requires_grad_()
    grad = torch.randn(24, 48).bfloat16()
    with plan.forward():
        output = model(x)
    with plan.backend():
        output.backward(grad)
    g = scaled_round(grad.float(), FP8_E5M2)
    expected_x = g @ scaled_round(plain.weight.detach(), FP8_E4M3)
    expected_w = g.t() @ scaled_round(x.detach(), FP8_E4M3)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected_x, rtol=2**-7, atol=2**-8)
    torch.testing.assert_close(model[0].weight.grad, expected_w, rtol=2**-7, atol=2**-6)


def test_a_part_may_be_fp8_under_a_bf16_default() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(32, 32), nn.Conv1d(1, 1, 1)), "head": nn.Linear(32, 16)})
    plan = decide("bf16", CPU, model, modules={"body": "fp8"}, simulate=True)
    plan.apply(model)
    assert type(model["body"][0]).__name__ == "LinearInFp8"
    assert type(model["head"]) is nn.Linear
    with plan.forward():
        assert model["head"](model["body"][0](torch.randn(2, 32))).dtype == torch.bfloat16


def test_an_fp8_part_needs_no_autocast_of_its_own_under_bf16_but_does_under_fp32() -> None:
    for default, names in (("bf16", ["Sequential", "LinearInFp8"]), ("fp32", ["SequentialInHalf", "LinearInFp8"])):
        model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(32, 32))})
        plan = decide(default, CPU, model, modules={"body": "fp8"}, simulate=True)
        plan.apply(model)
        assert [type(module).__name__ for module in (model["body"], model["body"][0])] == names
        with plan.forward():
            expected = torch.bfloat16 if default == "bf16" else torch.float32
            assert model["body"](torch.randn(2, 32)).dtype == expected


def test_deciding_again_for_an_applied_model_gives_the_same_rows() -> None:
    _, model = fp8_linear()
    assert decide("fp8", CPU, model, simulate=True).rows[0].compute == "fp8"


def test_subclasses_of_linear_keep_their_own_forward() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Doubling(16, 16))
    plan = decide("fp8", CPU, model, simulate=True)
    plan.apply(model)
    assert plan.rows[0].compute == "bf16"
    assert type(model[0]) is Doubling


# --- fp8 only where it is faster ---

HOPPER = make_hardware(**ALL_NATIVE)
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
    assert plan.warnings[0].startswith("fp8 requested, running bf16: no layer of Sequential gets faster in fp8")
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
    assert "fp8 requested, running bf16" in plan.warnings[0]


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

    def measure(
        shapes: Iterable[LayerShape], _hardware: Hardware, _directory: Path, _recipe: str
    ) -> dict[LayerShape, Fp8Gain]:
        asked.extend(shapes)
        return dict.fromkeys(asked, FAST)

    gains = measure_layer_gains(net, lambda: net(torch.empty(16, 32)), HOPPER, tmp_path, measure=measure)
    assert set(gains) == {"0", "1", "2"}
    assert set(asked) == {LayerShape(32, 32, 16), LayerShape(32, 64, 16)}


def test_nothing_is_measured_on_a_device_without_fp8(tmp_path: Path) -> None:
    assert measure_layer_gains(model(), lambda: 1 / 0, CPU, tmp_path) == {}


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
