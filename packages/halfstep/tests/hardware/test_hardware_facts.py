"""What `Hardware` concludes from its own numbers, and its way to JSON and back."""

from __future__ import annotations

import json

import pytest

from fake_driver import T4, TINY, FakeDriver
from halfstep.hardware.describe import describe_identity, make_format_columns
from halfstep.hardware.device_facts import Hardware, Measurement
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe


def hardware_with(**speedups: float) -> Hardware:
    measurements = tuple(
        Measurement(op=op, format="fp16", tflops=1.0, error=1e-3, speedup=gain)  # type: ignore[arg-type]
        for op, gain in speedups.items()
    )
    return Hardware(kind="cuda", device="cuda:0", name="x", vendor="y", measurements=measurements)


def test_speedup_weighs_matmul_and_the_better_layout_of_convolution() -> None:
    assert hardware_with(matmul=8.0, conv_nchw=1.0, conv_nhwc=2.0).find_speedup("fp16") == pytest.approx(4.0)
    assert hardware_with(matmul=8.0).find_speedup("fp16") == pytest.approx(8.0)


def test_a_gain_on_one_operation_does_not_hide_a_hopeless_one() -> None:
    speedup = hardware_with(matmul=0.01, conv_nchw=1.9, conv_nhwc=2.0).find_speedup("fp16")
    assert speedup is not None
    assert speedup < 1


def test_measured_speed_beats_the_published_one_and_unknown_is_none() -> None:
    driver = FakeDriver(T4, speedups={"fp16": 3.0})
    looked_at = probe(driver=driver)
    assert looked_at.find_speedup("fp16") == pytest.approx(65 / 8.1)
    assert measure(looked_at, sizes=TINY, driver=driver).find_speedup("fp16") == pytest.approx(3.0)
    assert looked_at.find_speedup("bf16") is None
    assert looked_at.find_speedup("fp32") == 1.0


@pytest.mark.parametrize("name", ["T4", "M2", "TPU v4", "MI300X"])
def test_hardware_survives_json(name: str) -> None:
    hardware = look_up_gpu(name)
    assert Hardware.from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware


def test_measured_hardware_survives_json() -> None:
    driver = FakeDriver(T4)
    hardware = measure(probe(driver=driver), sizes=TINY, driver=driver)
    assert Hardware.from_dict(json.loads(json.dumps(hardware.to_dict()))) == hardware


def test_facts_are_described() -> None:
    driver = FakeDriver(T4, speedups={"bf16": 0.01})
    hardware = measure(probe(driver=driver), sizes=TINY, driver=driver)
    words = dict(describe_identity(hardware))
    assert words["architecture"] == "Turing, compute capability 7.5, tensor cores"
    assert words["memory"] == "16.1 GB, 15.0 GB free"
    columns = make_format_columns(hardware)
    bf16 = columns["format"].index("bf16")
    assert columns["support"][bf16] == "emulated"
    assert columns["matmul\nx fp32"][bf16] == "1/100"
