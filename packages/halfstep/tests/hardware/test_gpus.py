"""The table of known accelerators, and finding one by the name a driver or a person uses."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fake_driver import H100, T4, TINY, FakeDriver
from halfstep.errors import HardwareError
from halfstep.formats import FORMATS
from halfstep.hardware.describe import describe_identity, make_format_columns
from halfstep.hardware.device_facts import Hardware, Measurement
from halfstep.hardware.gpus import KNOWN, KnownGPU, find_known, look_up_gpu, split_words
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe
from halfstep.precision.advice import HardwareAdvice, advise


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("v100", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx4090", "RTX 4090"),
        ("GeForce GTX 1060 3GB", "GTX 1060 3GB"),
        ("3080 12 GB", "RTX 3080 12GB"),
        ("3060 8gb", "RTX 3060"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("a1000", "RTX A1000"),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "RTX A1000 Laptop"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA T400 4GB", "T400"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX 4000 SFF Ada"),
        ("NVIDIA RTX 2000 Ada Generation Laptop GPU", "RTX 2000 Ada Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("tpuv5e", "TPU v5e"),
    ],
)
def test_names_of_drivers_and_people_find_their_row(asked: str, found: str) -> None:
    gpu = find_known(asked)
    assert gpu.name == found


@pytest.mark.parametrize(
    "asked",
    [
        "Quadro RTX 4000 with Max-Q Design",
        "RTX 4000",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "rtx",
        "6000",
        "max",
        "",
        "cuda",
    ],
)
def test_another_model_or_an_ambiguous_name_finds_nothing(asked: str) -> None:
    assert find_known(asked) is None


@pytest.mark.parametrize(("asked", "near"), [("v1000", "V100"), ("rtx 4900", "RTX 4090"), ("mi300", "MI300X")])
def test_an_unknown_name_suggests_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(HardwareError, match="unknown GPU") as caught:
        look_up_gpu(asked)
    assert asked in caught.value.what
    assert near in caught.value.fix.split(": ")[1].split(";")[0].split(", ")
    assert "halfstep detect list" in caught.value.fix


def test_a_name_of_several_gpus_lists_them() -> None:
    with pytest.raises(HardwareError, match="'rtx 4000' matches 2 GPUs") as caught:
        look_up_gpu("rtx 4000")
    assert "Quadro RTX 4000, RTX 4000 Ada" in caught.value.fix


@pytest.mark.parametrize("gpu", KNOWN, ids=lambda gpu: gpu.name)
def test_every_row_is_found_by_its_own_name_and_holds_together(gpu: KnownGPU) -> None:
    assert find_known(gpu.name) is gpu
    assert gpu.checked in ("datasheet", "secondary", "derived", "recalled")
    hardware = look_up_gpu(gpu.name)
    assert dict(describe_identity(hardware))["checked"] == gpu.facts.published_check
    assert hardware.source == "table"
    assert hardware.device == ""
    assert hardware.published_source
    assert set(hardware.support) <= set(FORMATS)
    assert set(hardware.published_tflops) <= set(FORMATS)
    assert all(rate > 0 for rate in hardware.published_tflops.values())
    lacking = [name for name in hardware.published_tflops if hardware.get_support(name) == "missing"]
    assert not lacking, "a published rate for a format the device lacks"


@pytest.mark.parametrize("gpu", [gpu for gpu in KNOWN if gpu.checked == "derived"], ids=lambda gpu: gpu.name)
def test_a_derived_rate_is_its_units_times_two_times_its_clock(gpu: KnownGPU) -> None:
    assert gpu.facts.published_tflops["fp32"] == pytest.approx(gpu.units * 2 * gpu.boost_mhz / 1e6, rel=0.03)


def test_only_derived_rows_carry_units_and_only_rows_without_rates_are_unverified() -> None:
    assert {gpu.name for gpu in KNOWN if gpu.units} == {gpu.name for gpu in KNOWN if gpu.checked == "derived"}
    assert not any(gpu.facts.published_tflops for gpu in KNOWN if gpu.checked == "recalled")
    assert "recalled, not verified" in dict(describe_identity(look_up_gpu("M3 Max"))).values()


def test_no_two_rows_share_their_words() -> None:
    assert len({split_words(gpu.name) for gpu in KNOWN}) == len(KNOWN)


def test_a_memory_size_in_the_name_is_used_and_others_are_noted() -> None:
    assert look_up_gpu("A100").memory_total_bytes == 40 * 2**30
    assert look_up_gpu("A100 80GB").memory_total_bytes == 80 * 2**30
    assert look_up_gpu("a100-80g").memory_total_bytes == 80 * 2**30
    assert look_up_gpu("v100 32 GB").memory_total_bytes == 32 * 2**30
    assert any("80 GB" in note for note in look_up_gpu("A100").notes)


def test_volta_and_older_name_the_torch_build_they_need() -> None:
    assert any("CUDA 12.6" in note for note in look_up_gpu("V100").notes)
    assert not any("CUDA 12.6" in note for note in look_up_gpu("T4").notes)


# --- advice on a faked driver follows what was measured ---


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


# --- Hardware: speedups, support and JSON ---


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


def test_measured_hardware_survives_json_and_is_described() -> None:
    driver = FakeDriver(T4, speedups={"bf16": 0.01})
    hardware = measure(probe(driver=driver), sizes=TINY, driver=driver)
    stored = json.loads(json.dumps(hardware.to_dict()))["measurements"]
    assert stored == [dataclasses.asdict(one) for one in hardware.measurements]
    words = dict(describe_identity(hardware))
    assert words["architecture"] == "Turing, compute capability 7.5, tensor cores"
    assert words["memory"] == "16.1 GB, 15.0 GB free"
    columns = make_format_columns(hardware)
    bf16 = columns["format"].index("bf16")
    assert columns["support"][bf16] == "emulated"
    assert columns["matmul\nx fp32"][bf16] == "1/100"
