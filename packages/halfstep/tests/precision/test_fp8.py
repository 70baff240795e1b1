"""fp8 Linear layers, simulated: the right operands in the right formats, in all three products."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from halfstep.formats import FP8_E4M3, FP8_E5M2, Format
from halfstep.hardware.device_facts import Hardware
from halfstep.precision.decide import decide
from halfstep.precision.fp8 import cast_to_fp8
from halfstep.precision.simulate import round_to

CPU = Hardware(kind="cpu", device="cpu", name="Test CPU", vendor="test", support=MappingProxyType({"fp32": "native"}))


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


def test_fp8_stays_close_to_fp32() -> None:
    # torchao's own test of its recipe asks for a signal 20 dB above the noise, a relative error of 0.1.
    plain, model = fp8_linear()
    x = torch.randn(64, 32)
    with decide("fp8", CPU, simulate=True).forward():
        output = model(x)
    assert (output - plain(x)).norm() / plain(x).norm() < 0.1


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
