"""Measuring: real kernels at tiny sizes, time by the clock or by script."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest
import torch

from fake_driver import H100, T4, TINY, XEON, FakeDriver
from halfstep.errors import HardwareError
from halfstep.formats import FORMATS
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Accelerator, Driver
from halfstep.hardware.gpus import look_up_gpu
from halfstep.hardware.measure import TimedConvolution, TimedMatmul, measure
from halfstep.hardware.probe import probe
from halfstep.precision.decide import decide
from halfstep_train.config.schema import PrecisionConfig


def measured(driver: Driver, device: str = "auto") -> Hardware:
    return measure(probe(device, driver=driver), sizes=TINY, driver=driver)


def test_speed_is_against_strict_fp32_of_the_same_operation() -> None:
    hardware = measured(FakeDriver(T4, speedups={"fp16": 6.0, "conv_nhwc fp16": 9.0, "bf16": 0.25}))
    assert hardware.source == "measured"
    speedups = {(m.op, m.format): m.speedup for m in hardware.measurements}
    assert speedups["matmul", "fp32"] == 1.0
    assert speedups["matmul", "fp16"] == pytest.approx(6.0)
    assert speedups["conv_nhwc", "fp16"] == pytest.approx(9.0)
    assert speedups["conv_nchw", "bf16"] == pytest.approx(0.25)
    assert hardware.bandwidth_gb_s == pytest.approx(2 * 4096 / 1e-4 / 1e9)


def test_tf32_and_fp8_are_measured_only_where_they_are() -> None:
    on_t4 = {m.format for m in measured(FakeDriver(T4)).measurements}
    on_h100 = {(m.op, m.format) for m in measured(FakeDriver(H100)).measurements}
    assert on_t4 == {"fp32", "fp16", "bf16"}
    assert {("matmul", "tf32"), ("conv_nhwc", "tf32"), ("matmul", "fp8_e4m3")} <= on_h100
    assert ("conv_nchw", "fp8_e4m3") not in on_h100


def test_the_error_is_that_of_the_format() -> None:
    errors = {m.format: m.error for m in measured(FakeDriver(H100)).measurements if m.op == "matmul"}
    assert errors["fp32"] < 1e-6
    # Rounding both inputs and the result: a fraction of one step of the format.
    for name in ("bf16", "fp16", "fp8_e4m3"):
        assert 0.05 * FORMATS[name].spacing_at_1 < errors[name] < FORMATS[name].spacing_at_1


def test_a_cpu_is_measured_within_its_ten_seconds() -> None:
    began = time.perf_counter()
    hardware = measure(probe("cpu"), sizes=TINY)
    assert time.perf_counter() - began < 10
    assert {m.op for m in hardware.measurements} == {"matmul", "conv_nchw", "conv_nhwc"}
    assert all(m.tflops > 0 for m in hardware.measurements)
    assert hardware.bandwidth_gb_s is not None
    assert hardware.bandwidth_gb_s > 0


def test_a_very_slow_format_is_compared_with_fp32_on_the_same_problem() -> None:
    driver = FakeDriver(cpuinfo=XEON, speedups={"bf16": 1e-5})
    hardware = measured(driver)
    assert driver.timed.count("matmul bf16") == driver.timed.count("matmul fp32") == 1
    assert hardware.find_speedup("bf16") == pytest.approx(1e-5)
    assert hardware.find_measurement("matmul", "bf16") is not None


def test_no_time_left_is_noted_for_what_was_not_measured() -> None:
    driver = FakeDriver(cpuinfo=XEON, run_s=3.0)
    hardware = measured(driver)
    assert len(hardware.measurements) < 9
    assert any("not measured: the 10 s for measurements were used up" in note for note in hardware.notes)


def test_a_gpu_that_others_use_is_only_looked_at() -> None:
    driver = FakeDriver(T4, others="9.1 GB taken and 97 % busy")
    hardware = measured(driver)
    assert driver.timed == []
    assert hardware.source == "probe"
    assert hardware.measurements == ()
    assert "in use by others (9.1 GB taken and 97 % busy): not measured" in hardware.notes


def test_hardware_from_the_table_cannot_be_measured() -> None:
    with pytest.raises(HardwareError, match="NVIDIA V100 is not on this machine"):
        measure(look_up_gpu("v100"))


def test_a_format_without_a_kernel_is_a_note_and_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(self: TimedConvolution, name: str) -> object:
        if name == "bf16":
            raise NotImplementedError("could not find an engine\nlong story")
        return lambda: torch.conv2d(self.images, self.weights, padding=1)

    monkeypatch.setattr(TimedConvolution, "make_kernel", no_kernel)
    hardware = measured(FakeDriver(T4))
    assert hardware.find_measurement("conv_nchw", "bf16") is None
    assert hardware.find_measurement("conv_nchw", "fp16") is not None
    assert "convolution in bf16 does not run here: could not find an engine" in hardware.notes


def test_sums_in_the_low_format_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = TimedMatmul.make_kernel

    def sloppy(self: TimedMatmul, name: str) -> object:
        kernel = exact(self, name)
        return (lambda: kernel() * 1.01) if name == "fp16" else kernel

    monkeypatch.setattr(TimedMatmul, "make_kernel", sloppy)
    notes = measured(FakeDriver(T4)).notes
    assert any("fp16 sums in fp16 here, not in fp32: matmul errs by 1e-02" in note for note in notes)


def test_measuring_leaves_flags_and_random_numbers_as_they_were() -> None:
    backends = torch.backends
    before = (backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, torch.get_rng_state())
    measured(FakeDriver(H100))
    assert before[0] == backends.cuda.matmul.fp32_precision
    assert before[1] == backends.cudnn.conv.fp32_precision
    assert torch.equal(before[2], torch.get_rng_state())


def test_the_real_clock_times_a_known_pause() -> None:
    pauses: list[float] = []

    def pause() -> None:
        began = time.perf_counter()
        time.sleep(0.02)  # longer where the machine has other work
        pauses.append(time.perf_counter() - began)

    found = Driver().time_run(pause, "cpu", work="pause")
    assert min(pauses) <= found < 2 * max(pauses)


# --- AMD and Intel GPUs, with a faked probe ---

HIP = {"kind": "rocm", "device": "cuda:0"}
XPU = {"kind": "xpu", "device": "xpu:0"}
CARDS = {
    "MI250X": Accelerator(name="AMD Instinct MI250X", architecture="gfx90a:sramecc+:xnack-", **HIP),  # type: ignore[arg-type]
    "MI300X": Accelerator(name="AMD Instinct MI300X", architecture="gfx942", **HIP),  # type: ignore[arg-type]
    "RDNA2": Accelerator(name="AMD Radeon RX 6800", architecture="gfx1030", **HIP),  # type: ignore[arg-type]
    "RDNA3": Accelerator(name="AMD Radeon RX 7900 XTX", architecture="gfx1100", **HIP),  # type: ignore[arg-type]
    "Xe-HPG": Accelerator(name="Intel(R) Arc(TM) A770 Graphics", **XPU),  # type: ignore[arg-type]
    "Xe-HPC": Accelerator(name="Intel(R) Data Center GPU Max 1550", **XPU),  # type: ignore[arg-type]
}
GRANTED = dict.fromkeys(CARDS, {"auto": "bf16", "bf16": "bf16", "fp16": "fp16", "tf32": "fp32", "fp8": "bf16"})
GRANTED["RDNA2"] = {"auto": "fp16", "bf16": "fp16", "fp16": "fp16", "tf32": "fp32", "fp8": "fp16"}
"""The table of docs/precision.md."""


@pytest.mark.parametrize("card", CARDS)
def test_each_card_gets_what_it_truly_runs_and_is_told_where_that_differs(card: str) -> None:
    found = CARDS[card]
    hardware = probe(found.device, driver=FakeDriver(found))
    for asked, granted in GRANTED[card].items():
        plan = decide(PrecisionConfig(default=asked), hardware)
        assert plan.granted == granted, asked
        assert plan.needs_loss_scaling == (granted == "fp16")
        if asked not in ("auto", granted):
            assert any(f"{asked} requested, running {granted}" in warning for warning in plan.warnings)


@pytest.mark.slow
def test_training_needs_neither_triton_nor_nvml() -> None:
    """Every Triton kernel has a fallback to torch's layers, and no NVIDIA library is required."""
    code = """
        import sys
        sys.modules["triton"] = sys.modules["pynvml"] = None
        import torch
        import halfstep_train.run.train, halfstep_train.use.predict, halfstep_train.bench.bench
        from halfstep_train.workloads.slots.backbones import build_dinov2
        from halfstep_train.workloads.slots.config import SlotContrastModelConfig
        from halfstep_train.workloads.slots.slot_decoder import SlotContrast
        features = build_dinov2("vit_small_patch14_dinov2", depth=1, heads=2, dim=16, grid=2)(torch.rand(2, 3, 28, 28))
        settings = SlotContrastModelConfig(slots=2, slot_dim=8, decoder_hidden=(8,))
        SlotContrast(settings, 16, 4)(features.detach().unflatten(0, (1, 2)))["error"].backward()
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
