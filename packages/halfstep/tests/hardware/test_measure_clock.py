from __future__ import annotations

import mmap

import pytest
import torch

from halfstep.hardware.clock import Stopwatch, Throughput
from halfstep.hardware.memory import CLEAR_REFS, describe_memory, get_peak_memory_bytes, reset_peak
from halfstep.hardware.nvml import EnergyMeter


class HandClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
