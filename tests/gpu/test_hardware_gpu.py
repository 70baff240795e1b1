"""Probe and measure on a real CUDA GPU."""

from __future__ import annotations

import time

import pytest
import torch

from halfstep.formats import FORMATS
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.measure import measure
from halfstep.hardware.probe import probe, probe_all
from halfstep.precision.advice import advise

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def measured() -> Hardware:
    hardware = measure(probe("cuda"))
    if hardware.source != "measured":
        pytest.skip(f"NOT tested: {hardware.notes}")
    return hardware


def test_the_probe_agrees_with_torch() -> None:
    hardware = probe("cuda")
    assert hardware.capability == torch.cuda.get_device_capability(0)
    assert hardware.name == torch.cuda.get_device_name(0)
    assert hardware.memory_total_bytes == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.01)
    assert hardware.memory_free_bytes is not None
    assert 0 < hardware.memory_free_bytes < hardware.memory_total_bytes
    assert (hardware.get_support("bf16") == "native") == (hardware.capability >= (8, 0))
    assert hardware.uuid
    assert probe().device == "cuda:0"
    assert probe_all()[-1].device == "cpu"


def test_a_gpu_is_measured_within_seconds_and_leaves_no_memory_behind() -> None:
    before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    measure(probe("cuda"))
    assert time.perf_counter() - began < 12  # 5 s of measuring, and libraries that load on first use
    assert torch.cuda.memory_allocated() - before < 2**27  # cuBLAS keeps its workspace, tens of MB


def test_speed_and_error_are_plausible(measured: Hardware) -> None:
    for m in measured.measurements:
        assert 0 < m.error < FORMATS[m.format].spacing_at_1 * (100 if m.format == "fp32" else 1), m
        peak = measured.published_tflops.get(m.format)
        assert peak is None or m.tflops < 1.1 * peak, f"faster than the vendor's peak: {m}"
    assert measured.bandwidth_gb_s is not None
    assert measured.bandwidth_gb_s > 100


def test_native_half_formats_beat_strict_fp32(measured: Hardware) -> None:
    for name in ("bf16", "fp16", "tf32"):
        if measured.get_support(name) == "native" and measured.tensor_cores:
            speedup = measured.find_speedup(name)
            assert speedup is not None
            assert speedup > 1.2, name


def test_tf32_errs_like_tf32_and_fp32_does_not(measured: Hardware) -> None:
    if measured.get_support("tf32") != "native":
        pytest.skip("NOT tested: no tf32 on this GPU")
    strict, tf32 = measured.find_measurement("matmul", "fp32"), measured.find_measurement("matmul", "tf32")
    assert strict is not None
    assert tf32 is not None
    assert strict.error < 1e-5 < 1e-4 < tf32.error


def test_fp8_is_measured_where_it_is_native(measured: Hardware) -> None:
    if measured.get_support("fp8_e4m3") != "native":
        pytest.skip("NOT tested: no fp8 on this GPU")
    fp8 = measured.find_measurement("matmul", "fp8_e4m3")
    assert fp8 is not None, measured.notes
    assert fp8.speedup > 1.2


def test_the_advice_is_bf16_on_ampere_and_newer(measured: Hardware) -> None:
    if measured.get_support("bf16") == "native":
        assert advise(measured).precision == "bf16"
