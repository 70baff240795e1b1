"""The advice follows the measurement: real probe, measure, ladder and words over a faked driver."""

from __future__ import annotations

import json

import pytest

from fake_driver import H100, T4, TINY, XEON, FakeDriver
from halfstep.hardware.gpus import KNOWN, look_up_gpu
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep.precision.advice import HardwareAdvice, advise, describe_loss


def advice_on(driver: FakeDriver) -> HardwareAdvice:
    return advise(measure(probe(driver=driver), sizes=TINY, driver=driver))


def test_a_slow_bf16_at_the_clock_flips_the_advice_on_a_gpu() -> None:
    fast = advice_on(FakeDriver(H100, speedups={"bf16": 7.1, "fp16": 7.0, "tf32": 3.0}))
    slow = advice_on(FakeDriver(H100, speedups={"bf16": 0.5, "fp16": 7.0, "tf32": 3.0}))
    assert (fast.precision, slow.precision) == ("bf16", "fp16")
    assert fast.headline.startswith(
        "use bf16: native on NVIDIA H100 80GB HBM3, measured 7.1x fp32 over matmul and convolution"
    )
    assert slow.headline.startswith("use fp16 with loss scaling: native on ")
    assert "; not bf16: bf16 is not faster than fp32 on " in slow.headline


def test_a_slow_bf16_at_the_clock_flips_the_advice_on_a_cpu() -> None:
    assert advice_on(FakeDriver(cpuinfo=XEON, speedups={"bf16": 3.0})).precision == "bf16"
    assert advice_on(FakeDriver(cpuinfo=XEON, speedups={"bf16": 0.01})).precision == "fp32"


def test_a_t4_gets_fp16_with_loss_scaling_because_bf16_is_emulated() -> None:
    advice = advise(probe(driver=FakeDriver(T4)))
    assert advice.precision == "fp16"
    assert advice.headline.endswith("; not bf16: Tesla T4 only emulates bf16")
    # An emulated format is not taken even where it looks fast.
    assert advice_on(FakeDriver(T4, speedups={"bf16": 9.0, "fp16": 4.0})).precision == "fp16"


def test_nothing_faster_means_fp32_and_nothing_lost() -> None:
    advice = advice_on(FakeDriver(speedups={"bf16": 0.005, "fp16": 0.01}))
    assert advice.precision == "fp32"
    assert "only emulates bf16; fp32 is the fastest here" in advice.headline
    assert advice.lost == "nothing"


def test_what_is_lost_is_said_in_digits_and_range() -> None:
    assert "2.4 of 7.2 decimal digits" in describe_loss("bf16")
    assert "range stays" in describe_loss("bf16")
    assert "65504" in describe_loss("fp16")
    assert "loss scaling" in describe_loss("fp16")


@pytest.mark.parametrize("gpu", KNOWN, ids=lambda gpu: gpu.name)
def test_every_known_device_gets_an_answer_that_a_script_can_read(gpu: object) -> None:
    advice = advise(look_up_gpu(gpu.name))  # type: ignore[attr-defined]
    assert json.loads(json.dumps(advice.to_dict()))["precision"] == advice.precision
    assert any("published peaks" in warning for warning in advice.warnings)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("GTX 1080 Ti", "fp32"),
        ("P100", "fp16"),
        ("RTX 2080 Ti", "fp16"),
        ("RTX 3090", "bf16"),
        ("H200", "bf16"),
        ("RTX 4090 Laptop", "bf16"),  # which has no published rate
        ("RX 6800", "fp16"),
        ("RX 7900 XTX", "bf16"),
    ],
)
def test_known_devices_get_what_their_units_are_good_for(name: str, precision: str) -> None:
    assert advise(look_up_gpu(name)).precision == precision
