"""Applying a plan: storage, and parts that compute unlike the rest by a swapped class."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fake_driver import make_hardware
from halfstep.errors import PrecisionError
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan, PlanRow

CPU = make_hardware("cpu", bf16="native", fp16="emulated")


class Net(nn.Module):
    """A weight and a buffer of its own, a body with BatchNorm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.register_buffer("table", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(x * self.scale + self.table))
        return output


def plan_for(model: nn.Module, default: str = "bf16", **options: Any) -> Plan:
    return decide(default, CPU, model, **options)


def test_mixed_precision_leaves_trainable_weights_in_fp32() -> None:
    model = Net()
    plan_for(model).apply(model)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_bf16_true_stores_weights_in_bf16_but_for_batch_norm_and_buffers() -> None:
    model = Net()
    plan = plan_for(model, "bf16-true")
    plan.apply(model)
    half = {name for name, value in model.state_dict().items() if value.dtype == torch.bfloat16}
    assert half == {"scale", "body.0.weight", "body.0.bias", "head.weight", "head.bias"}
    with plan.forward():
        model(torch.randn(4, 8)).sum().backward()
    assert model.head.weight.grad.dtype == torch.bfloat16


def test_a_frozen_part_is_stored_in_half_and_runs_under_an_fp32_default() -> None:
    model = Net()
    model.body.requires_grad_(False)
    plan = plan_for(model, "fp32", modules={"body": "bf16-true"})
    plan.apply(model)
    assert model.body[0].weight.dtype == torch.bfloat16
    with plan.forward():
        hidden = model.body(torch.randn(4, 8))
        assert hidden.dtype == torch.float32  # so that fp32 neighbours can take it
        assert torch.equal(hidden, hidden.bfloat16().float())
        assert model(torch.randn(4, 8)).dtype == torch.float32


def test_an_fp32_part_gets_upcast_inputs_and_computes_in_fp32() -> None:
    model = Net()
    plan = plan_for(model, modules={"head": "fp32"})
    plan.apply(model)
    x = torch.randn(4, 8)
    with plan.forward():
        hidden = model.body(x)
        assert hidden.dtype == torch.bfloat16
        output = model.head(hidden)
    assert torch.equal(output, nn.functional.linear(hidden.float(), model.head.weight, model.head.bias))


def test_state_dict_names_stay_and_the_part_is_seen_in_print() -> None:
    model = Net()
    names = list(model.state_dict())
    plan_for(model, modules={"head": "fp32"}).apply(model)
    assert list(model.state_dict()) == names
    assert "(head): LinearInFp32(in_features=16" in repr(model)
    assert isinstance(model.head, nn.Linear)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_its_own_weights_in_its_own_precision(clone: Any) -> None:
    model = Net()
    plan = plan_for(model, modules={"head": "fp32"})
    plan.apply(model)
    ema = clone(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with plan.forward():
        output = ema(torch.randn(4, 8))
    assert type(ema.head) is type(model.head)
    assert output.dtype == torch.float32
    assert output.abs().sum() > 0


def test_applying_another_plan_starts_from_the_original_classes() -> None:
    model = Net()
    plan_for(model, modules={"head": "fp32"}).apply(model)
    plan_for(model, modules={"body": "fp32"}).apply(model)
    assert type(model.head) is nn.Linear
    assert type(model.body).__name__ == "SequentialInFp32"


def test_children_of_a_part_are_not_wrapped_again() -> None:
    model = Net()
    plan_for(model, modules={"body": "fp32"}).apply(model)
    assert type(model.body[0]) is nn.Linear


def test_a_plan_made_without_a_model_applies_too() -> None:
    model = Net()
    decide("bf16-true", CPU, modules={"head": "fp32"}).apply(model)
    assert model.body[0].weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert type(model.head).__name__ == "LinearInFp32"


def test_a_plan_from_json_applies_alike() -> None:
    model, twin = Net(), Net()
    plan = plan_for(model, "fp32", modules={"body": "bf16-true", "head": "bf16"})
    plan.apply(model)
    Plan.from_json(plan.to_json()).apply(twin)
    assert repr(model) == repr(twin)
    assert {k: v.dtype for k, v in model.state_dict().items()} == {k: v.dtype for k, v in twin.state_dict().items()}


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PrecisionError, match="does not have"):
        plan_for(Net()).apply(nn.Linear(2, 2))


def test_a_swapped_part_compiles_into_one_graph() -> None:
    model = Net().eval()
    plan = plan_for(model, modules={"head": "fp32", "body": "bf16"})
    plan.apply(model)
    x = torch.randn(4, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with plan.forward():
        torch.testing.assert_close(compiled(x), model(x))


# --- the plan as a table and as JSON ---


def sample_plan() -> Plan:
    layers = [PlanRow(module=f"down.{i}", storage="fp32", compute="bf16", reason="the default") for i in range(30)]
    head = PlanRow(
        module="head", storage="fp32", compute="fp32", reason="asked for fp32", kind="module", precision="fp32"
    )
    island = PlanRow(module="loss", storage="-", compute="fp32", reason="Dice sums", kind="island")
    return Plan(
        asked="auto",
        granted="bf16",
        reason="native on H200, measured 12x fp32",
        device="cuda:0",
        device_name="H200",
        rows=(*layers[:15], head, *layers[15:], island),
        warnings=("something to see",),
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [{"colour": "red"}]}'])
def test_what_is_not_a_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(PrecisionError, match="not a stored plan"):
        Plan.from_json(text)


def test_a_plan_for_hardware_that_is_not_here_prints_but_does_not_run() -> None:
    plan = dataclasses.replace(sample_plan(), device="")
    assert "not on this machine" in str(plan)
    with pytest.raises(PrecisionError, match="not on this machine"), plan.forward():
        pass
