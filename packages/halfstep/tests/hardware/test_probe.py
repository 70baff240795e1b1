"""Facts of the devices of a machine, with the machine faked at the driver."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

import pytest
import torch

from fake_driver import H100, NEOVERSE_N1, T4, TINY, XEON, FakeDriver
from halfstep.errors import HardwareError
from halfstep.hardware.cache import make_cache_key, measure_once
from halfstep.hardware.clock import Stopwatch, Throughput
from halfstep.hardware.device_facts import Hardware
from halfstep.hardware.driver import Accelerator, Driver
from halfstep.hardware.measure import measure
from halfstep.hardware.memory import CLEAR_REFS, describe_memory, get_peak_memory_bytes, reset_peak
from halfstep.hardware.nvml import EnergyMeter
from halfstep.hardware.probe import probe, probe_all
from hand_clock import HandClock


def test_a_t4_has_fp16_and_only_emulates_bf16_whatever_torch_says() -> None:
    t4 = probe(driver=FakeDriver(T4))
    assert (t4.get_support("fp16"), t4.get_support("bf16"), t4.get_support("tf32"), t4.get_support("fp8_e4m3")) == (
        "native",
        "emulated",
        "missing",
        "missing",
    )
    assert t4.tensor_cores
    assert (t4.vendor, t4.architecture, t4.device) == ("NVIDIA", "Turing", "cuda:0")


def test_an_unknown_nvidia_gpu_is_judged_by_its_capability() -> None:
    new = dataclasses.replace(T4, name="NVIDIA Z9000", capability=(11, 0), architecture="sm_110")
    hardware = probe(driver=FakeDriver(new))
    assert hardware.get_support("bf16") == hardware.get_support("fp8_e4m3") == "native"
    assert not hardware.published_tflops
    assert hardware.architecture == "sm_110"


def test_every_device_is_listed_and_the_cpu_comes_last() -> None:
    devices = probe_all(driver=FakeDriver(T4, H100))
    assert [d.device for d in devices] == ["cuda:0", "cuda:1", "cpu"]
    assert {d.torch_version for d in devices} == {"2.13.0+fake"}


@pytest.mark.parametrize(
    ("asked", "device"),
    [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("CUDA:1", "cuda:1"), ("cpu", "cpu")],
)
def test_a_device_string_resolves_to_how_torch_names_it(asked: str, device: str) -> None:
    assert probe(asked, driver=FakeDriver(T4, H100)).device == device


@pytest.mark.parametrize("asked", ["cuda:7", "mps", "tpu", "npu", ""])
def test_a_device_that_is_not_here_is_an_error_with_what_is(asked: str) -> None:
    with pytest.raises(HardwareError, match="no device") as caught:
        probe(asked, driver=FakeDriver(T4))
    assert repr(asked) in caught.value.what
    assert "cuda:0 (Tesla T4)" in caught.value.why
    assert "cpu" in caught.value.fix


def test_only_the_device_that_was_asked_for_is_opened() -> None:
    opened: list[str] = []

    class Watched(FakeDriver):
        def read_free_bytes(self, device: str) -> int | None:
            opened.append(device)
            return 1

    driver = Watched(T4, H100)
    probe("cpu", driver=driver)
    assert opened == []
    assert probe("cuda:1", driver=driver).memory_free_bytes == 1
    assert opened == ["cuda:1"]


def test_rocm_is_judged_by_its_target_and_answers_to_both_names() -> None:
    card = Accelerator(kind="rocm", device="cuda:0", name="AMD Instinct MI250X", architecture="gfx90a:sramecc+:xnack-")
    driver = FakeDriver(card)
    assert probe("rocm", driver=driver) == probe("cuda", driver=driver)
    assert probe(driver=driver).get_support("bf16") == "native"
    assert probe(driver=driver).capability is None
    rdna2 = dataclasses.replace(card, name="AMD Radeon RX 6800", architecture="gfx1030")
    assert probe(driver=FakeDriver(rdna2)).get_support("bf16") == "emulated"
    assert not probe(driver=FakeDriver(rdna2)).tensor_cores


def test_apple_and_intel_gpus_are_probed() -> None:
    m2 = Accelerator(kind="mps", device="mps", name="Apple M2 Max", has_fp64=False)
    arc = Accelerator(kind="xpu", device="xpu:0", name="Intel(R) Arc(TM) A770 Graphics", has_fp64=False)
    assert probe("mps", driver=FakeDriver(m2)).get_support("bf16") == "emulated"
    assert probe("mps", driver=FakeDriver(m2)).get_support("fp64") == "missing"
    assert probe("xpu", driver=FakeDriver(arc)).get_support("bf16") == "native"
    assert probe("xpu", driver=FakeDriver(arc)).get_support("fp64") == "missing"


def test_a_cpu_is_judged_by_its_flags() -> None:
    xeon, arm = probe(driver=FakeDriver(cpuinfo=XEON)), probe(driver=FakeDriver(cpuinfo=NEOVERSE_N1))
    assert (xeon.get_support("bf16"), xeon.get_support("fp16"), xeon.tensor_cores) == ("native", "emulated", True)
    # asimdhp without asimdfhm: fp16 sums, no use for training.
    assert (arm.get_support("bf16"), arm.get_support("fp16"), arm.tensor_cores) == ("emulated", "emulated", False)
    graviton3 = NEOVERSE_N1.replace("asimddp", "asimddp asimdfhm bf16 i8mm").replace("0xd0c", "0xd40")
    assert probe(driver=FakeDriver(cpuinfo=graviton3)).get_support("bf16") == "native"
    assert probe(driver=FakeDriver(cpuinfo=graviton3)).get_support("fp16") == "native"


def test_a_cpu_has_a_name_also_where_linux_gives_none() -> None:
    assert probe(driver=FakeDriver(cpuinfo=XEON)).name == "Intel(R) Xeon(R) Platinum 8480+"
    assert probe(driver=FakeDriver(cpuinfo=NEOVERSE_N1, brand="aarch64")).name == "aarch64"
    assert probe(driver=FakeDriver(cpuinfo="", brand="Apple M2", features=["FEAT_BF16"])).name == "Apple M2"
    assert (
        probe(driver=FakeDriver(cpuinfo="", brand="Apple M2", features=["FEAT_BF16"])).get_support("bf16") == "native"
    )
    assert probe(driver=FakeDriver(cpuinfo="")).name == "CPU"


def test_this_machine_has_a_cpu_with_name_memory_and_formats() -> None:
    cpu = probe("cpu", driver=Driver())
    assert cpu.device == "cpu"
    assert cpu.name
    assert cpu.memory_total_bytes > 2**28
    assert cpu.memory_free_bytes is not None
    assert 0 < cpu.memory_free_bytes <= cpu.memory_total_bytes
    assert cpu.get_support("fp32") == cpu.get_support("fp64") == "native"
    assert cpu.driver


# --- measurements are kept per device, driver and torch version; a broken cache never breaks detect ---


class Counter:
    """Measures on a fake T4 and counts how often."""

    def __init__(self) -> None:
        self.driver, self.count = FakeDriver(T4, speedups={"fp16": 5.0}), 0

    def __call__(self, hardware: Hardware) -> Hardware:
        self.count += 1
        return measure(hardware, sizes=TINY, driver=self.driver)


@pytest.fixture
def t4() -> Hardware:
    return probe(driver=FakeDriver(T4))


def test_the_second_time_nothing_is_measured(tmp_path: Path, t4: Hardware) -> None:
    counter = Counter()
    first = measure_once(t4, tmp_path, counter)
    again = measure_once(t4, tmp_path, counter)
    assert counter.count == 1
    assert again == first


def test_fresh_measures_again(tmp_path: Path, t4: Hardware) -> None:
    counter = Counter()
    measure_once(t4, tmp_path, counter)
    measure_once(t4, tmp_path, counter, fresh=True)
    assert counter.count == 2


def test_free_memory_is_that_of_now_and_not_of_the_cache(tmp_path: Path, t4: Hardware) -> None:
    measure_once(t4, tmp_path, Counter())
    fuller = dataclasses.replace(t4, memory_free_bytes=123)
    assert measure_once(fuller, tmp_path, Counter()).memory_free_bytes == 123


@pytest.mark.parametrize("field", ["name", "uuid", "driver", "torch_version"])
def test_another_device_driver_or_torch_has_another_file(t4: Hardware, field: str) -> None:
    assert make_cache_key(dataclasses.replace(t4, **{field: "other"})) != make_cache_key(t4)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"capability": [1]}', "null", "\x00\xff"])
def test_a_device_with_a_corrupt_file_is_measured_again(tmp_path: Path, t4: Hardware, content: str) -> None:
    counter = Counter()
    path = tmp_path / make_cache_key(t4)
    path.write_text(content)
    hardware = measure_once(t4, tmp_path, counter)
    assert counter.count == 1
    assert hardware.find_speedup("fp16") == pytest.approx(5.0)
    measure_once(t4, tmp_path, counter)
    assert counter.count == 1


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path: Path, t4: Hardware) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    hardware = measure_once(t4, in_the_way / "cache", Counter())
    assert hardware.measurements
    assert any("could not be stored" in note for note in hardware.notes)


def test_what_was_only_looked_at_is_not_stored(tmp_path: Path, t4: Hardware) -> None:
    busy = FakeDriver(T4, others="busy")
    measure_once(t4, tmp_path, lambda hardware: measure(hardware, driver=busy))
    assert list(tmp_path.iterdir()) == []


# --- clocks, memory and energy ---


def test_a_stopwatch_gives_laps() -> None:
    clock = HandClock()
    watch = Stopwatch(clock=clock)
    clock.now_s += 2.0
    assert watch.elapsed_s == 2.0
    assert watch.restart() == 2.0
    clock.now_s += 0.5
    assert watch.elapsed_s == 0.5


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ([], 0.0),
        ([0.5] * 3, 16.0),
        ([60.0] + [0.5] * 30, 16.0),  # a slow start leaves the window
        ([20.0] * 4, 0.4),  # steps longer than the window still have a rate
        ([0.5] * 3 + ["validation"] + [0.25] * 2, 32.0),
    ],
)
def test_throughput_counts_the_samples_of_the_last_seconds(steps: list[float | str], rate: float) -> None:
    clock = HandClock()
    meter = Throughput(window_s=10.0, clock=clock)
    for step_s in steps:
        clock.now_s += 30.0 if isinstance(step_s, str) else step_s
        if isinstance(step_s, str):
            meter.restart()
        else:
            meter.add(8)
    assert meter.compute_rate() == pytest.approx(rate)


CPU = torch.device("cpu")


def touch_and_free(num_bytes: int) -> None:
    """By mmap: an allocator may keep freed memory, the kernel does not."""
    with mmap.mmap(-1, num_bytes) as block:
        block.write(b"\1" * num_bytes)


def test_the_cpu_peak_remembers_memory_that_was_freed_until_it_is_reset() -> None:
    if not CLEAR_REFS.exists():
        pytest.skip("only Linux can reset the peak: this was NOT tested")
    num_bytes = 200_000_000
    touch_and_free(num_bytes)
    before = get_peak_memory_bytes(CPU)
    reset_peak(CPU)
    after = get_peak_memory_bytes(CPU)
    assert before - after > 0.9 * num_bytes


def test_the_description_of_the_cpu_names_total_available_and_peak() -> None:
    description = describe_memory(CPU)
    assert [line.split(":")[0] for line in description.splitlines()] == [
        "total on this machine",
        "available",
        "peak of this run",
    ]


def test_a_device_that_does_not_count_has_no_peak_and_a_cpu_no_energy_counter() -> None:
    assert EnergyMeter(CPU).read_joules() is None
    assert get_peak_memory_bytes(torch.device("meta")) is None
