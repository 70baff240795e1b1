"""The ladder: what a device gets, why, and what the user is told."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fake_driver import ALL_NATIVE, make_hardware
from halfstep.errors import ConfigError, HardwareError, PrecisionError
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.gpus import look_up_gpu
from halfstep.precision.decide import decide
from halfstep.precision.plan import Plan

NATIVE, EMULATED = "native", "emulated"


HOPPER = make_hardware("cuda", "H200", {"tf32": 5.0, "bf16": 12.0, "fp16": 12.5, "fp8_e4m3": 20.0}, **ALL_NATIVE)
TURING = make_hardware(name="T4", speeds={"bf16": 0.9, "fp16": 5.0}, bf16=EMULATED, fp16=NATIVE)
PASCAL = make_hardware(name="GTX 1080", speeds={"fp16": 0.02}, fp16=NATIVE)
PLAIN_CPU = make_hardware("cpu", "Plain CPU", bf16=EMULATED, fp16=EMULATED)
AMX_CPU = make_hardware("cpu", "AMX CPU", speeds={"bf16": 6.0}, bf16=NATIVE, fp16=EMULATED)


@pytest.mark.parametrize(
    ("hardware", "granted"),
    [(HOPPER, "bf16"), (TURING, "fp16"), (PASCAL, "fp32"), (PLAIN_CPU, "fp32"), (AMX_CPU, "bf16")],
    ids=lambda value: getattr(value, "name", value),
)
def test_auto_takes_the_fastest_rung_that_is_really_there(hardware: Hardware, granted: str) -> None:
    plan = decide("auto", hardware)
    assert plan.granted == granted
    assert not plan.warnings


def test_ties_under_ten_percent_go_to_bf16_and_clear_wins_do_not() -> None:
    close = make_hardware(speeds={"bf16": 10.0, "fp16": 10.9}, bf16=NATIVE, fp16=NATIVE)
    clear = make_hardware(speeds={"bf16": 10.0, "fp16": 11.1}, bf16=NATIVE, fp16=NATIVE)
    assert decide("auto", close).granted == "bf16"
    assert decide("auto", clear).granted == "fp16"
    assert "slower here" in decide("auto", clear).reason


def test_auto_without_measurements_follows_the_ladder() -> None:
    plan = decide("auto", make_hardware(bf16=NATIVE, fp16=NATIVE, tf32=NATIVE))
    assert plan.granted == "bf16"
    assert "not measured" in plan.reason


@pytest.mark.parametrize(
    ("asked", "hardware", "granted", "because"),
    [
        ("fp8", TURING, "fp16", "has no fp8_e4m3"),
        ("bf16", TURING, "fp16", "only emulates bf16"),
        ("bf16-true", TURING, "fp16", "only emulates bf16"),
        ("fp16", PASCAL, "fp32", "not faster than fp32"),
        ("bf16", PLAIN_CPU, "fp32", "only emulates bf16"),
        ("tf32", TURING, "fp32", "has no tf32"),
    ],
)
def test_a_lacking_rung_falls_to_the_next_one_with_one_warning(
    asked: str, hardware: Hardware, granted: str, because: str
) -> None:
    plan = decide(asked, hardware)
    assert (plan.asked, plan.granted) == (asked, granted)
    assert because in plan.reason
    assert len(plan.warnings) == 1
    assert because in plan.warnings[0]
    assert plan.needs_loss_scaling is (granted == "fp16")


def test_fp16_on_a_cpu_counts_only_when_measured() -> None:
    listed = make_hardware("cpu", "Listed CPU", bf16=EMULATED, fp16=NATIVE)
    fast = make_hardware("cpu", "Fast CPU", speeds={"fp16": 2.0}, bf16=EMULATED, fp16=NATIVE)
    assert decide("bf16", listed).granted == "fp32"
    assert decide("bf16", fast).granted == "fp16"


def test_published_rates_count_where_nothing_was_measured() -> None:
    hardware = Hardware(
        kind="cuda", device="", name="Table GPU", vendor="test", source="table",
        support=MappingProxyType({"fp32": NATIVE, "fp16": NATIVE, "bf16": NATIVE}),
        published_tflops=MappingProxyType({"fp32": 10.0, "fp16": 0.2, "bf16": 20.0}),
    )  # fmt: skip
    assert decide("fp16", hardware).granted == "fp32"
    assert "published 2.0x fp32" in decide("auto", hardware).reason


def test_strict_turns_the_fall_into_an_error() -> None:
    with pytest.raises(HardwareError) as caught:
        decide("bf16", TURING, strict=True)
    assert "bf16 was requested" in caught.value.what
    assert "fp16" in caught.value.fix
    assert decide("bf16", HOPPER, strict=True).granted == "bf16"


def test_strict_fp32_says_how_much_faster_tf32_would_be() -> None:
    assert "tf32 would be 5.0x as fast (measured)" in decide("fp32", HOPPER).reason
    assert "tf32" not in decide("fp32", PLAIN_CPU).reason.replace("TF32 off", "")


@pytest.mark.parametrize("asked", ["bf16", "fp16", "fp8", "tf32", "bf16-true", "auto"])
def test_simulate_grants_what_was_asked_and_says_so(asked: str) -> None:
    plan = decide(asked, PLAIN_CPU, simulate=True, strict=True)
    granted = "bf16" if asked == "auto" else asked
    assert (plan.granted, plan.simulated, plan.warnings) == (granted, True, ())
    assert "simulated" in str(plan)


def test_there_is_nothing_to_simulate_in_fp32() -> None:
    assert not decide("fp32", PLAIN_CPU, simulate=True).simulated


def test_aliases_are_understood_and_nonsense_is_not() -> None:
    assert decide("16-mixed", HOPPER).granted == "fp16"
    with pytest.raises(ConfigError, match="bf17"):
        decide("bf17", HOPPER)


def make_request(**changed: Any) -> Any:
    """Return what config.schema.PrecisionConfig offers."""
    usual = {"default": "bf16", "modules": {}, "strict": False, "simulate": False, "force": False}
    return SimpleNamespace(**(usual | {"fp8_recipe": "tensorwise"} | changed))


def test_a_config_object_is_a_request() -> None:
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    plan = decide(make_request(modules={"head": "fp32"}, simulate=True), PLAIN_CPU, model)
    assert plan.simulated
    assert {row.module: row.compute for row in plan.rows} == {"body": "bf16", "head": "fp32"}
    with pytest.raises(HardwareError):
        decide(make_request(strict=True), TURING)


def tiny_diffusion() -> nn.Module:
    vae = nn.ModuleDict({"encoder": nn.Conv2d(3, 4, 1), "decoder": nn.Conv2d(4, 3, 1)})
    unet = nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.BatchNorm2d(4))
    model = nn.ModuleDict({"vae": vae, "unet": unet, "embed": nn.Embedding(3, 4), "head": nn.Linear(16, 16)})
    model["vae"].requires_grad_(False)
    return model


def by_module(plan: Plan) -> dict[str, tuple[str, str]]:
    return {row.module: (row.storage, row.compute) for row in plan.rows}


def test_patterns_give_parts_their_own_rows() -> None:
    plan = decide("bf16", HOPPER, tiny_diffusion(), modules={"vae.*": "fp32", "head": "fp32"})
    assert by_module(plan) == {
        "vae.encoder": ("fp32", "fp32"),
        "vae.decoder": ("fp32", "fp32"),
        "unet.0": ("fp32", "bf16"),
        "unet.1": ("fp32", "fp32"),  # GroupNorm: autocast upcasts it
        "unet.2": ("fp32", "bf16"),
        "embed": ("fp32", "fp32"),
        "head": ("fp32", "fp32"),
    }


def test_a_later_pattern_wins_and_children_follow_their_parents() -> None:
    plan = decide("bf16", HOPPER, tiny_diffusion(), modules={"vae": "fp32", "vae.decoder": "fp16"})
    rows = by_module(plan)
    assert rows["vae"] == rows["vae.encoder"] == ("fp32", "fp32")
    assert rows["vae.decoder"] == ("fp32", "fp16")


def test_frozen_parts_may_be_stored_in_half_when_asked() -> None:
    plan = decide("bf16", HOPPER, tiny_diffusion(), modules={"vae": "bf16-true"})
    row = next(row for row in plan.rows if row.module == "vae.encoder")
    assert (row.storage, row.compute, row.kind) == ("bf16", "bf16", "frozen")
    assert by_module(plan)["head"][0] == "fp32"


def test_bf16_true_keeps_batch_norm_in_fp32() -> None:
    rows = by_module(decide("bf16-true", HOPPER, tiny_diffusion()))
    assert rows["head"] == ("bf16", "bf16")
    assert rows["unet.2"][0] == "fp32"


def test_fp8_is_for_linear_layers_with_sides_of_sixteen() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(16, 10), nn.Conv2d(3, 4, 1))
    plan = decide("fp8", HOPPER, model)
    assert [row.compute for row in plan.rows] == ["bf16", "fp8", "bf16", "bf16"]
    assert "divisible by 16" in plan.rows[2].reason


@pytest.mark.parametrize("simulate", [False, True])
def test_fp8_that_no_layer_can_take_is_called_bf16_and_no_force_is_offered(simulate: bool) -> None:
    plan = decide("fp8", HOPPER, nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(10, 10)), simulate=simulate)
    assert (plan.granted, plan.simulated) == ("bf16", simulate)
    assert "has no layer that supports fp8" in plan.warnings[0]
    assert "force" not in plan.warnings[0]


@pytest.mark.parametrize(
    ("model", "pattern", "fix"),
    [
        (tiny_diffusion(), "vea.*", "'vae"),
        (tiny_diffusion(), "techer", "'teacher'"),
        (nn.Linear(4, 2), "head", "the model has no submodules"),
    ],
)
def test_a_pattern_that_matches_nothing_lists_near_names(model: nn.Module, pattern: str, fix: str) -> None:
    frozen = {"teacher": nn.Linear(2, 2)} if pattern == "techer" else {}
    with pytest.raises(PrecisionError) as caught:
        decide("bf16", HOPPER, model, modules={pattern: "fp32"}, frozen=frozen)
    assert f"precision.modules: {pattern!r} matches no module" in caught.value.what
    assert fix in caught.value.fix


def test_tf32_cannot_be_switched_for_a_part() -> None:
    plan = decide("bf16", HOPPER, tiny_diffusion(), modules={"head": "tf32"})
    assert by_module(plan)["head"] == ("fp32", "fp32")
    assert "process-wide switch" in plan.warnings[0]
    with pytest.raises(PrecisionError, match="cannot be applied while the default is tf32"):
        decide("tf32", HOPPER, tiny_diffusion(), modules={"head": "fp32"})


def test_the_fall_of_a_part_is_warned_of_too() -> None:
    plan = decide("fp16", TURING, tiny_diffusion(), modules={"head": "bf16"})
    assert by_module(plan)["head"] == ("fp32", "fp16")
    assert len(plan.warnings) == 1


def test_islands_show_as_rows() -> None:
    plan = decide("bf16", HOPPER, fragile=("loss: Dice sums", "gumbel"))
    islands = [row for row in plan.rows if row.kind == "island"]
    assert [(row.module, row.compute) for row in islands] == [("loss", "fp32"), ("gumbel", "fp32")]
    assert islands[0].reason == "Dice sums"


def test_a_bf16_plan_on_cuda_warns_that_recurrent_layers_run_in_fp16() -> None:
    model = torch.nn.ModuleDict({"lstm": torch.nn.LSTM(4, 6), "head": torch.nn.Linear(6, 1)})
    gpu = dataclasses.replace(look_up_gpu("h200"), device="cuda")
    (warning,) = decide("bf16", gpu, model).warnings
    assert "lstm" in warning
    assert "fp16" in warning
    assert not decide("bf16", gpu, model, modules={"lstm": "fp32"}).warnings
    assert not decide("fp16", gpu, model).warnings
