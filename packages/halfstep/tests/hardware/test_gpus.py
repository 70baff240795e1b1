"""The table of known accelerators, and finding one by the name a driver or a person uses."""

from __future__ import annotations

import pytest

from halfstep.errors import HardwareError
from halfstep.formats import FORMATS
from halfstep.hardware.describe import describe_identity
from halfstep.hardware.gpus import KNOWN, KnownGPU, find_known, look_up_gpu, split_words


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("v100", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx4090", "RTX 4090"),
        ("4070tisuper", "RTX 4070 Ti Super"),
        ("GeForce GTX 1080 Ti", "GTX 1080 Ti"),
        ("GeForce GTX 1060 3GB", "GTX 1060 3GB"),
        ("3080 12 GB", "RTX 3080 12GB"),
        ("3060 8gb", "RTX 3060"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("a6000", "RTX A6000"),
        ("NVIDIA A10G", "A10G"),
        ("a1000", "RTX A1000"),
        ("NVIDIA RTX A1000 6GB Laptop GPU", "RTX A1000 Laptop"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA T400 4GB", "T400"),
        ("NVIDIA RTX 4000 SFF Ada Generation", "RTX 4000 SFF Ada"),
        ("NVIDIA RTX 2000 Ada Generation Laptop GPU", "RTX 2000 Ada Laptop"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("AMD Instinct MI355X", "MI355X"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Intel(R) Data Center GPU Max 1550", "Data Center GPU Max 1550"),
        ("m2max", "M2 Max"),
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
    assert dict(describe_identity(hardware))["checked"] == gpu.verification
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
    assert gpu.tflops["fp32"] == pytest.approx(gpu.units * 2 * gpu.boost_mhz / 1e6, rel=0.03)


def test_only_derived_rows_carry_units_and_only_rows_without_rates_are_unverified() -> None:
    assert {gpu.name for gpu in KNOWN if gpu.units} == {gpu.name for gpu in KNOWN if gpu.checked == "derived"}
    assert not any(gpu.tflops for gpu in KNOWN if gpu.checked == "recalled")
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
