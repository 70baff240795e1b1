"""fp8 by torchao on a real GPU: numbers, measured gains, the plan they make, names, skips and capture."""

from __future__ import annotations

import copy
import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from capture import captured
from halfstep.errors import HardwareError
from halfstep.fast import fp8_trial
from halfstep.hardware.fp8_layers import Fp8Gain, LayerShape, measure_fp8_gain, measure_gains_once
from halfstep.hardware.probe import probe
from halfstep.precision import fp8
from halfstep.precision.decide import decide
from halfstep.precision.fp8 import find_layer_shapes, measure_layer_gains
from halfstep.precision.names import FP8_RECIPES
from halfstep.precision.plan import Plan
from halfstep.step.optim.by_name import build_optimizer, make_parameter_groups
from halfstep.step.step import GuardedStep
from halfstep_train.models.vit import build_vit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*AccumulateGrad node's stream:UserWarning"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs sm_89 for fp8: NOT tested here",
    ),
    # Looked for, not imported: torchao warns when it is imported, which is an error here.
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed: NOT tested"),
]


def net(width: int = 1024) -> nn.Sequential:
    torch.manual_seed(0)
    sides = (64, width, 4 * width, width, 16)
    layers = [nn.Linear(a, b) for a, b in zip(sides[:-1], sides[1:], strict=True)]
    return nn.Sequential(layers[0], layers[1], nn.GELU(), layers[2], layers[3]).cuda()


def in_fp8(model: nn.Module) -> Plan:
    plan = decide("fp8", probe("cuda"), model)
    plan.apply(model)
    return plan


def test_the_gain_of_a_large_layer_is_measured_and_that_of_a_small_one_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = time.perf_counter()
    # Three times each, because tests beside it disturb single timings.
    large = max((measure_fp8_gain(4096, 16384, 16384, "cuda:0") for _ in range(3)), key=lambda gain: gain.ratio)
    small = min((measure_fp8_gain(256, 256, 1024, "cuda:0") for _ in range(3)), key=lambda gain: gain.ratio)
    with capsys.disabled():
        print(f"\nlarge: {large}; small: {small}; {time.perf_counter() - began:.0f} s")
    assert large.ratio > 1.05
    assert small.ratio < 1.05


def test_gains_of_vit_l_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = build_vit("vit_l_16", depth=2)
    shapes = find_layer_shapes(model, lambda: model(torch.empty(64, 3, 224, 224, device="meta")))
    gains = measure_gains_once(shapes.values(), probe("cuda"), tmp_path)
    with capsys.disabled():
        print("\n" + "\n".join(f"{shape}: {gain}" for shape, gain in gains.items()))

    def never(*_shape: object) -> Fp8Gain:
        raise AssertionError("measured twice")

    assert measure_gains_once(shapes.values(), probe("cuda"), tmp_path, measure=never) == gains
    assert LayerShape(1024, 4096, 64 * 197) in gains


def test_the_plan_follows_what_was_measured(tmp_path: Path) -> None:
    model = net(64)

    def measured(folder: str) -> dict[str, Fp8Gain]:
        return measure_layer_gains(
            model, lambda: model(torch.empty(256, 64, device="cuda")), probe("cuda"), tmp_path / folder
        )

    # Tests beside it disturb single timings.
    gains = min((measured(folder) for folder in "abc"), key=lambda found: max(gain.ratio for gain in found.values()))
    assert set(gains) == {"0", "1", "3", "4"}
    plan = decide("fp8", probe("cuda"), model, fp8_gains=gains)
    assert plan.granted == "bf16"  # layers this small never pay
    assert "running bf16" in plan.warnings[0]
    assert decide("fp8", probe("cuda"), model, fp8_gains=gains, force=True).granted == "fp8"


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_names_stay_and_the_weights_load_in_bf16(is_compiled: bool) -> None:
    model = net()
    before = copy.deepcopy(model)
    plan = in_fp8(model)
    assert [row.compute for row in plan.rows] == ["bf16", "fp8", "fp8", "bf16"]
    run = torch.compile(model) if is_compiled else model
    x = torch.randn(100, 64, device="cuda")  # 100 rows: padded to 112
    with plan.forward():
        loss = run(x).float().square().mean()
    with plan.backend():
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in gradients)
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(type(value) is Tensor and value.dtype == torch.float32 for value in model.state_dict().values())
    other = net()
    other.load_state_dict(model.state_dict())
    in_bf16 = decide("bf16", probe("cuda"), other)
    with in_bf16.forward(), torch.no_grad():
        expected = other(x).float()
    with plan.forward(), torch.no_grad():
        assert (model(x).float() - expected).norm() / expected.norm() < 0.1  # torchao's own bound, 20 dB


def test_a_bad_step_leaves_every_bit_alone() -> None:
    model = net(64)
    plan = in_fp8(model)
    step = GuardedStep(model, build_optimizer("adamw", make_parameter_groups(model, 0.01), lr=1e-3), plan)
    loss_fn = lambda x: model(x).float().square().mean()  # noqa: E731
    for _ in range(3):
        assert not step(loss_fn, [torch.randn(32, 64, device="cuda")]).read().is_bad
    before = copy.deepcopy(model.state_dict())
    assert step(loss_fn, [torch.full((32, 64), float("nan"), device="cuda")]).read().is_bad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_forward_and_backward_can_be_captured() -> None:
    model = net()
    plan = in_fp8(model)
    run = torch.compile(model, dynamic=False)
    x = torch.randn(64, 64, device="cuda")

    def step() -> Tensor:
        model.zero_grad(set_to_none=False)
        with plan.forward():
            loss = run(x).float().square().mean()
        with plan.backend():
            loss.backward()
        return loss

    graph, found = captured(step)
    graph.replay()
    replayed = found.detach().clone()
    torch.testing.assert_close(replayed, step().detach(), rtol=1e-2, atol=1e-4)


# --- in hs.Step ---


def train(model: nn.Module, precision: Any, tokens: int, num_steps: int = 30) -> tuple[hs.Step, list[float]]:
    torch.manual_seed(1)
    step = hs.Step(model, torch.optim.AdamW(model.parameters(), 1e-4, fused=True), precision, fast="compile")
    x = torch.randn(tokens, 64, device="cuda")
    outcomes = [step(lambda x: model(x).float().square().mean(), [x]) for _ in range(num_steps)]
    return step, [outcome.loss for outcome in outcomes]


def test_both_steps_are_timed_and_the_faster_one_is_taken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8, "MIN_GAIN", 0.0)  # which of the two wins depends on the tests beside it
    step, losses = train(net(4096), "fp8", 8192)
    said = capsys.readouterr().err
    with capsys.disabled():
        print(f"\n{said}{step.plan}")
    assert step.mode == "compile+graph"
    assert "ms in fp8 and" in step.plan.reason
    assert ("halfstep: fp8 in 2 layers (*): " in said) == (step.plan.granted == "fp8")
    assert losses[-1] < losses[0]


def test_layers_that_do_not_gain_stay_in_bf16_and_strict_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "MIN_GAIN", math.inf)  # tests beside it disturb the timings
    step, losses = train(net(64), "fp8", 256)
    assert step.plan.granted == "bf16"
    assert "running bf16" in step.plan.warnings[-1]
    assert losses == pytest.approx(train(net(64), "bf16", 256)[1], rel=1e-3)
    with pytest.raises(HardwareError, match="no layer of Sequential gets faster in fp8"):
        train(net(64), hs.Precision("fp8", strict=True), 256)


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_each_recipe_trains_as_bf16_does(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8, "MIN_GAIN", 0.0)
    monkeypatch.setattr(fp8_trial, "judge_whole_steps", lambda plan, **times: plan)  # taken, faster or not
    model = net(1024)
    step, losses = train(model, hs.Precision("fp8", fp8_recipe=recipe), 1000, 60)  # padded to 1008 tokens
    _, expected = train(net(1024), "bf16", 1000, 60)
    with capsys.disabled():
        print(f"\n{recipe}: {losses[-1]:.5f}, bf16 {expected[-1]:.5f}; {step.certificate}")
    assert [row.compute for row in step.plan.rows] == ["bf16", "fp8", "fp8", "bf16"]
    assert step.mode == "compile+graph"
    assert losses[-1] != expected[-1]
    # The last losses are near zero: the distance is relative to what both have learned.
    assert abs(losses[-1] - expected[-1]) < 0.1 * (expected[0] - expected[-1])
    assert all(type(value) is Tensor and value.dtype == torch.float32 for value in model.state_dict().values())
